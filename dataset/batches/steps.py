"""The steps of an epoch and of an evaluation for one worker, whatever the batches are made of.

In: a source of batches, the records of one side of the split, token budgets. Out: for each optimizer step the batches
that this rank takes. The plan is computed on every rank alike from the lengths; what a batch holds is the source's
business (:class:`dataset.batches.loader.ResidueSource`, :class:`dataset.batches.labelled.LabelledSource`).

Shape legend: T tokens, N sequences, B batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import NamedTuple, Protocol, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from dataset.batches.plan import EpochPlan, micro_batches, plan_epoch
from dataset.packed_batch import PackedBatch
from train_config.schema import BatchSection

Indices: TypeAlias = NDArray[np.int64]
Request: TypeAlias = tuple[int, Indices] | None
"""An epoch and the records of a batch; None asks for a filler: no target, no record, nothing that counts."""


class SourceBatch(NamedTuple):
    """A batch, how many of its targets a loss is taken at, and how many tokens its records have (a filler's: 0)."""

    batch: PackedBatch
    num_targets: int
    num_tokens: int


class BatchSource(Protocol):
    """Makes batches of records."""

    def token_lengths(self, records_N: Indices) -> NDArray[np.int64]:
        """(N,) tokens that each record gives, special tokens included, after cropping."""

    def batches(self, requests: Iterable[Request]) -> Iterator[SourceBatch]:
        """The batches in the order asked for. Starting another iteration ends this one."""

    def close(self) -> None:
        """End what was started."""


@dataclass(frozen=True)
class StepBatches:
    """The batches of one rank in one optimizer step.

    Attributes:
        batches: micro-batches, equally many on every rank and in every step; fillers among them.
        epoch, step: which step this is, counted from 0 in its epoch.
        next_epoch, next_step: the position after it, from which a resumed run goes on.
        num_tokens: tokens of this rank's batches, special tokens included, fillers not.
        num_targets: tokens of this rank's batches that a loss is taken at.
    """

    batches: list[PackedBatch]
    epoch: int
    step: int
    next_epoch: int
    next_step: int
    num_tokens: int
    num_targets: int

    def __iter__(self) -> Iterator[PackedBatch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class TrainingSteps:
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
        pin_memory: bool | None = None,
    ) -> None:
        """Take the source over; plan and start nothing yet.

        Args:
            source: makes the batches.
            indices: records to train on.
            batch: token budgets.
            seed: of shuffling.
            rank, world_size: which part of each step is this worker's.
            pin_memory: put batches into page-locked memory; by default where there is a CUDA device.
        """
        self._source = source
        self._indices = indices.astype(np.int64)
        self._batch = batch
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._pin_memory = pin_memory
        self._plan: tuple[int, EpochPlan] | None = None
        self._steps: dict[int, int] = {}

    def plan(self, epoch: int) -> EpochPlan:
        """The batches of an epoch, over all workers; computed from the lengths alone and kept until another is asked.

        Raises:
            DataError: a record does not fit the token budget.
        """
        if self._plan is None or self._plan[0] != epoch:
            plan = _plan(self._source, self._indices, self._batch, self._seed, epoch)
            self._plan = (epoch, plan)
            self._steps[epoch] = plan.num_steps
        return self._plan[1]

    def steps_per_epoch(self, epoch: int) -> int:
        """Optimizer steps of an epoch. Epochs may differ by a step, since each is packed anew."""
        if epoch not in self._steps:
            self.plan(epoch)
        return self._steps[epoch]

    def total_steps(self, epochs: int) -> int:
        """Optimizer steps of the first ``epochs`` epochs."""
        return sum(self.steps_per_epoch(epoch) for epoch in range(epochs))

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[StepBatches]:
        """The steps of an epoch from ``start_step`` on.

        Starting another iteration ends this one.

        Raises:
            DataError: the store is damaged, or a record does not fit the token budget.
            LoaderProcessLost: a loader process was killed; the next iteration starts a new one.
        """
        plan = self.plan(epoch)
        steps = range(start_step, plan.num_steps)
        mine = (batch for step in steps for batch in plan.rank_batches(step, self._rank, self._world_size))
        made = self._source.batches(_request(plan, epoch, batch) for batch in mine)
        for step in steps:
            following = (epoch + 1, 0) if step + 1 == plan.num_steps else (epoch, step + 1)
            taken = islice(made, micro_batches(plan.batches_per_step, self._world_size))
            yield _step(taken, (epoch, step), following, self._pin_memory)

    @property
    def queue_depth(self) -> int | None:
        """Batches that are prepared and not taken yet; None where they are made when they are asked for."""
        return getattr(self._source, "queue_depth", None)

    @property
    def mean_context(self) -> float:
        """Tokens of the sequence that a token is part of, on average over the training tokens."""
        lengths_N = self._source.token_lengths(self._indices).astype(np.float64)
        return float((lengths_N**2).sum() / max(1.0, lengths_N.sum()))

    def close(self) -> None:
        """End the loader processes; the next iteration would start new ones."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ValidationSteps:
    """The same held-out batches each time, for one rank, in the same order."""

    def __init__(
        self,
        source: BatchSource,
        indices: Indices,
        *,
        batch: BatchSection,
        max_batches: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Plan the batches.

        Args:
            max_batches: packed batches over all workers; all there are if left out. Which ones is random but fixed.
            seed: of the choice. Not the run's seed, so that metrics of runs compare.
            Others: as for :class:`TrainingSteps`.
        """
        self._source = source
        plan = _plan(source, indices.astype(np.int64), batch, seed, epoch=0)
        num_batches = min(plan.num_batches, max_batches or plan.num_batches)
        mine: list[int | None] = list(range(rank, num_batches, world_size))
        mine += [None] * (micro_batches(num_batches, world_size) - len(mine))
        self._requests = [_request(plan, 0, batch) for batch in mine]

    def __len__(self) -> int:
        """Steps of an evaluation, the same on every rank."""
        return len(self._requests)

    def steps(self) -> Iterator[StepBatches]:
        """One batch of this rank at a time, fillers included; nothing where nothing is held out.

        Raises:
            DataError: the store is damaged.
        """
        for step, made in enumerate(self._source.batches(self._requests)):
            yield _step([made], (0, step), (0, step + 1))

    def close(self) -> None:
        """End what the source started."""
        self._source.close()


def _plan(source: BatchSource, indices: Indices, batch: BatchSection, seed: int, epoch: int) -> EpochPlan:
    return plan_epoch(
        source.token_lengths(indices),
        batch.tokens,
        batch.packing_window,
        seed,
        epoch,
        records=indices,
        batches_per_step=batch.batches_per_step,
        max_sequences=batch.batch_size,
    )


def _request(plan: EpochPlan, epoch: int, batch: int | None) -> Request:
    return None if batch is None else (epoch, plan.batch_records(batch))


def _step(
    made: Iterable[SourceBatch], position: tuple[int, int], following: tuple[int, int], pin_memory: bool | None = None
) -> StepBatches:
    """One step's batches, fillers among them."""
    taken = list(made)
    batches = [part.batch for part in taken]
    if torch.cuda.is_available() if pin_memory is None else pin_memory:
        batches = [batch.pin_memory() for batch in batches]
    return StepBatches(
        batches,
        *position,
        *following,
        num_tokens=sum(part.num_tokens for part in taken),
        num_targets=sum(part.num_targets for part in taken),
    )
