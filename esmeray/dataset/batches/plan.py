"""Plan an epoch from the lengths alone: which sequences share a batch, and which batches share a step.

In: tokens per sequence, a token budget and, optionally, the maximum number of sequences per batch. Out: an
:class:`EpochPlan` with each record exactly once. It is the same on every rank: each rank takes its part of the plan,
and nothing is exchanged between ranks.

Batches are filled as follows:

- The epoch's records are shuffled and processed in windows.
- Half of a window is concatenated and cut into batches, so that batches are random.
- The other half is a pool, sorted by length. Each batch's gap is filled with the longest sequences that fit, until none
  fits or the batch has its maximum of sequences.
- The rest of the pool and of the last cut is shuffled into the next window.

This takes a few binary searches per batch, not per record.

Shape legend: N sequences, B batches.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.common.text import counted
from esmeray.dataset.fasta.records import stretches

Indices = NDArray[np.int64]

_SHUFFLE_STREAM = 0x5041434B
"""Separates the shuffle's random numbers from other uses of the same seed ('PACK' in ASCII)."""

PACKING_WINDOW = 2048
"""Number of sequences that packing considers together."""

_MIN_BATCHES_PER_WINDOW = 8
"""Minimum batches per window. A smaller window would leave large gaps in its batches, so it is enlarged."""


@dataclass(frozen=True)
class EpochPlan:
    """The batches of one epoch in training order.

    Attributes:
        records: (N,) int64, the records of all batches, concatenated.
        offsets: (B+1,) int64, start of each batch in ``records``, and the end.
        batches_per_step: batches per optimizer step over all workers; the last step may have fewer.
        ramp: (R+1,) int64, the first batch of each of the R ramp steps, which have fewer batches, and the end.
    """

    records: Indices
    offsets: Indices
    batches_per_step: int = 1
    ramp: Indices = field(default_factory=lambda: np.zeros(1, dtype=np.int64))

    @property
    def num_batches(self) -> int:
        return self.offsets.size - 1

    @property
    def num_steps(self) -> int:
        # An epoch may end within the ramp.
        if self.num_batches <= self.ramp[-1]:
            return int(np.searchsorted(self.ramp, self.num_batches))
        return self.ramp.size - 1 - int(self.ramp[-1] - self.num_batches) // self.batches_per_step

    def batch_records(self, batch: int) -> Indices:
        return self.records[self.offsets[batch] : self.offsets[batch + 1]]

    def rank_batches(self, step: int, rank: int, world_size: int) -> list[int | None]:
        """Return the batches of one rank in an optimizer step: every ``world_size``-th batch, from its rank on.

        All ranks get the same number, as collective operations require; None stands for a filler.
        """
        # Steps after the ramp are all alike, so they need no table.
        beyond = step - (self.ramp.size - 1)
        first = int(self.ramp[min(step, self.ramp.size - 1)]) + max(beyond, 0) * self.batches_per_step
        size = self.batches_per_step if beyond >= 0 else int(self.ramp[step + 1]) - first
        batches: list[int | None] = list(range(first + rank, min(first + size, self.num_batches), world_size))
        return batches + [None] * (micro_batches(size, world_size) - len(batches))


class Groups(NamedTuple):
    """Groups of N sequences. A step should have several members of a group.

    ``ids``: (N,) int64. ``members``: number of a group's members that are placed next to each other, if it has enough.
    """

    ids: Indices
    members: int


