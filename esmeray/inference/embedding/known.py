"""Values that need no computation: from the cache, from the output that grows, or from other outputs.

Each of these is a source, which finds sequences by the two hashes of their key. Known sequences are the first shards of
a job, which are copied instead of computed. A resumed job uses the same known sequences, even if its sources have
changed.

Shape legend: U distinct sequences of a job, n sequences of a shard, C channels.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.batches.plan import Indices
from esmeray.dataset.embeddings.arrays import as_stored
from esmeray.dataset.embeddings.manifest import Index, differ
from esmeray.dataset.embeddings.reader import read_embeddings
from esmeray.dataset.section import SPECIAL_TOKENS_PER_SEQUENCE
from esmeray.dataset.store.reader import Store
from esmeray.inference.embedding.plan import Plan
from esmeray.inference.embedding.section import EmbedJobSection
from esmeray.inference.embedding.shard_files import Cache, ShardFiles, ShardRow
from esmeray.inference.models.kinds import Output
from esmeray.run_folder.job import differences

_MAX_RECORDS = 1 << 40
_BLOCK = 4096
"""Records per block. Wanted records of an earlier output in the same block are read together."""


class EarlierOutput:
    """Another output with the job's model and settings, or the output that grows."""

    def __init__(
        self, index: Index, outputs: Sequence[Output], identity: dict[str, Any], settings: EmbedJobSection
    ) -> None:
        """``identity``: the job's identity. Raises ConfigError if the output's values differ from the job's."""
        self.index = index
        self._dtype = settings.dtype
        # Settings that values depend on; the sizes of files and batches don't matter.
        names = ("precision", "long", "max_length", "overlap")
        needs = {"model": identity["model"], "settings": {name: identity["settings"][name] for name in names}}
        changes = differences(index.manifest.job, needs)
        for output in outputs:
            needs = {"description": output.description, "dtype": settings.dtype}
            earlier = index.manifest.outputs.get(output.name)
            changes += differences({} if earlier is None else earlier.model_dump(), needs, f"{output.name}.")
        if changes or settings.dtype == "int8":
            reason = changes[0] if changes else "int8 would be rounded twice"
            raise ConfigError(
                f"--embed.known {index.source}: its values can't be reused ({reason}); give outputs of the same "
                "model and settings"
            )
        # Opened on demand, because opening an output verifies it, which reads all of it.
        self._open = cache(lambda name: read_embeddings(index.source, name))

    def find(self, store: Store, records_U: Indices) -> Indices:
        """(U,) index of each record's sequence in this output, from 0; -1 if it lacks the sequence."""
        keys_N2 = self.index.sequence_keys
        hashes_N = keys_N2[:, 0]
        order = np.argsort(hashes_N, kind="stable")
        ranks_U = np.searchsorted(hashes_N, store.sequence_hashes[records_U], sorter=order)
        found_U = order[np.minimum(ranks_U, order.size - 1)]
        is_other_U = differ(keys_N2[found_U], store.sequence_keys(records_U))
        # If two sequences share a hash, only the first is compared; the other one is computed again.
        return np.where((hashes_N[found_U] == store.sequence_hashes[records_U]) & ~is_other_U, found_U, -1)

    def rows(self, output: str, store: Store, records_n: Indices, found_n: Indices) -> list[NDArray]:
        """Rows (rows, C) of records, in the format of a shard, from the indices that :meth:`find` returned."""
        # The indices are from the start of the job: another output may have this name now.
        if differ(self.index.sequence_keys[found_n], store.sequence_keys(records_n)).any():
            raise DataError(f"{self.index.source}: changed since the job was started; remove the unfinished folder")
        earlier = self._open(output)
        if earlier.output.per != "protein":
            values = (as_stored(earlier[number], self._dtype) for number in found_n.tolist())
            return [rows.reshape(-1, earlier.channels) for rows in values]
        # Read in blocks, because one request or row group per vector would take longer than computing it.
        together = np.split(found_n, np.flatnonzero(np.diff(found_n // _BLOCK)) + 1)
        blocks = (earlier[int(numbers[0]) : int(numbers[-1]) + 1][numbers - numbers[0]] for numbers in together)
        return [row[None] for block_nC in blocks for row in block_nC]


KnownValues: TypeAlias = Cache | EarlierOutput


def find_known(sources: Mapping[int, KnownValues], store: Store, records_U: Indices) -> Indices | None:
    """Find each sequence in the sources.

    Returns (U,) source number and index, encoded in one integer; -1 if no source has the sequence. Returns None without
    sources.
    """
    known_U = np.full(records_U.size, -1)
    for number, source in sources.items():
        found_U = source.find(store, records_U)
        known_U = np.where((known_U < 0) & (found_U >= 0), number * _MAX_RECORDS + found_U, known_U)
    return known_U if sources else None


def write_known(
    sources: Mapping[int, KnownValues],
    known_U: Indices,
    plan: Plan,
    store: Store,
    files: ShardFiles,
    outputs: Sequence[Output],
) -> list[ShardRow]:
    """Write the shards of known sequences. Raises ConfigError if their source is missing."""
    known_U = np.sort(known_U[known_U >= 0])  # the order of the plan
    rows = []
    for number in range(plan.num_cached):
        shard = plan.shard(number)
        sources_n, found_n = np.divmod(known_U[plan.bounds[number] : plan.bounds[number + 1]], _MAX_RECORDS)
        numbers = np.unique(sources_n).tolist()
        if {*numbers} - sources.keys():
            raise ConfigError(
                "the job was started with a cache or known outputs; give the same --embed.cache and --embed.known to "
                "resume it"
            )
        # Written as normal shards, so that assembly is the same for all values.
        computed: dict[str, dict[str, NDArray]] = {}
        for output in outputs:
            arrays: list[NDArray] = []
            for source in numbers:  # ascending, like the sequences
                chosen_n = sources_n == source
                arrays += sources[source].rows(output.name, store, shard.records[chosen_n], found_n[chosen_n])
            computed[output.name] = {
                "offsets": np.cumsum([0, *map(len, arrays)], dtype=np.int64),
                "values": np.concatenate(arrays),
            }
        residues = int(shard.lengths.sum())
        row = ShardRow(
            number=number,
            sequences=shard.records.size,
            residues=residues,
            tokens=residues + SPECIAL_TOKENS_PER_SEQUENCE * shard.records.size,
            cached=True,
        )
        rows.append(files.write(computed, row))
    return rows
