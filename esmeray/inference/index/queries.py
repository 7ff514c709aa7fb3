"""Queries of an index: vectors that are there, or those of sequences, by the model of the index."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from esmeray.common.errors import ConfigError
from esmeray.common.remote import local_path
from esmeray.dataset.embeddings.manifest import MANIFEST_FILE, read_manifest
from esmeray.dataset.embeddings.reader import Embeddings, open_vectors
from esmeray.dataset.section import IngestSection
from esmeray.inference.index.parts import IndexManifest

_KEPT = ("layers", "precision", "weights", "long", "max_length", "overlap")
"""Settings of a job that decide on a sequence's vector."""


@contextmanager
def opened_queries(
    queries: Path, manifest: IndexManifest, ingest: IngestSection, model: str | None = None
) -> Iterator[Embeddings]:
    """The vectors of a folder of embeddings, or of FASTA files or a store, which are embedded for the time of a block.

    ``model``: in place of the one that the index names. Raises ConfigError where it names none.
    """
    source = local_path(queries)
    if (source / MANIFEST_FILE).is_file():
        # By the name of the database's output, of which a maker of other vectors may know nothing.
        has_name = manifest.output in read_manifest(source).outputs
        yield open_vectors(source, manifest.output if has_name else None)
        return
    known = manifest.model
    if known is None and model is None:
        raise ConfigError(
            f"--search.queries {queries}: is no folder of embeddings, and the database does not name its model; give "
            "--search.model, or embeddings"
        )
    # Here: vectors as queries need none of what runs a model.
    from esmeray.inference.embedding.job import run_job
    from esmeray.inference.embedding.section import EmbedJobSection, EmbedSection

    of_job = {} if known is None else known.settings
    settings = {name: value for name, value in of_job.items() if name in _KEPT}
    # As the database was computed, or vectors would differ by more than proteins do; files are for this block alone.
    settings |= {"outputs": [manifest.output.partition("_layer_")[0]], "format": "npy", "dtype": "fp32"}
    with TemporaryDirectory() as folder:
        job = EmbedJobSection(
            **EmbedSection(**settings).model_dump(),
            models=[model or (known.source if known else "")],
            random_weights=known is not None and known.random_weights,
            input=[str(queries)],
            output=Path(folder) / "queries",
        )
        run_job(job, ingest)
        yield open_vectors(job.output, manifest.output)
