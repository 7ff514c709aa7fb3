"""Find the nearest neighbours of proteins by their embeddings.

The database is an index that 'embed index' made, or a folder of embeddings, which is compared exactly, in memory: 4
bytes a value. Queries are a folder of embeddings or FASTA files, which are embedded by the model of the database.
Writes a TSV: query, rank, target, and score: the cosine, the dot product, or the L2 distance. Without queries each
protein of the database is searched in the rest of it. By --search.workers actors of a Ray cluster search an index, each
its own parts of it, with the same hits.

--search.error_rate 0.1 keeps the hits above a threshold at which a query has on average at most 10 % false ones. A
table of labels says what is false: a hit of another label (--search.calibration_level 1: whose label differs before its
last part). Proteins of the database calibrate, those of --search.calibration_queries, each searched in the rest; the
bound holds for queries like them, so take none that a model was trained on. A column p_value has the chance that a
query without relatives has so good a hit.

Examples:
  esmeray embed search proteins.index --search.queries queries.fasta --search.output hits.tsv
  esmeray embed search swissprot --search.queries proteome --search.output hits.tsv
  esmeray embed search swissprot --search.output neighbours.tsv --search.top_k 50 --search.name mean
  esmeray embed search s3://lab/proteins.index --search.queries queries --search.output hits.tsv --search.workers 8
  esmeray embed search swissprot --search.queries new.fasta --search.output hits.tsv --search.error_rate 0.1 \
--search.calibration labels.tsv --search.calibration_queries known.txt
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from esmeray.cluster.section import RaySection
from esmeray.common.errors import ConfigError
from esmeray.common.progress import record_bar
from esmeray.common.remote import local_path
from esmeray.common.text import counted
from esmeray.dataset.embeddings.formats.base import Values
from esmeray.dataset.embeddings.manifest import ranges
from esmeray.dataset.embeddings.reader import Embeddings, open_vectors
from esmeray.inference.index.index import Index
from esmeray.inference.index.metric import MetricName, unusable
from esmeray.inference.index.opening import open_index
from esmeray.inference.index.parts import INDEX_FILE
from esmeray.inference.index.queries import opened_queries
from esmeray.inference.retrieval.conformal import ascending, calibrated
from esmeray.run_folder.section import StorageSection
from esmeray.tools.grammar import ClusterSection, IngestedSection, Made, command
from esmeray.train_config.section import NonNegativeInt, PositiveInt, Section

_BLOCK = 1024


class SearchSection(Section):
    """Queries, and the kind of search."""

    queries: Path | None = None
    """Folder of embeddings, or FASTA file, to search with. Default: the database, without hits of itself."""
    output: Path
    """TSV file of the results to write."""
    top_k: PositiveInt = 10
    """Hits of each query, at most."""
    metric: MetricName | None = None
    """Measure by which proteins are near: cosine, dot or l2. Default: the index's; of a folder, cosine."""
    probes: PositiveInt | None = None
    """Clusters of a compressed index that are searched for a query. Default: 32."""
    model: str | None = None
    """Model of queries that are sequences. Default: the one by which the database was computed."""
    name: str | None = None
    """Output of the folders. Default: their first."""
    workers: PositiveInt | None = None
    """Actors of a Ray cluster that search an index, each its own parts; at most one a part. Default: this process."""
    cpus_per_worker: PositiveInt = 1
    """CPU cores that each actor gets."""
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
    """Labels that are names, although tables mean a missing value by them, e.g. NA (neuraminidase)."""


