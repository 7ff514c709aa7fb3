"""Training steps and evaluation steps for one worker, independent of the content of batches.

In: a source of batches, the records of one side of the split, token budgets. Out: the batches of this rank for each
optimizer step. Every rank computes the same plan from the lengths. The source determines the content of a batch
(:class:`esmeray.dataset.batches.loader.ResidueSource`, :class:`esmeray.dataset.batches.loader.LabelledSource`).

Shape legend: T tokens, N sequences, B batches.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch

from esmeray.dataset.batches.loader import BatchSource, Indices, Loader, Request, SourceBatch
from esmeray.dataset.batches.plan import PACKING_WINDOW, EpochPlan, Groups, plan_epoch
from esmeray.dataset.packed_batch import FEATURES, BatchShape, PackedBatch
from esmeray.dataset.section import BatchSection


@dataclass(frozen=True)
class StepBatches:
    """The batches of one rank in one optimizer step. Every rank has the same number, including fillers.

    Attributes:
        step: index in its epoch, from 0.
        next_epoch, next_step: position after this step, at which a run resumes.
        num_tokens: tokens on this rank, special tokens included, fillers excluded.
        num_targets: targets in the loss on this rank.
        seeds: seed per batch for the model's random numbers, e.g. dropout; independent of the rank.
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
    """Training steps for one rank."""

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
        groups: Groups | None = None,
    ) -> None:
        """Set up without planning or starting processes.

        ``indices`` are the records to train on, ``groups`` their groups. Batches are made by ``num_workers`` loader
        processes; with 0, in this process. ``fixed_shapes`` fills every batch to the same numbers of tokens and
        sequences, for compiled models.
        """
        self._source = source
        self.loader = Loader(source, num_workers)
        self._indices = indices.astype(np.int64)
        self._groups = groups
        self._batch = batch
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._fixed_shapes = fixed_shapes
        self._pin_memory = torch.cuda.is_available()  # a copy from pageable memory blocks the CPU
        self._plan: tuple[int, EpochPlan] | None = None
        self._steps: dict[int, int] = {}

    def plan(self, epoch: int, first_step: int = 0) -> EpochPlan:
        """Return the batches of an epoch over all workers. Raises DataError if a record exceeds the token budget.

        ``first_step``: training steps before this epoch, which determine the size of its steps during a ramp.
        """
        # Only one epoch's plan is kept: for hundreds of millions of records it takes gigabytes.
        if self._plan is None or self._plan[0] != epoch:
            self._plan = (epoch, _plan(self._source, self._indices, self._batch, self._seed, epoch, self._groups))
        return replace(self._plan[1], ramp=np.cumsum([0, *self._batch.ramp(first_step)], dtype=np.int64))

    def total_steps(self, epochs: int) -> int:
        """Return the optimizer steps of the first ``epochs`` epochs, which may differ by a step due to packing."""
        total = 0
        for epoch in range(epochs):
            # Cached, because counting the steps of an epoch requires planning it.
            if epoch not in self._steps:
                self._steps[epoch] = self.plan(epoch, total).num_steps
            total += self._steps[epoch]
        return total

    def epoch(self, epoch: int, start_step: int = 0, first_step: int = 0) -> Iterator[StepBatches]:
        """Yield the steps of an epoch from ``start_step`` on; see :meth:`Loader.batches`.

        ``first_step``: training steps before this epoch.
        """
        plan = self.plan(epoch, first_step)
        shape = _shape(self._source, self._indices, plan, self._batch.tokens) if self._fixed_shapes else None
        steps = range(start_step, plan.num_steps)
        own_batches = (
            (step, batch) for step in steps for batch in plan.rank_batches(step, self._rank, self._world_size)
        )
        # One stream of requests over all steps, so that loader processes also work ahead across steps.
        made = self.loader.batches(_request(plan, epoch, batch, first_step + step) for step, batch in own_batches)
        for step in steps:
            # Resume position of a checkpoint after this step; after the last step, the next epoch.
            following = (epoch + 1, 0) if step + 1 == plan.num_steps else (epoch, step + 1)
            numbers = plan.rank_batches(step, self._rank, self._world_size)
            seeds = [_seed(self._seed, epoch, number) for number in numbers]
            taken = list(map(_counted, islice(made, len(numbers)), numbers))
            yield _step(taken, seeds, (epoch, step), following, shape, self._pin_memory)

    @property
    def mean_context(self) -> float:
        """Length in tokens of a token's sequence, averaged over all training tokens."""
        lengths_N = self._source.token_lengths(self._indices).astype(np.float64)
        return float((lengths_N**2).sum() / max(1.0, lengths_N.sum()))

    def __exit__(self, *_: object) -> None:
        self.loader.close()


