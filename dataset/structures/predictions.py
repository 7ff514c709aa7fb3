"""Predicted structures, kept by sequence under the fingerprint of their predictor.

In: backbone atoms and confidences of sequences. Out: the same, from shards of :mod:`dataset.embeddings.cache`: 26 bytes
a residue, with a checksum, written by any number of processes, bounded.

Shape legend: N sequences, L residues of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataset.embeddings.cache import FeatureStore, write_shard
from dataset.fasta.records import hashes_of
from dataset.structures.store import centred


class Predicted(NamedTuple):
    """(L, 4, 3) float32 N, CA, C and O in Å, and (L,) float32 pLDDT, 0 to 100."""

    coordinates: NDArray[np.float32]
    confidence: NDArray[np.float32]


def keep(folder: Path, sequences: Sequence[str], found: Sequence[Predicted]) -> None:
    """Add structures of distinct sequences as one shard. Raises ResourceError where the disk refuses."""
    hashes_N = hashes(sequences)
    rows = [
        np.concatenate([centred(each.coordinates).reshape(-1, 12), each.confidence[:, None].astype(np.float16)], axis=1)
        for each in found
    ]
    write_shard(folder, xxhash.xxh3_64_hexdigest(hashes_N.tobytes()), hashes_N, rows)


def missing(folder: Path, sequences: Sequence[str]) -> NDArray[np.bool_]:
    """(N,) bool: sequences without a structure in the folder."""
    return ~FeatureStore(folder).has(hashes(sequences))


def predicted(folder: Path, sequences: Sequence[str]) -> Iterator[Predicted]:
    """Kept structures of sequences; raises KeyError where one is missing, DataError where a shard is damaged."""
    for rows in FeatureStore(folder).rows(hashes(sequences)):
        yield Predicted(rows[:, :12].astype(np.float32).reshape(-1, 4, 3), rows[:, 12].astype(np.float32))


def hashes(sequences: Sequence[str]) -> NDArray[np.uint64]:
    """(N,) XXH3-64 of the residues, as stores have it."""
    return hashes_of([sequence.encode("ascii") for sequence in sequences])
