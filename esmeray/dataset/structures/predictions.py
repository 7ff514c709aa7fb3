"""Cache of predicted structures by sequence, per fingerprint of the predictor.

Structures are stored in shards of :mod:`esmeray.dataset.embeddings.cache`, 26 bytes per residue. Any number of
processes can write, and the size of the cache can be bounded.

Shape legend: N sequences, L residues of a sequence.
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
"""File in the cache with the reason why the predictor gave up."""
_POLL_S, _LOOK_S, _PATIENCE_S = 0.5, 10.0, 1800.0
"""Seconds between polls while waiting, between polls without waiting, and until waiting times out."""


class Predicted(NamedTuple):
    """(L, 4, 3) N, CA, C and O in Å, and (L,) pLDDT from 0 to 100."""

    coordinates: NDArray[np.floating]
    confidence: NDArray[np.floating]


class PredictedStructures:
    """Cached structures for training, by key of the sequence.

    Args:
        cache: folder of one predictor's shards, or a folder that contains it.
        on_miss: behaviour for a sequence without a structure. error: refuse it; null: train without it until it is
            predicted; wait: wait until it is predicted.
        longest: maximum residues of a sequence to wait for.
    """

    def __init__(
        self, cache: Path | str, on_miss: Literal["error", "null", "wait"] = "error", longest: int | None = None
    ) -> None:
        self._cache, self._on_miss, self._longest = Path(cache), on_miss, longest
        self._wanted = self._hits = 0
        self._open()

    @property
    def hit_rate(self) -> float:
        """Share of the requested structures that were available at once."""
        return self._hits / max(1, self._wanted)

    def has(self, keys_N2: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return (N,) bool, True for sequences that had a structure when the folder was last read."""
        return self._features.has(keys_N2)

    def of(self, key_12: NDArray[np.uint64], length: int = 0) -> Predicted | None:
        """Return the structure of a sequence by its key, (1, 2); None if it has none.

        Raises DataError if a required structure is missing, the predictor failed, or no new structure arrived for half
        an hour.
        """
        self._wanted += 1
        self._hits += int(self.has(key_12).all())
        # Longer sequences are never predicted, so waiting would not end.
        waits = self._on_miss == "wait" and length <= (self._longest or length)
        deadline = time.monotonic() + _PATIENCE_S
        while not self.has(key_12).all():
            if self._on_miss == "error":
                raise DataError(
                    f"{self._cache}: no structure for a sequence of {length} residues; predict it with 'esmeray "
                    "design fold'"
                )
            known = len(self._features)
            # Reading lists a folder, maybe on a network. Without waiting, don't do it at each of thousands of misses.
            if waits or time.monotonic() > self._looked_s + _LOOK_S:
                self._open()
            if not waits:
                break
            if (failure := self._cache / FAILURE_FILE).exists():
                raise DataError(failure.read_text(encoding="utf-8"))
            # New structures of other sequences show that the predictor is at work.
            if len(self._features) > known:
                deadline = time.monotonic() + _PATIENCE_S
            elif time.monotonic() > deadline:
                raise DataError(f"{self._cache}: waited half an hour for a structure; is the predictor still running?")
            time.sleep(_POLL_S)
        if not self.has(key_12).all():
            return None
        (rows,) = self._features.rows(key_12)
        return Predicted(rows[:, :12].reshape(-1, 4, 3), rows[:, 12])

    def _open(self) -> None:
        """Read the folder's current state. Retry twice if shards were merged meanwhile, which removes files."""
        self._looked_s = time.monotonic()
        for tries_left in (2, 1, 0):
            try:
                self._features = FeatureStore(predictor_folder(self._cache))
                return
            except DataError:
                if not tries_left:
                    raise

    def check(self, keys_N2: NDArray[np.uint64]) -> None:
        """Raise DataError if required structures are missing."""
        absent = int((~self.has(keys_N2)).sum())
        if absent and self._on_miss == "error":
            raise DataError(
                f"{self._cache}: no structures for {absent:,} of {counted(len(keys_N2), 'protein{s}')}; predict "
                "them with 'esmeray design fold', or set data.predictions.on_miss to null or wait"
            )


def predictions_of(data: DataSection) -> PredictedStructures | None:
    section = data.predictions
    if section.folder is None:
        return None
    return PredictedStructures(expanded(section.folder), section.on_miss, data.max_length)


def predictor_folder(cache: Path) -> Path:
    """Return the folder with the shards of a cache. Raises DataError if it has several predictors."""
    folders = sorted({shard.parent for shard in cache.glob("*/shard-*.safetensors")})
    if len(folders) > 1:
        names = ", ".join(folder.name for folder in folders)
        raise DataError(f"{cache}: contains predictions of {names}; give the folder of one of them")
    return folders[0] if folders else cache


def keep(folder: Path, sequences: Sequence[str], structures: Sequence[Predicted]) -> None:
    """Add structures of distinct sequences as one shard. Raises ResourceError if the disk is full or not writable."""
    keys_N2 = keys(sequences)
    # One array for coordinates and confidence, because a cache holds one array per sequence.
    rows = [
        np.column_stack([centred(structure.coordinates).reshape(-1, 12), structure.confidence.astype(np.float16)])
        for structure in structures
    ]
    write_shard(folder, xxhash.xxh3_64_hexdigest(keys_N2.tobytes()), keys_N2, rows)


def keys(sequences: Sequence[str]) -> NDArray[np.uint64]:
    """Return (N, 2) keys of the residues, as in stores."""
    return keys_of(sequence.encode("ascii") for sequence in sequences)


def centred(coordinates: NDArray[np.floating]) -> NDArray[np.float16]:
    """Return (L, 4, 3) coordinates as stored: relative to the mean of the known CA, in fp16."""
    # Centred, because fp16 has few digits: it rounds by 0.004 Å near the centre, by 0.03 Å far from it.
    known = np.isfinite(coordinates[:, 1, 0])
    middle = coordinates[known, 1].mean(axis=0) if known.any() else 0.0
    return (coordinates - middle).astype(np.float16)
