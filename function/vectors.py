"""Vectors of the proteins of a run: their composition, or a folder of embeddings.

Shape legend: R records, C channels.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from dataset.embeddings.reader import open_vectors
from dataset.store.reader import Store
from function.composition import composition
from train_config.terms_schema import COMPOSITION, EmbeddingsSection

Vectors = NDArray[np.float32]


def read_vectors(store: Store, settings: EmbeddingsSection) -> Vectors:
    """(R, C) of all records of a store.

    Raises DataError where the embeddings that the settings name lack a record, or one is not finite.
    """
    if settings.model == COMPOSITION:
        return composition([store.text(record) for record in range(len(store))])
    folder = Path(str(settings.store)).expanduser()
    embeddings = open_vectors(folder, "mean")
    places = {name: place for place, name in enumerate(embeddings.ids)}
    ids = [store.id(record) for record in range(len(store))]
    if lost := next((name for name in ids if name not in places), None):
        raise DataError(f"{folder}: has no embedding of {lost}; embed all sequences of the run")
    return np.concatenate([block_nC for _, block_nC in embeddings.finite_blocks()])[[places[name] for name in ids]]


class VectorRows:
    """Vectors by record, as batches of features read them."""

    def __init__(self, vectors_RC: Vectors) -> None:
        self.vectors_RC, self.channels = vectors_RC, vectors_RC.shape[1]

    def rows(self, records_N: NDArray[np.int64]) -> Iterator[Vectors]:
        """(1, C) of each record."""
        return iter(self.vectors_RC[records_N][:, None])
