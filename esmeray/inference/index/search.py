"""Open an index, and search for the nearest neighbours of proteins: a DataFrame of hits, or hits one by one.

Queries are existing vectors, or sequences that are embedded by the model of the index.

Shape legend: n queries of a block, C channels, k hits of a query.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from esmeray.cluster.section import RaySection
from esmeray.common.errors import ConfigError
from esmeray.common.progress import record_bar
from esmeray.common.remote import local_path, uri_of
from esmeray.dataset.embeddings.manifest import MANIFEST_FILE, read_manifest
from esmeray.dataset.embeddings.reader import Embeddings, open_vectors
from esmeray.dataset.section import IngestSection
from esmeray.inference.index.exact import ExactIndex, kinds
from esmeray.inference.index.index import Index
from esmeray.inference.index.metric import MetricName, unusable
from esmeray.inference.index.parts import INDEX_FILE, IndexManifest, SourceModel, open_part, read_index_manifest
from esmeray.inference.retrieval.conformal import Calibration, ascending, calibrated
from esmeray.train_config.section import NonNegativeInt, PositiveInt, Section

if TYPE_CHECKING:
    import pandas as pd

    from esmeray.inference.settings import SearchSettings

_BLOCK = 1024
_KEPT = ("layers", "precision", "weights", "long", "max_length", "overlap")
"""Job settings that a sequence's vector depends on."""


class SearchSection(Section):
    """Queries, and the kind of search."""

    queries: Path | None = None
    """Folder of embeddings, or FASTA file, to search with. Default: the database, without hits of itself."""
    top_k: PositiveInt = 10
    """Hits of each query, at most."""
    metric: MetricName | None = None
    """Similarity: cosine, dot or l2. Default: the metric of the index; for a folder, cosine."""
    probes: PositiveInt | None = None
    """Clusters of a compressed index that are searched for a query. Default: 32."""
    model: str | None = None
    """Model of queries that are sequences. Default: the model that computed the database."""
    name: str | None = None
    """Output of the folders. Default: their first."""
    workers: PositiveInt | None = None
    """Actors of a Ray cluster that search an index, each its own parts; at most one a part. Default: this process."""
    error_rate: Annotated[float | None, Field(gt=0, lt=1)] = None
    """Largest expected share of false hits of a query. none: all hits, whatever their score."""
    calibration: Path | None = None
    """CSV, TSV or Parquet file of the labels of the database, with a column id, for an error rate."""
    calibration_queries: Path | None = None
    """File of the ids of the database that calibrate, one a line. Default: all that have a label."""
    calibration_level: NonNegativeInt = 0
    """Last parts of a label, with dots between them, in which a true hit may differ."""
    label_column: str = "label"
    """Column of the labels in the file of labels."""
    not_missing: list[str] = Field(default=[])
    """Labels that are names, although tables use them for missing values, e.g. NA (neuraminidase)."""


