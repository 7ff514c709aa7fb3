"""Vectors of proteins by a model: an embedding job into a folder, before a run is trained and for what is predicted."""

from pathlib import Path

import numpy as np

from esmeray.common.errors import DataError, parsing
from esmeray.common.verification import verified
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
    """The section with embeddings of the proteins, computed beside their data where a model is named without them."""
    settings = terms.embeddings
    if settings.model == COMPOSITION or settings.store is not None:  # nothing to compute, or it is there
        return terms
    prepared = prepare(data, RunFolder(run.storage_path, run.name).stores)
    folder = prepared.with_name(name_of_content(f"{prepared.name}-embeddings", [settings.model_dump()]))
    compute(Store(prepared / SEQUENCES), settings, folder)
    return terms.model_copy(update={"embeddings": settings.model_copy(update={"store": str(folder)})})


def vectors_of(store: Store, settings: EmbeddingsSection, folder: Path) -> Vectors:
    """(N, C) of all records of a store, by the model of a run; computed into ``folder`` where that takes a model."""
    if settings.model != COMPOSITION:
        compute(store, settings, folder)
    return read_vectors(store, settings.model_copy(update={"store": str(folder)}))


def compute(store: Store, settings: EmbeddingsSection, folder: Path) -> None:
    """Run the embedding job, or resume it; nothing where the folder is complete."""
    run_job(
        EmbedJobSection(
            models=[settings.model],
            input=[str(store.path)],
            output=folder,
            random_weights=settings.random_weights,
            max_length=settings.max_length,
            long="crop",
            format="npy",
        )
    )


def save_known(vectors_RC: Vectors, settings: EmbeddingsSection, folder: Path) -> None:
    """Keep the vectors of a run's proteins in its folder, and what they were computed by."""
    # In the run, which then predicts without the embeddings' folder, wherever it is taken.
    np.save(folder / "vectors.npy", vectors_RC)
    if settings.store is not None:
        (folder / "weights.txt").write_text(_space(Path(settings.store)), encoding="utf-8")


def load_known(folder: Path, computed: Path) -> Vectors:
    """The vectors that :func:`save_known` saved.

    Raises DataError for damage, and for another model, layer or pooling than that of ``computed``.
    """
    # Vectors of two models have no distance that means anything, and nothing else would notice.
    weights = folder / "weights.txt"
    vectors = verified(folder / "vectors.npy")
    if weights.is_file() and verified(weights).read_text(encoding="utf-8") != _space(computed):
        raise DataError(f"{folder}: was computed by other weights than the run's model has now; train again")
    with parsing(vectors, "train again"):
        return np.load(vectors)


def _space(folder: Path) -> str:
    return str(open_vectors(folder, "mean").manifest.space("mean"))