@command("embed search", __doc__, made_by="search")
def main(
    database: Annotated[Path, Field(description="Index, or folder of embeddings, to search in; or the URI of one.")],
    search: SearchSection,
    data: IngestedSection,
    storage: StorageSection,
    ray: ClusterSection,
    made: Made,
) -> None:
    storage.apply()
    made.refuse_file(search.output)
    if (search.error_rate is None) != (search.calibration is None):
        raise ConfigError("--search.error_rate and --search.calibration go together; give both or neither")
    start_s = time.perf_counter()
    opened = _opened(local_path(database), search)
    own = search.queries is None
    context = (
        nullcontext()
        if search.queries is None
        else opened_queries(search.queries, opened.manifest, data.ingest, search.model)
    )
    hits = 0
    with _searched(opened, database, search, ray) as index, context as queries:
        if queries is not None:
            queries.refuse_other_space(index)
        count = index.count if queries is None else len(queries)
        calibration = None
        if search.error_rate is not None and search.calibration is not None:
            calibration = calibrated(
                index,
                search.calibration,
                search.label_column,
                search.error_rate,
                search.calibration_level,
                search.calibration_queries,
                search.top_k,
                search.not_missing,
            )
        with (
            made.file(search.output) as building,
            building.open("w", encoding="utf-8") as file,
            record_bar("searching") as bar,
        ):
            file.write("query\trank\ttarget\tscore" + ("\tp_value" if calibration else "") + "\n")
            for start, ids, block_nC in _blocks(index, queries):
                # One more where each protein finds itself, which is left out below.
                rows_nk, scores_nk = index.search(block_nC, search.top_k + own)
                for number, name in enumerate(ids):
                    # -1: an index may have no more.
                    is_hit_k = (rows_nk[number] >= 0) & ~(own & (rows_nk[number] == start + number))
                    rows = rows_nk[number][is_hit_k][: search.top_k]
                    scores = scores_nk[number][is_hit_k][: search.top_k]
                    columns = [[f"{score:.6g}" for score in scores.tolist()]]
                    if calibration:
                        nearness = ascending(index.metric, scores)
                        rows = rows[nearness >= calibration.threshold]
                        columns.append([f"{value:.3g}" for value in calibration.p_values(nearness).tolist()])
                    for rank, target, *values in zip(range(1, len(rows) + 1), index.ids(rows), *columns, strict=False):
                        file.write("\t".join([name, str(rank), target, *values]) + "\n")
                    hits += len(rows)
                bar((start + len(ids)) / count, start + len(ids))
    searched = f"{counted(count, 'protein{s}')} searched in {index.count:,}"
    kind = f"{index.metric}, {index.manifest.kind}, {time.perf_counter() - start_s:.1f} s"
    if calibration:
        # A distance where the measure is one.
        print(f"threshold of the score: {ascending(index.metric, calibration.threshold):.6g}")
        print(calibration.training)
    print(f"{search.output}: {counted(hits, 'hit{s}')} of {searched} ({kind})")


def _opened(folder: Path, section: SearchSection) -> Index:
    """The index in a folder, or one in memory of the embeddings there."""
    if not (folder / INDEX_FILE).is_file():
        source = open_vectors(folder, section.name)
        if section.probes is not None:
            raise ConfigError("--search.probes: embeddings are compared exactly; make a compressed index of them")
        from esmeray.inference.index.build import memory_index  # here: a finished index needs none of it

        return memory_index(source, section.metric or "cosine")
    index = open_index(folder, section.probes)
    for name, wanted, there in ("metric", section.metric, index.metric), ("name", section.name, index.name):
        if wanted not in (None, there):
            raise ConfigError(f"--search.{name} {wanted}: {folder} is an index of {there}; leave it out")
    return index


def _searched(
    index: Index, database: Path, section: SearchSection, ray: ClusterSection
) -> AbstractContextManager[Index]:
    """The index as this process searches it, or actors of a cluster."""
    if section.workers is None:
        if ray.address is not None:
            raise ConfigError("--ray.address: the actors that search there are --search.workers; give both or none")
        return nullcontext(index)
    from esmeray.inference.index.cluster import on_cluster  # here: it loads Ray

    return on_cluster(
        index, database, RaySection(address=ray.address), section.workers, section.cpus_per_worker, section.probes
    )


def _blocks(index: Index, queries: Embeddings | None) -> Iterator[tuple[int, list[str], Values]]:
    """The number of the first query of a block, ids and vectors; of the index itself where there are no queries."""
    if queries is None:
        for start, stop in ranges(index.count, _BLOCK):
            rows = np.arange(start, stop)
            yield start, index.ids(rows), index.vectors(rows)
        return
    for start, block_nC in queries.finite_blocks(_BLOCK):
        queries.refuse(start, *unusable(index.metric, block_nC))
        yield start, queries.ids[start : start + len(block_nC)], block_nC