@dataclass(frozen=True)
class Search:
    """A search that has begun; without ``queries`` each protein of the index is searched in the rest of it."""

    index: Index
    queries: Embeddings | None
    calibration: Calibration | None
    top_k: int

    @property
    def count(self) -> int:
        """Number of queries."""
        return self.index.count if self.queries is None else len(self.queries)

    @property
    def columns(self) -> list[str]:
        return ["query", "rank", "target", "score", *(["p_value"] if self.calibration else [])]

    def hits(self) -> Iterator[tuple[Any, ...]]:
        """The values of :attr:`columns` of each hit, the best of a query first."""
        hits = self._own_hits() if self.queries is None else self._hits_of(self.queries)
        with record_bar("searching") as bar:
            for number, (query, rows_k, scores_k) in enumerate(hits, 1):
                columns = [scores_k.tolist()]
                if self.calibration:
                    nearness_k = ascending(self.index.metric, scores_k)
                    rows_k = rows_k[nearness_k >= self.calibration.threshold]
                    columns.append(self.calibration.p_values(nearness_k).tolist())
                for rank, (target, *values) in enumerate(zip(self.index.ids(rows_k), *columns, strict=False), 1):
                    yield query, rank, target, *values
                bar(number / self.count, number)

    def _own_hits(self) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.floating]]]:
        """Yield the id of each protein of the index, with rows (k,) and scores (k,) of its hits."""
        for row, rows_k, scores_k in self.index.own_hits(np.arange(self.index.count), self.top_k):
            (name,) = self.index.ids([row])
            yield name, rows_k, scores_k

    def _hits_of(self, queries: Embeddings) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.floating]]]:
        """Yield the id of each query, with rows (k,) and scores (k,) of its hits."""
        for start, block_nC in queries.finite_blocks(_BLOCK):
            queries.refuse(start, *unusable(self.index.metric, block_nC))
            hits = zip(*self.index.search(block_nC, self.top_k), strict=True)
            for number, (rows_k, scores_k) in enumerate(hits, start):
                is_hit_k = rows_k >= 0  # -1: the index has no more
                yield queries.ids[number], rows_k[is_hit_k], scores_k[is_hit_k]


def open_index(path: Path | str, probes: int | None = None, parts: slice = slice(None)) -> Index:
    """Open the index in a folder, or at a URI, which is downloaded.

    ``probes``: number of clusters that a compressed index searches per query. ``parts``: parts to open; rows keep their
    numbers. Raises DataError for a missing or damaged index; ConfigError for probes with an exact index.
    """
    folder = local_path(path)
    whole = read_index_manifest(folder, uri_of(path))
    first_row = sum(part.rows for part in whole.parts[: parts.start or 0])
    manifest = whole.model_copy(update={"parts": whole.parts[parts]})
    if manifest.kind == "exact":
        if probes is not None:
            raise ConfigError(f"{path}: is an exact index without clusters to probe; remove search.probes")
        opened = [open_part(folder, part, kinds(manifest, part), by_blocks=False) for part in manifest.parts]
        index: Index = ExactIndex(folder, manifest, opened, first_row)
    else:
        from esmeray.inference.index.compressed import CompressedIndex  # imported here, because it loads faiss

        index = CompressedIndex(folder, manifest, whole.count, first_row, probes)
    index.source = uri_of(path) or folder
    return index


def search(
    database: str | Path,
    queries: str | Path | None = None,
    *,
    address: str | None = None,
    **settings: "Unpack[SearchSettings]",
) -> "pd.DataFrame":
    """Find the nearest neighbours of proteins by their embeddings, as ``esmeray embed search``.

    Args:
        database: an index, or a folder of embeddings, which is compared exactly; or the URI of one.
        queries: a folder of embeddings, or FASTA files, which are embedded by the model of the database. By default
            each protein of the database is searched in the rest of it.
        address: Ray cluster of ``workers``.
        settings: others of the command, such as ``top_k``, ``metric``, ``probes``, ``error_rate`` and ``calibration``.

    Returns a row for each hit: ``query``, ``rank``, ``target`` and ``score`` (cosine, dot product or L2 distance), with
    an error rate also ``p_value``. All hits are in memory; for a whole proteome, use the command, which writes a file.
    Raises EsmerayError for what the command refuses.

    >>> hits = esmeray.search("vectors", top_k=1)
    >>> [*hits.columns], hits["query"].tolist()
    (['query', 'rank', 'target', 'score'], ['first', 'second', 'third'])
    """
    import pandas as pd

    with searching(database, SearchSection.of(queries=queries, **settings), IngestSection(), address) as opened:
        return pd.DataFrame([*opened.hits()], columns=opened.columns)


