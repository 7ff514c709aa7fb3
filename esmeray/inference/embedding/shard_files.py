"""Files of a job's shards and their completion records, and the cache that jobs and training share.

A shard has ``OUTPUT/00012.safetensors`` per output. ``rows/00012.json``, which is written last, marks it as complete.
The cache (:mod:`esmeray.dataset.embeddings.cache`) has a folder per model, settings and output.
"""

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel

from esmeray.common.errors import ConfigError, DataError, parsing
from esmeray.common.publishing import check_file, file_xxh128, write_atomically, writing
from esmeray.common.remote import download, listing, retried, storage, upload
from esmeray.dataset.batches.plan import Indices
from esmeray.dataset.embeddings.arrays import open_arrays, write_arrays
from esmeray.dataset.embeddings.cache import FeatureStore, bound_cache, write_shard
from esmeray.dataset.store.reader import Store
from esmeray.inference.embedding.plan import JobFacts, Plan
from esmeray.inference.embedding.section import EmbedJobSection
from esmeray.run_folder.job import PIECES

Computed = Mapping[str, Mapping[str, NDArray]]
"""Arrays by output, then by name."""

log = logging.getLogger(__name__)


class ShardRow(BaseModel, extra="forbid", frozen=True):
    """Record of a complete shard.

    Attributes:
        xxh128: checksum of each output's file.
        seconds: time of its computation.
        batch_s: seconds per batch after the warm-up, in order.
        splits: number of batches that were split because they were out of memory.
        flops: FLOP of its forward passes, without padding.
        peak_bytes, mean_bytes: memory in use: the allocator's on CUDA, otherwise the process's resident memory.
        cached: its values come from the cache or from earlier outputs.
    """

    number: int
    sequences: int
    residues: int
    tokens: int
    xxh128: dict[str, str] = {}
    batches: int = 0
    seconds: float = 0.0
    batch_s: list[float] = []
    splits: int = 0
    flops: float = 0.0
    peak_bytes: int = 0
    mean_bytes: int = 0
    cached: bool = False


class ShardFiles:
    """Shards of a job in its folder and, if it has one, at its URI."""

    def __init__(self, folder: Path, uri: str | None = None) -> None:
        self.folder, self.uri = folder, uri

    def path(self, output: str, number: int) -> Path:
        return self.folder / output / f"{number:05d}.safetensors"

    def write(self, computed: Computed, row: ShardRow) -> ShardRow:
        """Write a shard and return its row; the shard is then complete. Raises ResourceError if the disk is full."""
        checksums = {}
        for output, arrays in computed.items():
            path = self.path(output, row.number)
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_arrays(path, arrays)
            checksums[output] = file_xxh128(path)
            self.keep(path)
        # The row is written after all files, so that an interrupted shard does not count as complete.
        done = row.model_copy(update={"xxh128": checksums})
        with writing(self.folder):
            (self.folder / PIECES).mkdir(exist_ok=True)
            write_atomically(self.folder / PIECES / f"{row.number:05d}.json", done.model_dump_json())
        self.keep(self.folder / PIECES / f"{row.number:05d}.json")
        return done

    def keep(self, path: Path) -> None:
        """Upload a file of the folder, waiting for storage that is unavailable."""
        if (uri := self.uri) is not None:
            name = path.relative_to(self.folder)
            retried(lambda: upload(path, f"{uri}/{name}"), uri, storage().patience_s, log.warning)

    def fetch(self) -> None:
        """Download the files that other nodes or an earlier start have uploaded."""
        if (uri := self.uri) is not None:
            retried(lambda: download(uri, listing(uri), self.folder), uri, storage().patience_s, log.warning)

    def arrays(self, output: str, row: ShardRow) -> dict[str, NDArray]:
        """Arrays of a shard, verified. Raises DataError if they are damaged."""
        return open_arrays(self.verified(output, row))

    def verified(self, output: str, row: ShardRow) -> Path:
        path = self.path(output, row.number)
        check_file(path, "run the same command again to recompute this shard", xxh128=row.xxh128[output])
        return path

    def done(self) -> dict[int, ShardRow]:
        """Rows of complete, undamaged shards, by number. Temporary files of killed processes are removed."""
        # Verified before anything is computed, so that a damaged shard is computed again instead of failing at the end.
        rows = {}
        for path in sorted(self.folder.rglob("*")):
            if path.suffix == ".tmp":
                path.unlink(missing_ok=True)
            elif path.parent.name == PIECES:
                try:
                    with parsing(path, "it is computed again"):
                        row = ShardRow.model_validate_json(path.read_bytes())
                    for output in row.xxh128:
                        self.verified(output, row)
                except DataError as error:  # a damaged shard is not used, so computing it again is enough
                    log.warning("shard %s is computed again: %s", path.stem, error)
                else:
                    rows[row.number] = row
        return rows


class Cache:
    """Cache of one model's outputs under ``root``, bounded by the settings."""

    def __init__(self, root: Path, facts: JobFacts, settings: EmbedJobSection) -> None:
        if settings.dtype == "int8" and any(output.per != "protein" for output in facts.outputs):
            raise ConfigError(
                "--embed.cache: int8 residues can't be cached, because their scales depend on the shard; use "
                "another dtype or no cache"
            )
        self._root = root
        self._most_bytes = int(settings.cache_gb * 1e9)
        # Outputs of proteins are fp32 until the final files.
        narrow = {output.name for output in facts.outputs if output.per != "protein" and settings.dtype != "fp32"}
        self._folders = {
            name: root / (key + f"-{settings.dtype}" * (name in narrow)) for name, key in facts.cache_keys.items()
        }

    @cached_property
    def _opened(self) -> dict[str, FeatureStore]:
        return {name: FeatureStore(folder) for name, folder in self._folders.items()}

    def find(self, store: Store, records_U: Indices) -> Indices:
        """(U,) 0 for sequences with all outputs in the cache, otherwise -1."""
        keys_U2 = store.sequence_keys(records_U)
        return np.where(np.logical_and.reduce([features.has(keys_U2) for features in self._opened.values()]), 0, -1)

    def rows(self, output: str, store: Store, records_n: Indices, found_n: Indices) -> list[NDArray]:
        """Rows (rows, C) of the records' sequences."""
        return list(self._opened[output].rows(store.sequence_keys(records_n)))

    def keep(self, row: ShardRow, plan: Plan, store: Store, files: ShardFiles) -> None:
        """Add the values of a shard, and remove the oldest values beyond the maximum size."""
        keys_N2 = store.sequence_keys(plan.shard(row.number).records)
        # Named by its sequences, so that a job that is resumed or started twice writes the same file.
        name = xxhash.xxh3_64_hexdigest(keys_N2.tobytes())
        for output, folder in self._folders.items():
            arrays = files.arrays(output, row)
            write_shard(folder, name, keys_N2, np.split(arrays["values"], arrays["offsets"][1:-1]))
        # Bounded after each shard, so that the cache exceeds its maximum by one shard at most.
        bound_cache(self._root, self._most_bytes)
