"""Cache of a frozen network's features: computed once per distinct sequence, then read from disk.

A folder holds the features of one fingerprint (network and settings), by the key of the sequence
(:func:`esmeray.dataset.fasta.records.keys_of`). It consists of shards, each written once by one process. A shard is a
safetensors file with five arrays:

- ``hashes`` (S, 2) uint64: the keys
- ``offsets`` (S+1,): first row of each sequence
- ``values`` (R, D)
- ``checksum`` (2,) uint64: XXH3-128 of the values, verified when they are first read
- ``index_checksum`` (2,) uint64: XXH3-128 of keys and offsets, verified on opening

Shape legend: N sequences, S sequences of a shard, R rows of all sequences in it, D channels.
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
_REMEDY = "remove the file; its vectors will be computed again"


class FeatureStore:
    """Features of one fingerprint: rows per sequence."""

    def __init__(self, path: Path | str) -> None:
        """Open the folder, which need not exist yet. Raises DataError if shards are damaged or differ in channels."""
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
        # Stable: if several shards have a sequence, every reader takes the first.
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order]
        self._owner = np.stack([owners, rows], axis=1)[order]
        # Verify a shard's values when first needed: a run may read little of hundreds of gigabytes.
        self._verified = cache(lambda number: _with_values(self._files[number], self._shards[number]))

    def __len__(self) -> int:
        return self._keys.size

    def has(self, keys_N2: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return (N,) bool, True for sequences with cached rows."""
        return self._find(keys_N2) < len(self)

    def rows(self, keys_N2: NDArray[np.uint64]) -> Iterator[NDArray]:
        """Yield the rows of each sequence, (rows, D), as read-only views.

        Raises IndexError if a sequence is not cached, DataError if a shard's values are damaged.
        """
        for number, row in self._owner[self._find(keys_N2)].tolist():
            shard = self._verified(number)
            with parsing(self._files[number], _REMEDY):
                rows = rows_of(shard, row)
            yield rows  # outside of `parsing`, because the caller's exceptions are not damage to the file

    def _find(self, keys_N2: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return (N,) the rank of each key among the sorted keys; the number of keys if it is missing."""
        wanted_N = _comparable(keys_N2)
        ranks_N = np.searchsorted(self._keys, wanted_N)
        is_there_N = np.searchsorted(self._keys, wanted_N, side="right") > ranks_N
        return np.where(is_there_N, ranks_N, len(self))


def write_shard(path: Path, name: str, keys_S2: NDArray[np.uint64], rows: list[NDArray]) -> Path:
    """Add a shard to the folder ``path``: one array (rows, D) per distinct sequence. Return its file.

    ``name`` must be unique if several processes write at once. Raises ResourceError if the disk is full or not
    writable.
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    values = np.concatenate(rows)
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    # Two checksums: the index is verified when a shard is opened, the values when they are first read.
    arrays: Arrays = {
        "hashes": keys_S2,
        "offsets": offsets,
        "values": values,
        "checksum": _checksum(values),
        "index_checksum": _checksum(keys_S2, offsets),
    }
    file = path / f"shard-{name}.safetensors"
    write_arrays(file, arrays)
    return file


def merge_shards(path: Path) -> None:
    """Merge all small shards into one, sorted by hash; equal rows give an equal file. Open files stay readable."""
    small = [file for file in sorted(path.glob(_SHARDS)) if file.stat().st_size < _SMALL_BYTES]
    if len(small) < 2:
        return
    # Read through a FeatureStore, which verifies, so that damaged data does not get a valid checksum.
    store = FeatureStore(path)
    keys_S2 = np.unique(np.concatenate([_opened(file)["hashes"] for file in small]), axis=0)
    name = xxhash.xxh3_64_hexdigest(keys_S2.tobytes())
    merged = write_shard(path, name, keys_S2, list(store.rows(keys_S2)))
    # After writing: at any time, a reader finds each sequence in one or two files.
    for file in small:
        if file != merged:
            file.unlink(missing_ok=True)  # another process may be merging, too


def bound_cache(root: Path, most_bytes: int) -> int:
    """Remove the oldest shards of all fingerprints under ``root`` until at most ``most_bytes`` are left.

    Returns the number of shards removed. Open shards stay memory-mapped.
    """
    # Whole shards, not rows: removing a file is fast, and shards are never modified.
    newest_first = sorted(root.glob(f"*/{_SHARDS}"), key=lambda shard: shard.stat().st_mtime, reverse=True)
    totals = np.cumsum([shard.stat().st_size for shard in newest_first])
    surplus = newest_first[int((totals <= most_bytes).sum()) :]
    for shard in surplus:
        shard.unlink(missing_ok=True)
    return len(surplus)


def _opened(file: Path) -> Arrays:
    """Open a shard and verify all arrays except the values."""
    shard = open_arrays(file)
    with parsing(file, _REMEDY):
        keys, offsets = shard["hashes"], shard["offsets"]
        if keys.dtype != np.uint64 or keys.shape != (len(offsets) - 1, 2) or shard["values"].ndim != 2:
            raise ValueError("its arrays have unexpected shapes or dtypes")
        if (_checksum(keys, offsets) != shard["index_checksum"]).any():
            raise ValueError("checksum mismatch in its index")
    return shard


def _with_values(file: Path, shard: Arrays) -> Arrays:
    """Verify the values of a shard and return it."""
    with parsing(file, _REMEDY):
        if (_checksum(shard["values"]) != shard["checksum"]).any():
            raise ValueError("checksum mismatch in its values")
    return shard


def _comparable(keys_N2: NDArray[np.uint64]) -> NDArray[np.bytes_]:
    """Return (N,) keys as strings of 16 bytes, which NumPy can sort and search."""
    return np.ascontiguousarray(keys_N2).view("S16")[:, 0]


def _checksum(*arrays: NDArray) -> NDArray[np.uint64]:
    digest = xxhash.xxh3_128()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return np.frombuffer(digest.digest(), dtype="<u8")
