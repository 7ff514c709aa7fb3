"""Predicted structures, by sequence, under the fingerprint of their predictor.

They are shards of :mod:`esmeray.dataset.embeddings.cache`: 26 bytes a residue, written by any number of processes,
bounded.

Shape legend: N sequences, L residues of one.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from esmeray.common.errors import DataError, expanded
from esmeray.common.text import counted
from esmeray.dataset.embeddings.cache import FeatureStore, write_shard
from esmeray.dataset.fasta.records import keys_of
from esmeray.dataset.section import DataSection

FAILURE_FILE = "failure.txt"
"""In the cache while whoever predicts has given up: why."""
_POLL_S, _LOOK_S, _PATIENCE_S = 0.5, 10.0, 1800.0
"""Between looks of one that waits, between those of one that does not, and until waiting ends."""


class Predicted(NamedTuple):
    """(L, 4, 3) N, CA, C and O in Å, and (L,) pLDDT, 0 to 100."""

    coordinates: NDArray[np.floating]
    confidence: NDArray[np.floating]


class PredictedStructures:
    """Cached structures by key of the sequence, for training.

    Args:
        cache: folder of one predictor's shards, or of such folders where there is one.
        on_miss: for a sequence that has none. error: refuse; null: it has none, until somebody writes it; wait: until
            somebody writes it.
        longest: residues of a sequence that is waited for.
    """

    def __init__(
        self, cache: Path | str, on_miss: Literal["error", "null", "wait"] = "error", longest: int | None = None
    ) -> None:
        self._cache, self._on_miss, self._longest = Path(cache), on_miss, longest
        self._wanted = self._hits = 0
        self._open()

    @property
    def hit_rate(self) -> float:
        """Share of the wanted structures that were there at once."""
        return self._hits / max(1, self._wanted)

    def has(self, keys_N2: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """(N,) bool: which sequences had a structure when the folder was last looked at."""
        return self._features.has(keys_N2)

    def of(self, key_12: NDArray[np.uint64], length: int = 0) -> Predicted | None:
        """The structure of a sequence by its key, (1, 2); None where it has none.

        Raises DataError where it should have one, whoever predicts failed, or nothing came for half an hour.
        """
        self._wanted += 1
        self._hits += int(self.has(key_12).all())
        # One that is longer is not predicted, so that it would be waited for in vain.
        waits = self._on_miss == "wait" and length <= (self._longest or length)
        deadline = time.monotonic() + _PATIENCE_S
        while not self.has(key_12).all():
            if self._on_miss == "error":
                raise DataError(f"{self._cache}: has no structure of a sequence of {length} residues; predict it")
            known = len(self._features)
            # A look lists a folder, maybe on a network: without waiting not at each of thousands of misses.
            if waits or time.monotonic() > self._looked_s + _LOOK_S:
                self._open()
            if not waits:
                break
            if (failure := self._cache / FAILURE_FILE).exists():
                raise DataError(failure.read_text(encoding="utf-8"))
            # As long as structures of others come, whoever predicts is at work.
            if len(self._features) > known:
                deadline = time.monotonic() + _PATIENCE_S
            elif time.monotonic() > deadline:
                raise DataError(f"{self._cache}: no structure came in half an hour, and one is waited for")
            time.sleep(_POLL_S)
        if not self.has(key_12).all():
            return None
        (rows,) = self._features.rows(key_12)
        return Predicted(rows[:, :12].reshape(-1, 4, 3), rows[:, 12])

    def _open(self) -> None:
        """Look at what is there now; up to twice more where shards were merged meanwhile, which removes one by one."""
        self._looked_s = time.monotonic()
        for tries_left in (2, 1, 0):
            try:
                self._features = FeatureStore(predictor_folder(self._cache))
                return
            except DataError:
                if not tries_left:
                    raise

    def check(self, keys_N2: NDArray[np.uint64]) -> None:
        """Raise DataError where structures are missing that should be there."""
        absent = int((~self.has(keys_N2)).sum())
        if absent and self._on_miss == "error":
            raise DataError(
                f"{self._cache}: has no structure of {counted(absent, 'protein{s}')} of {len(keys_N2):,}; predict "
                "them with 'esmeray design fold', or set data.predictions.on_miss to null or wait"
            )


def predictions_of(data: DataSection) -> PredictedStructures | None:
    section = data.predictions
    if section.folder is None:
        return None
    return PredictedStructures(expanded(section.folder), section.on_miss, data.max_length)


def predictor_folder(cache: Path) -> Path:
    """The folder of shards that a cache means. Raises DataError where several predictors have one."""
    folders = sorted({shard.parent for shard in cache.glob("*/shard-*.safetensors")})
    if len(folders) > 1:
        names = ", ".join(folder.name for folder in folders)
        raise DataError(f"{cache}: holds predictions of {names}: give the folder of one of them")
    return folders[0] if folders else cache


def keep(folder: Path, sequences: Sequence[str], structures: Sequence[Predicted]) -> None:
    """Add structures of distinct sequences as one shard. Raises ResourceError where the disk refuses."""
    keys_N2 = keys(sequences)
    # Coordinates and confidence in one array: a cache has one of a sequence.
    rows = [
        np.column_stack([centred(structure.coordinates).reshape(-1, 12), structure.confidence.astype(np.float16)])
        for structure in structures
    ]
    write_shard(folder, xxhash.xxh3_64_hexdigest(keys_N2.tobytes()), keys_N2, rows)


def keys(sequences: Sequence[str]) -> NDArray[np.uint64]:
    """(N, 2) of the residues, as stores have them."""
    return keys_of(sequence.encode("ascii") for sequence in sequences)


def centred(coordinates: NDArray[np.floating]) -> NDArray[np.float16]:
    """(L, 4, 3) as kept: from the mean of the known CA, in fp16."""
    # From the middle, as fp16 has few digits: 0.004 Å near it, 0.03 Å far from it.
    known = np.isfinite(coordinates[:, 1, 0])
    middle = coordinates[known, 1].mean(axis=0) if known.any() else 0.0
    return (coordinates - middle).astype(np.float16)
