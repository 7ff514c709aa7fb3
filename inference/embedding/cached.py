"""Values of sequences that an earlier job or a classifier's training has computed, and of this job for later ones.

In: a folder of caches (:mod:`dataset.embeddings.cache`), one for each model, settings and output. Out: the first shards
of a job, which need no model.
"""

from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from common.errors import ConfigError
from dataset.embeddings.arrays import open_arrays
from dataset.embeddings.cache import FeatureStore, bound_cache, write_shard
from dataset.store.reader import Store
from inference.embedding.plan import Plan
from inference.embedding.settings import JobFacts
from inference.embedding.shard_files import ShardFiles, ShardRow
from train_config.embed_schema import EmbedSection
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE


class Cache:
    """The cache of one model's outputs under ``root``, of at most ``most_bytes`` in all."""

    def __init__(self, root: Path, most_bytes: int, facts: JobFacts, settings: EmbedSection) -> None:
        if settings.dtype == "int8" and any(output.per != "protein" for output in facts.outputs):
            raise ConfigError(
                "--embed.cache: int8 residues have scales of their shard; choose another dtype or no cache"
            )
        self._root, self._most_bytes = root, most_bytes
        self._folders = {}
        for output in facts.outputs:  # those of proteins are fp32 until the final files
            narrow = output.per != "protein" and settings.dtype != "fp32"
            self._folders[output.name] = root / (facts.cache_keys[output.name] + f"-{settings.dtype}" * narrow)

    def known(self, hashes_U: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """(U,) sequences of which every output is cached."""
        return np.logical_and.reduce([FeatureStore(folder).has(hashes_U) for folder in self._folders.values()])

    def restore(self, plan: Plan, store: Store, files: ShardFiles) -> list[ShardRow]:
        """Write the shards of cached sequences."""
        opened = {name: FeatureStore(folder) for name, folder in self._folders.items()}
        rows = []
        for number in range(plan.num_cached):
            shard = plan.shard(number)
            hashes = store.sequence_hashes[shard.records]
            computed = {}
            for name, features in opened.items():
                arrays = list(features.rows(hashes))
                offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
                computed[name] = {"offsets": offsets, "values": np.concatenate(arrays)}
            residues = int(shard.lengths.sum())
            tokens = residues + SPECIAL_TOKENS_PER_SEQUENCE * shard.records.size
            row = ShardRow(number=number, sequences=shard.records.size, residues=residues, tokens=tokens, cached=True)
            rows.append(files.write(computed, row))
        return rows

    def keep(self, number: int, plan: Plan, store: Store, files: ShardFiles) -> None:
        """Add what a shard holds, and remove the oldest of the cache beyond its size."""
        hashes = store.sequence_hashes[plan.shard(number).records]
        name = xxhash.xxh3_64_hexdigest(hashes.tobytes())
        for output, folder in self._folders.items():
            arrays = open_arrays(files.path(output, number))
            write_shard(folder, name, hashes, np.split(arrays["values"], arrays["offsets"][1:-1]))
        bound_cache(self._root, self._most_bytes)