def micro_batches(batches_per_step: int, world_size: int) -> int:
    """Return the batches per rank in one optimizer step, fillers included."""
    return -(-batches_per_step // world_size)


def plan_epoch(
    lengths_N: NDArray[np.integer],
    budget: int,
    window: int,
    seed: int,
    epoch: int,
    *,
    records: Indices | None = None,
    batches_per_step: int = 1,
    max_sequences: int | None = None,
    groups: Groups | None = None,
) -> EpochPlan:
    """Pack each record into exactly one batch of at most ``budget`` tokens and ``max_sequences`` sequences.

    Args:
        lengths_N: (N,) tokens of each sequence after cropping, special tokens included.
        window: number of sequences that packing considers together. Larger fills better, smaller shuffles better.
        records: (N,) record index of each sequence; default: 0..N-1.
        max_sequences: maximum sequences per batch, None for any number. If it is reached, token budgets stay unused.
        groups: groups whose members are placed next to each other. Gaps in batches are then not filled.

    Raises DataError if a sequence is longer than the budget.
    """
    names_N = np.arange(lengths_N.size, dtype=np.int64) if records is None else records
    too_long = np.flatnonzero(lengths_N > budget)
    if too_long.size:
        first = too_long[0]
        raise DataError(
            f"record {names_N[first]} has {lengths_N[first]} tokens, but a batch holds only {budget} "
            f"({counted(too_long.size, 'record{s}')} too long): raise batch.tokens or lower data.max_length"
        )
    # The seed depends only on seed and epoch, so all ranks shuffle equally without communication.
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence((_SHUFFLE_STREAM, seed, epoch))))
    most = max(1, lengths_N.size) if max_sequences is None else max_sequences
    if groups is None:
        order, sizes = _WindowPacker(lengths_N, budget, most, window, random).pack()
        # Shuffle at the end: otherwise windows would follow each other, and the epoch's last batches, which are filled
        # in another way, would come last.
        order, offsets = _shuffle_batches(order, sizes, random)
    else:
        order = _side_by_side(groups, random)
        offsets = np.array([*_cuts(lengths_N[order], budget, most), order.size], dtype=np.int64)
    return EpochPlan(records=names_N[order], offsets=offsets, batches_per_step=batches_per_step)


def longest_first(tokens_N: NDArray[np.integer], budget: int) -> list[Indices]:
    """Group sequences of similar length into batches within the budget, longest first; return their indices.

    Longest first, so that an out of memory error occurs at the start or not at all. A sequence longer than the budget
    is a batch of its own.
    """
    order = np.argsort(-tokens_N, kind="stable")
    return [order[first:last] for first, last in stretches(tokens_N[order], budget)]


def _side_by_side(groups: Groups, random: np.random.Generator) -> Indices:
    """Return (N,) sequences in random order, except that members of a group stay together in sets of ``members``."""
    shuffled = random.permutation(groups.ids.size)
    by_group = shuffled[np.argsort(groups.ids[shuffled], kind="stable")]
    ids = groups.ids[by_group]
    # The members beyond a group's last full set form a smaller set.
    is_first = (np.arange(ids.size) - np.searchsorted(ids, ids)) % groups.members == 0
    sets = np.cumsum(is_first) - 1
    return by_group[np.argsort(random.permutation(int(is_first.sum()))[sets], kind="stable")]


def _cuts(lengths: NDArray[np.integer], budget: int, most: int) -> list[int]:
    """Return the cuts of a series of sequences into batches: 0, then the end of each batch that is full."""
    return [first for first, _ in stretches(lengths, budget, most)] or [0]


def _shuffle_batches(order: Indices, sizes: Indices, random: np.random.Generator) -> tuple[Indices, Indices]:
    """Shuffle the batches; return (N,) sequences and (B+1,) offsets."""
    starts = np.cumsum(sizes) - sizes
    permutation = random.permutation(sizes.size)
    sizes = sizes[permutation]
    # One index array moves all batches: an epoch may have millions, and a loop would take seconds.
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    return order[np.arange(order.size) + np.repeat(starts[permutation] - offsets[:-1], sizes)], offsets


