"""Features of sequences by a frozen network, computed once for each distinct one and read from then on.

In: features of sequences, by the hash of the sequence and the fingerprint of whatever made them. Out: views of
memory-mapped files. A folder holds the features of one fingerprint in shards, each written by one process at one time;
a sequence that stands in some shard is never computed again, whatever file it comes from next.

A shard is a folder: ``manifest.json`` with sizes and checksums, ``hashes.bin`` (uint64, ascending), ``rows.bin``
(uint32, how many rows each sequence has: one, or one a token) and ``features.bin`` (float32), all little-endian. It
appears when it is complete.

Shape legend: N sequences, R rows of all of them, D channels, S sequences of a shard.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import DataError
from common.publishing import exclusive, file_xxh128, published

MANIFEST_FILE, HASHES_FILE, ROWS_FILE, FEATURES_FILE = "manifest.json", "hashes.bin", "rows.bin", "features.bin"
_REMEDY = "remove the folder, so that its features are computed again"


class ShardManifest(BaseModel):
    """``manifest.json`` of a shard; ``checksums`` are XXH3-128 by file name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["esmeray-features"] = "esmeray-features"
    format_version: Literal[1] = 1
    num_sequences: int
    num_rows: int
    channels: int
    checksums: dict[str, str]


class FeatureStore:
    """Features under one fingerprint."""

    def __init__(self, path: Path | str) -> None:
        """Open the folder of the shards, which need not exist yet.

        Raises DataError where a shard is damaged or has another number of channels than the first.
        """
        self.path = Path(path).absolute()
        folders = sorted(self.path.glob("shard-*")) if self.path.is_dir() else []
        self._shards = [_Shard(folder) for folder in folders]
        channels = {shard.manifest.channels for shard in self._shards}
        if len(channels) > 1:
            raise DataError(f"{self.path}: its shards have {sorted(channels)} channels; {_REMEDY}")
        self._hashes = _joined([shard.hashes for shard in self._shards], np.uint64)
        order = np.argsort(self._hashes, kind="stable")
        self._hashes = self._hashes[order]
        numbers = [np.full(shard.hashes.size, number) for number, shard in enumerate(self._shards)]
        places = [np.arange(shard.hashes.size) for shard in self._shards]
        self._owner = np.stack([_joined(numbers, np.int64)[order], _joined(places, np.int64)[order]], axis=1)

    def __len__(self) -> int:
        return self._hashes.size

    @property
    def channels(self) -> int:
        """D; 0 where there is no shard yet."""
        return self._shards[0].manifest.channels if self._shards else 0

    def has(self, hashes_N: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """(N,) bool: which sequences have features."""
        places = np.searchsorted(self._hashes, hashes_N)
        inside = places < self._hashes.size
        found = np.zeros(hashes_N.size, dtype=bool)
        found[inside] = self._hashes[places[inside]] == hashes_N[inside]
        return found

    def rows(self, hashes_N: NDArray[np.uint64]) -> Iterator[NDArray[np.float32]]:
        """The features of each sequence, (rows, D), as read-only views. Raises KeyError where a sequence has none."""
        if not self.has(hashes_N).all():
            raise KeyError("a sequence has no features in this store")
        for number, place in self._owner[np.searchsorted(self._hashes, hashes_N)].tolist():
            yield self._shards[number].features_of(place)


def write_shard(
    path: Path, name: str, hashes_S: NDArray[np.uint64], features: Iterable[tuple[int, NDArray[np.float32]]]
) -> None:
    """Add a shard to the folder ``path``, under a name of its own where several processes write at once.

    ``hashes_S`` are distinct; ``features`` gives for each sequence, in any order, its place there and its (rows, D).
    Raises ResourceError where the disk is full or can't be written.
    """
    order = np.argsort(hashes_S, kind="stable")
    target = path / f"shard-{name}"
    path.mkdir(parents=True, exist_ok=True)
    with exclusive(target), published(target) as folder:
        made = dict(features)
        parts = [np.ascontiguousarray(made[place], dtype="<f4") for place in order.tolist()]
        rows = np.array([len(part) for part in parts], dtype="<u4")
        (folder / HASHES_FILE).write_bytes(hashes_S[order].astype("<u8").tobytes())
        (folder / ROWS_FILE).write_bytes(rows.tobytes())
        with (folder / FEATURES_FILE).open("wb") as file:
            for part in parts:
                file.write(part.data)
        manifest = ShardManifest(
            num_sequences=len(parts),
            num_rows=int(rows.sum()),
            channels=parts[0].shape[1] if parts else 0,
            checksums={file: file_xxh128(folder / file) for file in (HASHES_FILE, ROWS_FILE, FEATURES_FILE)},
        )
        (folder / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


class _Shard:
    """One shard in this process."""

    def __init__(self, folder: Path) -> None:
        try:
            self.manifest = ShardManifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
            damaged = [n for n, wanted in self.manifest.checksums.items() if file_xxh128(folder / n) != wanted]
        except (OSError, ValidationError) as error:
            raise DataError(f"{folder}: damaged ({type(error).__name__}); {_REMEDY}") from error
        if damaged:
            raise DataError(f"{folder / damaged[0]}: damaged, its checksum does not hold; {_REMEDY}")
        self.hashes = np.fromfile(folder / HASHES_FILE, dtype="<u8").astype(np.uint64)
        rows = np.fromfile(folder / ROWS_FILE, dtype="<u4")
        self._ends = np.cumsum(rows, dtype=np.int64)
        self._starts = self._ends - rows
        shape = (self.manifest.num_rows, self.manifest.channels)
        path = folder / FEATURES_FILE
        self._features = np.asarray(np.memmap(path, dtype="<f4", mode="r", shape=shape)) if shape[0] else None

    def features_of(self, place: int) -> NDArray[np.float32]:
        assert self._features is not None
        return self._features[self._starts[place] : self._ends[place]]


def _joined(parts: list[NDArray], dtype: type) -> NDArray:
    return np.concatenate([np.empty(0, dtype=dtype), *parts]).astype(dtype)


def bound_cache(root: Path, most_bytes: int) -> int:
    """Remove the oldest shards of all fingerprints under ``root`` until no more than so many bytes are left.

    Returns the number of shards removed. Whoever has one open keeps its memory-mapped files.
    """
    shards = sorted(root.glob("*/shard-*"), key=lambda shard: shard.stat().st_mtime)
    sizes = [sum(file.stat().st_size for file in shard.iterdir()) for shard in shards]
    total, removed = sum(sizes), 0
    for shard, size in zip(shards, sizes, strict=True):
        if total <= most_bytes:
            break
        with exclusive(shard):
            shutil.rmtree(shard)
        total, removed = total - size, removed + 1
    return removed
