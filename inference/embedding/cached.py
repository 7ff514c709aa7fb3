"""Values of sequences that an earlier job or a classifier's training has computed, and of this job for later ones.

In: a folder of caches (:mod:`dataset.embeddings.cache`), one for each model, settings and output. Out: the first shards
of a job, which need no model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from common.errors import ConfigError
from dataset.embeddings.arrays import as_float32, open_arrays
from dataset.embeddings.cache import FeatureStore, bound_cache, write_shard
from dataset.store.reader import Store
from inference.embedding.plan import Plan
from inference.embedding.settings import EmbeddingSettings, ModelFacts
from inference.embedding.shard_files import ShardFiles, ShardRow
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE

DTYPES = {"fp32": np.float32, "fp16": np.float16}


class Cache:
    """The cache of one model's outputs under ``root``, of at most ``most_bytes`` in all."""

    def __init__(self, root: Path, most_bytes: int, facts: ModelFacts, settings: EmbeddingSettings) -> None:
        if settings.dtype not in DTYPES or any(output.per == "pair" for output in facts.outputs):
            raise ConfigError("--cache: keeps vectors of proteins and residues in fp32 or fp16; leave it out")
        self._root, self._most_bytes = root, most_bytes
        self._settings, self._outputs = settings, facts.outputs
        names = {output.name: facts.cache_keys[output.name] for output in facts.outputs}
        if settings.dtype != "fp32":  # residues are narrowed before they are kept
            names = {name: f"{key}-{settings.dtype}" for name, key in names.items()}
        self._folders = {name: root / key for name, key in names.items()}

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
            computed: dict[str, dict[str, NDArray]] = {}
            for output in self._outputs:
                found = list(opened[output.name].rows(hashes))
                values = np.concatenate(found)
                computed[output.name] = {"values": values}
                if output.per != "protein":
                    offsets = np.cumsum([0, *map(len, found)], dtype=np.int64)
                    computed[output.name] = {
                        "offsets": offsets,
                        "values": values.astype(DTYPES[self._settings.dtype], copy=False),
                    }
            residues = int(shard.lengths.sum())
            tokens = residues + SPECIAL_TOKENS_PER_SEQUENCE * shard.records.size
            row = ShardRow(number=number, sequences=shard.records.size, residues=residues, tokens=tokens, cached=True)
            rows.append(files.write(computed, row))
        return rows

    def keep(self, number: int, plan: Plan, store: Store, files: ShardFiles) -> None:
        """Add what a shard holds, and remove the oldest of the cache beyond its size."""
        hashes = store.sequence_hashes[plan.shard(number).records]
        name = xxhash.xxh3_64_hexdigest(hashes.tobytes())
        for output in self._outputs:
            arrays = open_arrays(files.path(output.name, number))
            write_shard(self._folders[output.name], name, hashes, enumerate(_split(arrays)))
        bound_cache(self._root, self._most_bytes)


def _split(arrays: dict[str, NDArray]) -> list[NDArray[np.float32]]:
    """(rows, C) fp32 of each sequence."""
    values = as_float32(arrays["values"])
    return np.split(values, arrays["offsets"][1:-1] if "offsets" in arrays else len(values))
