"""Rows of sequences by a frozen network, computed once for each distinct one and read from then on.

A folder holds the rows of one fingerprint, by the hash of the sequence, in shards, each written by one process at one
time. A shard is a safetensors file: ``hashes`` (S,) uint64, ``offsets`` (S+1,) of each sequence's first row, ``values``
(R, D), and ``checksum`` (2,) uint64, the XXH3-128 of the values.

Shape legend: N sequences, S sequences of a shard, R rows of all of them, D channels.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from common.errors import DataError
from common.publishing import writing
from dataset.embeddings.arrays import open_arrays, write_arrays

_SHARDS = "shard-*.safetensors"
_SMALL_BYTES = 2**26


class FeatureStore:
    """Rows under one fingerprint."""

    def __init__(self, path: Path | str) -> None:
        """Open the folder, which need not exist yet; DataError where shards are damaged or differ in channels."""
        self.path = Path(path).absolute()
        self._files = sorted(self.path.glob(_SHARDS))
        self._shards = [open_arrays(file) for file in self._files]
        channels = {shard["values"].shape[1] for shard in self._shards}
        if len(channels) > 1:
            raise DataError(f"{self.path}: its shards have {sorted(channels)} channels; remove the folder")
        self.channels = channels.pop() if channels else 0
        hashes = np.concatenate([np.empty(0, np.uint64), *(shard["hashes"] for shard in self._shards)])
        sizes = [shard["hashes"].size for shard in self._shards]
        owners = np.repeat(np.arange(len(sizes)), sizes)
        places = np.arange(hashes.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._owner = hashes[order], np.stack([owners, places], axis=1)[order]
        self._values = cache(lambda number: _checked(self._files[number], self._shards[number]))

    def __len__(self) -> int:
        return self._hashes.size

    def has(self, hashes_N: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """(N,) bool: which sequences have rows."""
        places = np.searchsorted(self._hashes, hashes_N)
        inside = places < self._hashes.size
        has_rows_N = np.zeros(hashes_N.size, dtype=bool)
        has_rows_N[inside] = self._hashes[places[inside]] == hashes_N[inside]
        return has_rows_N

    def rows(self, hashes_N: NDArray[np.uint64]) -> Iterator[NDArray]:
        """The rows of each sequence, (rows, D), as read-only views.

        Raises KeyError where a sequence has none, DataError where a shard's values are damaged.
        """
        if not self.has(hashes_N).all():
            raise KeyError("a sequence has no rows in this store")
        for number, place in self._owner[np.searchsorted(self._hashes, hashes_N)].tolist():
            start, stop = self._shards[number]["offsets"][place : place + 2].tolist()
            yield self._values(number)[start:stop]


def write_shard(path: Path, name: str, hashes_S: NDArray[np.uint64], rows: list[NDArray]) -> None:
    """Add a shard to the folder ``path``: of distinct sequences, the (rows, D) of each.

    ``name`` is its own where several processes write at once. Raises ResourceError where the disk refuses.
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    values, offsets = np.concatenate(rows), np.cumsum([0, *map(len, rows)], dtype=np.int64)
    arrays = {"hashes": hashes_S, "offsets": offsets, "values": values, "checksum": _checksum(values)}
    write_arrays(path / _shard_name(name), arrays)


def merge_shards(path: Path) -> None:
    """Make one shard of all small ones, sorted by hash: the same for the same rows. Readers keep what is open."""
    small = [file for file in sorted(path.glob(_SHARDS)) if file.stat().st_size < _SMALL_BYTES]
    if len(small) < 2:
        return
    rows: dict[int, NDArray] = {}
    for file in small:
        shard = open_arrays(file)
        parts = np.split(_checked(file, shard), shard["offsets"][1:-1])
        rows |= dict(zip(shard["hashes"].tolist(), parts, strict=True))
    hashes_S = np.array(sorted(rows), dtype=np.uint64)
    name = xxhash.xxh3_64_hexdigest(hashes_S.tobytes())
    write_shard(path, name, hashes_S, [rows[sequence_hash] for sequence_hash in hashes_S.tolist()])
    for file in small:
        if file.name != _shard_name(name):
            file.unlink(missing_ok=True)


def bound_cache(root: Path, most_bytes: int) -> int:
    """Remove the oldest shards of all fingerprints under ``root`` until no more than so many bytes are left.

    Returns the number of shards removed. Whoever has one open keeps its memory-mapped file.
    """
    shards = sorted((shard.stat().st_mtime, shard.stat().st_size, shard) for shard in root.glob(f"*/{_SHARDS}"))
    total, removed = sum(size for _, size, _ in shards), 0
    for _, size, shard in shards:
        if total <= most_bytes:
            break
        shard.unlink(missing_ok=True)
        total, removed = total - size, removed + 1
    return removed


def _checked(file: Path, shard: dict[str, NDArray]) -> NDArray:
    if (_checksum(shard["values"]) != shard["checksum"]).any():
        raise DataError(f"{file}: damaged, its checksum does not hold; remove the file")
    return shard["values"]


def _checksum(values: NDArray) -> NDArray[np.uint64]:
    return np.frombuffer(xxhash.xxh3_128_digest(values.data), dtype="<u8")


def _shard_name(name: str) -> str:
    return f"shard-{name}.safetensors"