class ValidationSteps:
    """Evaluation steps for one rank: the same held-out batches in the same order each time."""

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
        """Plan at most ``max_batches`` packed batches over all workers; the selection is random but fixed.

        No loader processes are used: they would be idle for hundreds of steps, and cost more than they save.
        """
        self._source = source
        # A fixed seed, so that metrics of different runs are computed on the same batches.
        plan = _plan(source, indices.astype(np.int64), batch, seed=0, epoch=0, groups=groups)
        self._shape = _shape(source, indices, plan, batch.tokens) if fixed_shapes else None
        # The plan's batches are shuffled, so the first ones are a random sample of the held-out records.
        num_batches = min(plan.num_batches, max_batches or plan.num_batches)
        self._numbers = replace(plan, batches_per_step=num_batches).rank_batches(0, rank, world_size)
        self._requests = [_request(plan, 0, batch) for batch in self._numbers]

    def __len__(self) -> int:
        """Number of steps of an evaluation, the same on every rank."""
        return len(self._requests)

    @property
    def records(self) -> list[Indices]:
        numbered = zip(self._numbers, self._requests, strict=True)
        return [request[1] for number, request in numbered if number is not None]

    def steps(self) -> Iterator[StepBatches]:
        """Yield one batch of this rank at a time, fillers included. Without held-out records, yield nothing."""
        for step, made in enumerate(map(_counted, self._source.batches(self._requests), self._numbers)):
            yield _step([made], [0], (0, step), (0, step + 1), self._shape)


def _plan(
    source: BatchSource, indices: Indices, batch: BatchSection, seed: int, epoch: int, groups: Groups | None = None
) -> EpochPlan:
    return plan_epoch(
        source.token_lengths(indices),
        batch.tokens,
        PACKING_WINDOW,
        seed,
        epoch,
        records=indices,
        batches_per_step=batch.batches_per_step,
        max_sequences=batch.batch_size,
        groups=groups,
    )


def _request(plan: EpochPlan, epoch: int, batch: int | None, step: int | None = None) -> Request:
    # A rank without a batch takes any record, which is not counted.
    records = plan.records[:1] if batch is None else plan.batch_records(batch)
    return epoch, records, step


def _counted(made: SourceBatch, batch: int | None) -> SourceBatch:
    return made.without_targets() if batch is None else made


def _shape(source: BatchSource, indices: Indices, plan: EpochPlan, budget: int) -> BatchShape:
    """Return the shape that holds every batch of the plan and its fillers; it rarely changes between epochs."""
    longest = int(source.token_lengths(indices).max(initial=1))
    # Missing tokens are filled with sequences of the longest length, which count as sequences, too.
    sequences = source.record_sequences * int(np.diff(plan.offsets).max(initial=0)) + -(-budget // longest)
    # Rounded up to a power of two, because the maximum varies between epochs, and a new shape needs recompilation.
    return BatchShape(budget, 1 << (sequences - 1).bit_length(), longest)


def _seed(seed: int, epoch: int, batch: int | None) -> int:
    """Return the seed of a batch from its number in the epoch's plan; a filler's seed does not matter."""
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
    # Skipped for cached features: no network is compiled, and such a batch may have no tokens to fill.
    if shape is not None and batches[0].named(FEATURES) is None:
        batches = [batch.filled(shape) for batch in batches]
    # Pin after filling, because the filled tensors are the ones that are copied.
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
