"""Compute protein vectors with an embedding job, before training and for the proteins to predict."""

from pathlib import Path

import numpy as np

from esmeray.common.errors import DataError, parsing
from esmeray.common.publishing import verified
from esmeray.dataset.embeddings.reader import open_vectors
from esmeray.dataset.section import DataSection
from esmeray.dataset.store.conversion import name_of_content
from esmeray.dataset.store.reader import Store
from esmeray.function.proteins import SEQUENCES, prepare
from esmeray.function.section import COMPOSITION, EmbeddingsSection
from esmeray.function.vectors import Vectors, read_vectors
from esmeray.inference.embedding.job import run_job
from esmeray.inference.embedding.section import EmbedJobSection
from esmeray.run_folder.paths import RunFolder
from esmeray.run_folder.section import RunSection
from esmeray.tasks.terms.section import TermsSection


def with_vectors(run: RunSection, data: DataSection, terms: TermsSection) -> TermsSection:
    """Return the section with the proteins' embeddings. If it only names a model, they are computed."""
    settings = terms.embeddings
    if settings.model == COMPOSITION or settings.store is not None:  # nothing to compute, or computed already
        return terms
    prepared = prepare(data, RunFolder(run.storage_path, run.name).stores)
    folder = prepared.with_name(name_of_content(f"{prepared.name}-embeddings", [settings.model_dump()]))
    compute(Store(prepared / SEQUENCES), settings, folder)
    return terms.model_copy(update={"embeddings": settings.model_copy(update={"store": str(folder)})})


def vectors_of(store: Store, settings: EmbeddingsSection, folder: Path) -> Vectors:
    """(N, C) vectors of all records of a store, by the run's model; computed into ``folder`` if necessary."""
    if settings.model != COMPOSITION:
        compute(store, settings, folder)
    return read_vectors(store, settings.model_copy(update={"store": str(folder)}))


def compute(store: Store, settings: EmbeddingsSection, folder: Path) -> None:
    """Run or resume the embedding job; do nothing if the folder is complete."""
    run_job(
        EmbedJobSection(
            models=[settings.model],
            input=[str(store.path)],
            output=folder,
            max_length=settings.max_length,
            long="crop",
            format="npy",
        )
    )


def save_known(vectors_RC: Vectors, settings: EmbeddingsSection, folder: Path) -> None:
    """Save the vectors of a run's proteins and the identity of their embedding space in the run's folder."""
    # Saved with the run, so that the run can be moved and predicts without the embeddings folder.
    np.save(folder / "vectors.npy", vectors_RC)
    if settings.store is not None:
        (folder / "weights.txt").write_text(_space(Path(settings.store)), encoding="utf-8")


def load_known(folder: Path, computed: Path) -> Vectors:
    """Load the vectors that :func:`save_known` saved.

    Raises DataError for damaged files, or if ``computed`` has another model, layer or pooling.
    """
    # Distances between vectors of different models are meaningless, and no later check would detect this.
    weights = folder / "weights.txt"
    vectors = verified(folder / "vectors.npy")
    if weights.is_file() and verified(weights).read_text(encoding="utf-8") != _space(computed):
        raise DataError(f"{folder}: was computed with other weights than the run's model has now; train again")
    with parsing(vectors, "train again"):
        return np.load(vectors)


def _space(folder: Path) -> str:
    return str(open_vectors(folder, "mean").manifest.space("mean"))
