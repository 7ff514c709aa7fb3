"""The steps of an epoch and of an evaluation for one worker, whatever the batches are made of.

In: a source of batches, the records of one side of the split, token budgets. Out: for each optimizer step the batches
that this rank takes. The plan is computed on every rank alike from the lengths; what a batch holds is the source's
business (:class:`esmeray.dataset.batches.loader.ResidueSource`,
:class:`esmeray.dataset.batches.labelled.LabelledSource`).

Shape legend: T tokens, N sequences, B batches.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch

from esmeray.dataset.batches.loader import BatchSource, Indices, Loader, Request, SourceBatch
from esmeray.dataset.batches.plan import EpochPlan, Groups, plan_epoch
from esmeray.dataset.packed_batch import FEATURES, BatchShape, PackedBatch
from esmeray.dataset.section import BatchSection


@dataclass(frozen=True)
class StepBatches:
    """The batches of one rank in one optimizer step, equally many on every rank, fillers among them.

    Attributes:
        step: counted from 0 in its epoch.
        next_epoch, next_step: the position after it, from which a run resumes.
        num_tokens: of this rank, special tokens included, fillers not.
        num_targets: tokens of this rank that a loss is taken at.
        seeds: of what a model draws in each batch, dropout say: the same whichever rank takes it.
    """

    batches: list[PackedBatch]
    epoch: int
    step: int
    next_epoch: int
    next_step: int
    num_tokens: int
    num_targets: int
    seeds: list[int]

    def __iter__(self) -> Iterator[PackedBatch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class TrainingSteps(AbstractContextManager):
    """Steps of training, for one rank."""

    def __init__(
        self,
        source: BatchSource,
        indices: Indices,
        *,
        batch: BatchSection,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        fixed_shapes: bool = False,
        num_workers: int = 0,
        prefetch: int = 1,
        groups: Groups | None = None,
    ) -> None:
        """Plan and start nothing yet. ``indices`` are the records to train on, ``groups`` those of each.

        Each of ``num_workers`` loader processes prepares ``prefetch`` batches ahead; without them steps make their own.
        ``fixed_shapes`` fills every batch to the same numbers of tokens and sequences, as compiled code wants it.
        """
        self._source = source
        self.loader = Loader(source, num_workers, prefetch)
        self._indices = indices.astype(np.int64)
        self._groups = groups
        self._batch = batch
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._fixed_shapes = fixed_shapes
        self._pin_memory = torch.cuda.is_available()  # a copy from pageable memory waits for the device
        self._plan: tuple[int, EpochPlan] | None = None
        self._steps: dict[int, int] = {}

    def plan(self, epoch: int, first_step: int = 0) -> EpochPlan:
        """The batches of an epoch, over all workers; raises DataError where a record does not fit the token budget.

        ``first_step``: steps of training before this epoch, on which the batches of its steps depend.
        """
        # One epoch's plan is kept: of hundreds of millions of records it takes gigabytes.
        if self._plan is None or self._plan[0] != epoch:
            self._plan = (epoch, _plan(self._source, self._indices, self._batch, self._seed, epoch, self._groups))
        return replace(self._plan[1], ramp=np.cumsum([0, *self._batch.ramp(first_step)], dtype=np.int64))

    def total_steps(self, epochs: int) -> int:
        """Optimizer steps of the first ``epochs`` epochs, which may differ by a step: each is packed anew."""
        total = 0
        for epoch in range(epochs):
            # Kept, since an epoch has to be planned to be counted.
            if epoch not in self._steps:
                self._steps[epoch] = self.plan(epoch, total).num_steps
            total += self._steps[epoch]
        return total

    def epoch(self, epoch: int, start_step: int = 0, first_step: int = 0) -> Iterator[StepBatches]:
        """The steps of an epoch from ``start_step`` on. Starting another iteration ends this one.

        ``first_step``: steps of training before this epoch.
        """
        plan = self.plan(epoch, first_step)
        shape = _shape(self._source, self._indices, plan, self._batch.tokens) if self._fixed_shapes else None
        steps = range(start_step, plan.num_steps)
        mine = ((step, batch) for step in steps for batch in plan.rank_batches(step, self._rank, self._world_size))
        follows_steps = self._source.follows_steps
        # One stream over all steps: loader processes prepare across the bounds of steps, and never run dry at them.
        made = self.loader.batches(
            _request(plan, epoch, batch, first_step + step if follows_steps else None) for step, batch in mine
        )
        for step in steps:
            # Where a checkpoint after this step resumes: at the end of an epoch in the next one.
            following = (epoch + 1, 0) if step + 1 == plan.num_steps else (epoch, step + 1)
            numbers = plan.rank_batches(step, self._rank, self._world_size)
            seeds = [_seed(self._seed, epoch, number) for number in numbers]
            taken = list(map(_counted, islice(made, len(numbers)), numbers))
            yield _step(taken, seeds, (epoch, step), following, shape, self._pin_memory)

    @property
    def mean_context(self) -> float:
        """Tokens of the sequence that a token is part of, on average over the training tokens."""
        lengths_N = self._source.token_lengths(self._indices).astype(np.float64)
        return float((lengths_N**2).sum() / max(1.0, lengths_N.sum()))

    def __exit__(self, *_: object) -> None:
        self.loader.close()


class ValidationSteps:
    """The same held-out batches each time, for one rank, in the same order."""

    def __init__(
        self,
        source: BatchSource,
        indices: Indices,
        *,
        batch: BatchSection,
        max_batches: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        fixed_shapes: bool = False,
        groups: Groups | None = None,
    ) -> None:
        """Plan at most ``max_batches`` packed batches over all workers; which ones is random but fixed.

        The source has no loader processes: waiting through hundreds of steps, they would cost more than they save.
        """
        self._source = source
        # Of no run's seed: metrics of different runs are of the same batches.
        plan = _plan(source, indices.astype(np.int64), batch, seed=0, epoch=0, groups=groups)
        self._shape = _shape(source, indices, plan, batch.tokens) if fixed_shapes else None
        # The first of the plan, whose batches are shuffled: a random part of the held-out records.
        num_batches = min(plan.num_batches, max_batches or plan.num_batches)
        self._numbers = replace(plan, batches_per_step=num_batches).rank_batches(0, rank, world_size)
        self._requests = [_request(plan, 0, batch) for batch in self._numbers]

    def __len__(self) -> int:
        """Steps of an evaluation, the same on every rank."""
        return len(self._requests)

    @property
    def records(self) -> list[Indices]:
        numbered = zip(self._numbers, self._requests, strict=True)
        return [request[1] for number, request in numbered if number is not None]

    def steps(self) -> Iterator[StepBatches]:
        """One batch of this rank at a time, fillers included; nothing where nothing is held out."""
        for step, made in enumerate(map(_counted, self._source.batches(self._requests), self._numbers)):
            yield _step([made], [0], (0, step), (0, step + 1), self._shape)


def _plan(
    source: BatchSource, indices: Indices, batch: BatchSection, seed: int, epoch: int, groups: Groups | None = None
) -> EpochPlan:
    return plan_epoch(
        source.token_lengths(indices),
        batch.tokens,
        batch.packing_window,
        seed,
        epoch,
        records=indices,
        batches_per_step=batch.batches_per_step,
        max_sequences=batch.batch_size,
        groups=groups,
    )


def _request(plan: EpochPlan, epoch: int, batch: int | None, step: int | None = None) -> Request:
    # A rank that has no batch left takes any record, of which nothing is counted.
    records = plan.records[:1] if batch is None else plan.batch_records(batch)
    return (epoch, records) if step is None else (epoch, records, step)


def _counted(made: SourceBatch, batch: int | None) -> SourceBatch:
    return made.without_targets() if batch is None else made


def _shape(source: BatchSource, indices: Indices, plan: EpochPlan, budget: int) -> BatchShape:
    """The shape that holds every batch of the plan and its fillers; the same from epoch to epoch, or nearly always."""
    longest = int(source.token_lengths(indices).max(initial=1))
    # What a batch lacks in tokens is filled with sequences of the longest length, which need room, too.
    sequences = source.record_sequences * int(np.diff(plan.offsets).max(initial=0)) + -(-budget // longest)
    # A power of two: the most sequences differ a little from epoch to epoch, and a new shape is compiled anew.
    return BatchShape(budget, 1 << (sequences - 1).bit_length(), longest)


def _seed(seed: int, epoch: int, batch: int | None) -> int:
    """Seed of a batch, from its number in the epoch's plan; what is drawn in a filler counts for nothing."""
    return int(np.random.SeedSequence((seed, epoch, batch or 0)).generate_state(1, np.uint64)[0])


def _step(
    made: list[SourceBatch],
    seeds: list[int],
    position: tuple[int, int],
    following: tuple[int, int],
    shape: BatchShape | None,
    pin_memory: bool = False,
) -> StepBatches:
    batches = [source_batch.batch for source_batch in made]
    # Cached features need no compiled network, and a batch of them may have no tokens to fill.
    if shape is not None and batches[0].named(FEATURES) is None:
        batches = [batch.filled(shape) for batch in batches]
    # Filled first: what is pinned has to be what is copied.
    if pin_memory:
        batches = [batch.pin_memory() for batch in batches]
    return StepBatches(
        batches,
        *position,
        *following,
        num_tokens=sum(source_batch.num_tokens for source_batch in made),
        num_targets=sum(source_batch.num_targets for source_batch in made),
        seeds=seeds,
    )