@contextmanager
def searching(
    database: str | Path, section: SearchSection, ingest: IngestSection, address: str | None
) -> Iterator[Search]:
    """Open a database and queries for the time of a block, and calibrate. Raises as :func:`search`."""
    if (section.error_rate is None) != (section.calibration is None):
        raise ConfigError("--search.error_rate and --search.calibration need each other; give both or neither")
    opened = _opened(database, section)
    context = (
        nullcontext()
        if section.queries is None
        else opened_queries(section.queries, opened.manifest, ingest, section.model)
    )
    with _searched(opened, Path(database), section, address) as index, context as queries:
        if queries is not None:
            queries.refuse_other_space(index)
        calibration = None
        if section.error_rate is not None and section.calibration is not None:
            calibration = calibrated(
                index,
                section.calibration,
                section.label_column,
                section.error_rate,
                section.calibration_level,
                section.calibration_queries,
                section.top_k,
                section.not_missing,
            )
        yield Search(index, queries, calibration, section.top_k)


def _opened(database: str | Path, section: SearchSection) -> Index:
    """Open the index of a folder or URI, or build one in memory of the embeddings there."""
    folder = local_path(database)
    if not (folder / INDEX_FILE).is_file():
        read_manifest(folder, uri_of(database))  # if it is missing, the error names the URI and not its copy
        source = open_vectors(folder, section.name)
        if section.probes is not None:
            raise ConfigError(
                "--search.probes: embeddings are searched exactly; to use probes, build a compressed index"
            )
        from esmeray.inference.index.build import memory_index  # here: a finished index needs none of it

        return memory_index(source, section.metric or "cosine")
    index = open_index(folder, section.probes)
    for name, wanted, there in ("metric", section.metric, index.metric), ("name", section.name, index.name):
        if wanted not in (None, there):
            raise ConfigError(f"--search.{name} {wanted}: {folder} has {name} {there}; remove the option")
    return index


def _searched(
    index: Index, database: Path, section: SearchSection, address: str | None
) -> AbstractContextManager[Index]:
    """The index as this process searches it, or actors of a cluster."""
    if section.workers is None:
        if address is not None:
            raise ConfigError("--ray.address: searching on a cluster needs --search.workers; give both or neither")
        return nullcontext(index)
    from esmeray.inference.index.cluster import on_cluster  # here: it loads Ray

    return on_cluster(index, database, RaySection(address=address), section.workers, section.probes)


@contextmanager
def opened_queries(
    queries: Path, manifest: IndexManifest, ingest: IngestSection, model: str | None = None
) -> Iterator[Embeddings]:
    """Open the vectors of an embeddings folder, or embed FASTA files or a store for the duration of a block.

    ``model``: overrides the index's model. Raises ConfigError if neither names a model.
    """
    source = local_path(queries)
    if (source / MANIFEST_FILE).is_file():
        # Use the index's output name if the folder has it; vectors made by other tools may have a different name.
        has_name = manifest.output in read_manifest(source).outputs
        yield open_vectors(source, manifest.output if has_name else None)
        return
    if manifest.model is None and model is None:
        raise ConfigError(
            f"--search.queries {queries}: not a folder of embeddings, and the database does not record its "
            "model; give --search.model, or embeddings"
        )
    # Imported here, because existing vectors need no model.
    from esmeray.inference.embedding.job import run_job
    from esmeray.inference.embedding.section import EmbedJobSection, EmbedSection

    known = manifest.model or SourceModel(source="", random_weights=False, settings={})
    settings = {name: value for name, value in known.settings.items() if name in _KEPT}
    # Embedded with the index's settings, because other settings would change the vectors more than proteins differ. The
    # file settings apply to this block only.
    settings |= {"outputs": [manifest.output.partition("_layer_")[0]], "format": "npy", "dtype": "fp32"}
    with TemporaryDirectory() as folder:
        job = EmbedJobSection(
            **EmbedSection(**settings).model_dump(),
            models=[model or known.source],
            random_weights=known.random_weights,
            input=[str(queries)],
            output=Path(folder) / "queries",
        )
        run_job(job, ingest)
        yield open_vectors(job.output, manifest.output)