class _WindowPacker:
    """Packs the shuffled sequences window by window; see the module's docstring."""

    def __init__(
        self, lengths_N: NDArray[np.integer], budget: int, most: int, window: int, random: np.random.Generator
    ) -> None:
        self._lengths = lengths_N.astype(np.int64)  # sums of an epoch's tokens exceed 32 bits
        self._budget, self._most = budget, most
        least_window = _MIN_BATCHES_PER_WINDOW * budget * lengths_N.size // max(self._lengths.sum(), 1)
        self._window = max(window, min(least_window, _MIN_BATCHES_PER_WINDOW * most))
        self._random = random
        self._orders: list[Indices] = [np.empty(0, dtype=np.int64)]
        self._sizes: list[Indices] = [np.empty(0, dtype=np.int64)]

    def pack(self) -> tuple[Indices, Indices]:
        """Return (N,) sequences, batch by batch, and (B,) sequences per batch."""
        # One shuffle per epoch: windows are then random samples, and memory is one integer per sequence.
        shuffled = self._random.permutation(self._lengths.size)
        carried = np.empty(0, dtype=np.int64)
        taken = 0
        while taken < shuffled.size or carried.size:
            # At least half of each window is new, so that the total work stays proportional to the sequences.
            fresh = shuffled[taken : taken + max(self._window - carried.size, self._window // 2, 1)]
            taken += fresh.size
            carried = self._pack_window(np.concatenate((carried, fresh)), is_last=taken == shuffled.size)
        return np.concatenate(self._orders), np.concatenate(self._sizes)

    def _pack_window(self, members: Indices, is_last: bool) -> Indices:
        """Emit the batches that can be filled from these sequences; return the sequences that are left."""
        # Shuffle in each window, so that the rest of the previous one is not always in the same half.
        self._random.shuffle(members)
        pool, stream = np.split(members, [members.size // 2])
        cuts = _cuts(self._lengths[stream], self._budget, self._most)
        if len(cuts) == 1:  # no batch is full without the pool
            if not is_last:
                return members
            # End of the epoch: nothing follows that could fill gaps, so consider all gaps of all batches.
            self._best_fit_decreasing(members)
            return members[:0]
        # Stable, because every rank must get the same order of sequences of equal length.
        pool = pool[np.argsort(self._lengths[pool], kind="stable")]
        pool_batches = self._fill_gaps(stream, cuts, self._lengths[pool].tolist())
        # Each batch is a part of the stream plus its sequences from the pool.
        taken = pool_batches >= 0
        members = np.concatenate((stream[: cuts[-1]], pool[taken]))
        stream_batches = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
        self._append(members, np.concatenate((stream_batches, pool_batches[taken])), len(cuts) - 1)
        return np.concatenate((pool[pool_batches < 0], stream[cuts[-1] :]))

    def _fill_gaps(self, stream: Indices, cuts: Sequence[int], pool_lengths: list[int]) -> Indices:
        """Return for each sequence of the pool (ascending lengths) the batch that takes it, or -1."""
        # Python lists, because each batch takes a few searches, and NumPy calls have more overhead.
        used_B = np.add.reduceat(self._lengths[stream[: cuts[-1]]], cuts[:-1])
        batches = np.full(len(pool_lengths), -1, dtype=np.int64)
        left = list(range(len(pool_lengths)))
        for batch, (used, size) in enumerate(zip(used_B.tolist(), np.diff(cuts).tolist(), strict=True)):
            gap = self._budget - used
            fitting = bisect_right(pool_lengths, gap)
            while size < self._most and fitting > 0:
                # Longest first: short sequences are more useful for the gaps of later batches.
                gap -= pool_lengths.pop(fitting - 1)
                batches[left.pop(fitting - 1)] = batch
                size += 1
                fitting = bisect_right(pool_lengths, gap)
        return batches

    def _best_fit_decreasing(self, members: Indices) -> None:
        """Emit batches for all members: each member, longest first, goes where it leaves the smallest gap.

        A batch with its maximum of sequences is removed from the list of gaps.
        """
        members = members[np.argsort(-self._lengths[members], kind="stable")]
        gaps: list[int] = []  # ascending; owners has the batch of each gap
        owners: list[int] = []
        sizes: list[int] = []  # sequences per batch, including full ones
        batches = np.empty(members.size, dtype=np.int64)
        for index, length in enumerate(self._lengths[members].tolist()):
            smallest = bisect_right(gaps, length - 1)
            if smallest == len(gaps):
                gap, owner = self._budget, len(sizes)
                sizes.append(0)
            else:
                gap, owner = gaps.pop(smallest), owners.pop(smallest)
            batches[index] = owner
            sizes[owner] += 1
            if sizes[owner] < self._most:
                rank = bisect_right(gaps, gap - length)
                gaps.insert(rank, gap - length)
                owners.insert(rank, owner)
        self._append(members, batches, len(sizes))

    def _append(self, members: Indices, batches: Indices, num_batches: int) -> None:
        """Emit batches from the batch number of each member."""
        self._orders.append(members[np.argsort(batches, kind="stable")])
        self._sizes.append(np.bincount(batches, minlength=num_batches))
