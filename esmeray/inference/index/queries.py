"""Queries of an index: existing vectors, or sequences embedded by the index's model."""

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
"""Job settings that a sequence's vector depends on."""


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
    known = manifest.model
    if known is None and model is None:
        raise ConfigError(
            f"--search.queries {queries}: not a folder of embeddings, and the database does not record its "
            "model; give --search.model, or embeddings"
        )
    # Imported here, because existing vectors need no model.
    from esmeray.inference.embedding.job import run_job
    from esmeray.inference.embedding.section import EmbedJobSection, EmbedSection

    of_job = {} if known is None else known.settings
    settings = {name: value for name, value in of_job.items() if name in _KEPT}
    # Embedded with the index's settings, because other settings would change the vectors more than proteins differ. The
    # file settings apply to this block only.
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
