"""Rows of sequences by a frozen network, computed once for each distinct one and read from then on.

A folder holds the rows of one fingerprint, by the key of the sequence (:func:`esmeray.dataset.fasta.records.keys_of`),
in shards, each written by one process at one time. A shard is a safetensors file: ``hashes`` (S, 2) uint64, the keys,
``offsets`` (S+1,) of each sequence's first row, ``values`` (R, D), and two XXH3-128, (2,) uint64 each: ``checksum`` of
the values, which are verified when they are first read, and ``index_checksum`` of the others, which are at once.

Shape legend: N sequences, S sequences of a shard, R rows of all of them, D channels.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from esmeray.common.errors import DataError, parsing
from esmeray.common.publishing import writing
from esmeray.dataset.embeddings.arrays import Arrays, open_arrays, rows_of, write_arrays

_SHARDS = "shard-*.safetensors"
_SMALL_BYTES = 2**26
_REMEDY = "remove the file: what it holds is computed again"


class FeatureStore:
    """Rows under one fingerprint."""

    def __init__(self, path: Path | str) -> None:
        """Open the folder, which need not exist yet; DataError where shards are damaged or differ in channels."""
        self.path = Path(path).absolute()
        self._files = sorted(self.path.glob(_SHARDS))
        self._shards = [_opened(file) for file in self._files]
        channels = {shard["values"].shape[1] for shard in self._shards}
        if len(channels) > 1:
            raise DataError(f"{self.path}: its shards have {sorted(channels)} channels; remove the folder")
        keys = _comparable(np.concatenate([np.empty((0, 2), np.uint64), *(shard["hashes"] for shard in self._shards)]))
        sizes = [len(shard["hashes"]) for shard in self._shards]
        owners = np.repeat(np.arange(len(sizes)), sizes)
        rows = np.arange(len(keys)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        # Stable: where several shards have a sequence, the first is taken, by every reader.
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order]
        self._owner = np.stack([owners, rows], axis=1)[order]
        # Once for each shard, when it is first needed: a run may need few of hundreds of gigabytes.
        self._verified = cache(lambda number: _with_values(self._files[number], self._shards[number]))

    def __len__(self) -> int:
        return self._keys.size

    def has(self, keys_N2: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """(N,) bool: which sequences have rows."""
        return self._find(keys_N2) < len(self)

    def rows(self, keys_N2: NDArray[np.uint64]) -> Iterator[NDArray]:
        """The rows of each sequence, (rows, D), as read-only views.

        Raises IndexError where a sequence has none, DataError where a shard's values are damaged.
        """
        for number, row in self._owner[self._find(keys_N2)].tolist():
            shard = self._verified(number)
            with parsing(self._files[number], _REMEDY):
                rows = rows_of(shard, row)
            yield rows  # outside: what the caller raises is no damage of the file

    def _find(self, keys_N2: NDArray[np.uint64]) -> NDArray[np.int64]:
        """(N,) the rank of each key among all, sorted; their number where it is not there."""
        wanted_N = _comparable(keys_N2)
        ranks_N = np.searchsorted(self._keys, wanted_N)
        is_there_N = np.searchsorted(self._keys, wanted_N, side="right") > ranks_N
        return np.where(is_there_N, ranks_N, len(self))


def write_shard(path: Path, name: str, keys_S2: NDArray[np.uint64], rows: list[NDArray]) -> None:
    """Add a shard to the folder ``path``: of distinct sequences, the (rows, D) of each.

    ``name`` is its own where several processes write at once. Raises ResourceError where the disk refuses.
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    values = np.concatenate(rows)
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    # Two: the index is verified whenever a shard is opened, the values when they are first read.
    arrays: Arrays = {
        "hashes": keys_S2,
        "offsets": offsets,
        "values": values,
        "checksum": _checksum(values),
        "index_checksum": _checksum(keys_S2, offsets),
    }
    write_arrays(path / _shard_name(name), arrays)


def merge_shards(path: Path) -> None:
    """Make one shard of all small ones, sorted by hash: the same for the same rows. Readers keep what is open."""
    small = [file for file in sorted(path.glob(_SHARDS)) if file.stat().st_size < _SMALL_BYTES]
    if len(small) < 2:
        return
    # Through a store, which verifies: damage must not get a checksum of its own.
    store = FeatureStore(path)
    keys_S2 = np.unique(np.concatenate([_opened(file)["hashes"] for file in small]), axis=0)
    name = xxhash.xxh3_64_hexdigest(keys_S2.tobytes())
    write_shard(path, name, keys_S2, list(store.rows(keys_S2)))
    # Only now: a reader finds each sequence in one file or in two, never in none.
    for file in small:
        if file.name != _shard_name(name):
            file.unlink(missing_ok=True)  # another process may be merging, too


def bound_cache(root: Path, most_bytes: int) -> int:
    """Remove the oldest shards of all fingerprints under ``root`` until no more than so many bytes are left.

    Returns the number of shards removed. Whoever has one open keeps its memory-mapped file.
    """
    # Whole shards and not rows: a file is removed in no time, and never written to.
    newest_first = sorted(root.glob(f"*/{_SHARDS}"), key=lambda shard: shard.stat().st_mtime, reverse=True)
    totals = np.cumsum([shard.stat().st_size for shard in newest_first])
    surplus = newest_first[int((totals <= most_bytes).sum()) :]
    for shard in surplus:
        shard.unlink(missing_ok=True)
    return len(surplus)


def _opened(file: Path) -> Arrays:
    """The arrays of a shard, all but the values verified."""
    shard = open_arrays(file)
    with parsing(file, _REMEDY):
        keys, offsets = shard["hashes"], shard["offsets"]
        if keys.dtype != np.uint64 or keys.shape != (len(offsets) - 1, 2) or shard["values"].ndim != 2:
            raise ValueError("its arrays are of other shapes")
        if (_checksum(keys, offsets) != shard["index_checksum"]).any():
            raise ValueError("the checksum of its index does not hold")
    return shard


def _with_values(file: Path, shard: Arrays) -> Arrays:
    """The same with its values verified."""
    with parsing(file, _REMEDY):
        if (_checksum(shard["values"]) != shard["checksum"]).any():
            raise ValueError("the checksum of its values does not hold")
    return shard


def _comparable(keys_N2: NDArray[np.uint64]) -> NDArray[np.bytes_]:
    """(N,) the 16 bytes of each key, which NumPy sorts and finds as one."""
    return np.ascontiguousarray(keys_N2).view("S16")[:, 0]


def _checksum(*arrays: NDArray) -> NDArray[np.uint64]:
    digest = xxhash.xxh3_128()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return np.frombuffer(digest.digest(), dtype="<u8")


def _shard_name(name: str) -> str:
    return f"shard-{name}.safetensors"
