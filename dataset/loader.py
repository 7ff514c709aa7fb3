"""Packed batches of one training worker, step by step, from any position of any epoch.

In: a store, the records of one side of the split, and the settings. Out: for each optimizer step the batches that this
rank takes, as torch tensors. The plan is computed on every rank alike from the lengths; this rank's batches
are prepared in loader processes (or here, with ``num_workers`` 0) and come in the plan's order however many there are.

Shape legend: T tokens, N sequences, B batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from dataset.cropping import CropCount, count_cropped, cropped_lengths
from dataset.loader_process import LoaderProcess
from dataset.masking import NO_TARGET, MaskingShares
from dataset.packed_batch import IGNORED_TARGET, PackedBatch
from dataset.packing import EpochPlan, micro_batches, plan_epoch
from dataset.preparation import PreparationSettings, PreparedBatch, prepare_batch
from dataset.store import Store
from dataset.tokenizer import CLS, EOS, RESIDUE_TABLE, token_positions
from train_config.errors import CheckpointError
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE, BatchSection, DataSection, MaskedLMSection

Indices: TypeAlias = NDArray[np.int64]
Task: TypeAlias = Literal["autoencoder", "masked_lm"]
Request: TypeAlias = tuple[int, Indices]


@dataclass(frozen=True)
class StepBatches:
    """What one rank takes in one optimizer step.

    Attributes:
        batches: micro-batches, equally many on every rank and in every step; fillers (:func:`filler_batch`) among them.
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


class TrainingBatches:
    """Steps of training, for one rank."""

    def __init__(
        self,
        store_path: Path | str,
        indices: Indices,
        *,
        data: DataSection,
        batch: BatchSection,
        task: Task,
        masked_lm: MaskedLMSection,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        pin_memory: bool | None = None,
    ) -> None:
        """Read the lengths; plan and start nothing yet.

        Args:
            store_path: folder of the store, on a disk of this node.
            indices: records to train on.
            data: lengths and loader processes.
            batch: token budgets.
            task: masked_lm masks; autoencoder takes every residue as its own target.
            masked_lm: how much is masked.
            seed: of shuffling, cropping and masking.
            rank, world_size: which part of each step is this worker's.
            pin_memory: put batches into page-locked memory; by default where there is a CUDA device.

        Raises:
            DataError: the store can't be read.
        """
        store = Store(store_path)
        self._indices = indices.astype(np.int64)
        self._residues = store.lengths[self._indices]
        self._data, self._batch = data, batch
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        settings = _preparation(data, task, masked_lm, seed, random_crops=True)
        self._preparer = _Preparer(store, settings, data.num_workers, data.prefetch)
        self._plan: tuple[int, EpochPlan] | None = None
        self._steps: dict[int, int] = {}

    @property
    def cropped(self) -> CropCount:
        """How many sequences an epoch crops, and how many residues it leaves out by that."""
        return count_cropped(self._residues, self._data.max_length)

    def plan(self, epoch: int) -> EpochPlan:
        """The batches of an epoch, over all workers; computed from the lengths alone and kept until another is asked.

        Raises:
            DataError: a record does not fit the token budget.
        """
        if self._plan is None or self._plan[0] != epoch:
            plan = _plan(self._residues, self._indices, self._data, self._batch, self._seed, epoch)
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
        requests = ((epoch, plan.batch_records(batch)) for batch in mine if batch is not None)
        prepared = self._preparer.prepared(requests)
        for step in steps:
            batches = plan.rank_batches(step, self._rank, self._world_size)
            following = (epoch + 1, 0) if step + 1 == plan.num_steps else (epoch, step + 1)
            yield _assemble(plan, batches, prepared, (epoch, step), following, self._pin_memory)

    def state(self, epoch: int, step: int) -> dict[str, int]:
        """The position before a step as plain numbers, with everything that the plan depends on."""
        return {"epoch": epoch, "step": step, **self._plan_settings()}

    def resume_from(self, state: Mapping[str, int]) -> tuple[int, int]:
        """The (epoch, step) of a position from :meth:`state`.

        Raises:
            CheckpointError: batches are planned otherwise than they were, so that the position means nothing here.
        """
        for name, value in self._plan_settings().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the position was saved with {name} {state.get(name)}, but now it is {value}, which gives other "
                    f"batches: set it back, or start a run of another name"
                )
        epoch, step = state["epoch"], state["step"]
        return (epoch + 1, 0) if step >= self.steps_per_epoch(epoch) else (epoch, step)

    def close(self) -> None:
        """End the loader processes; the next iteration would start new ones."""
        self._preparer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _plan_settings(self) -> dict[str, int]:
        return {
            "seed": self._seed,
            "records": self._indices.size,
            "max_length": self._data.max_length,
            "tokens": self._batch.tokens,
            "global_tokens": self._batch.global_tokens,
            "packing_window": self._batch.packing_window,
        }


class ValidationBatches:
    """The same held-out batches each time, for one rank: cropped at the start, masked alike, in the same order.

    They are prepared here and not in loader processes: an evaluation takes few of them, and processes that wait for
    it through hundreds of steps would cost more than they save.
    """

    def __init__(
        self,
        store_path: Path | str,
        indices: Indices,
        *,
        data: DataSection,
        batch: BatchSection,
        task: Task,
        masked_lm: MaskedLMSection,
        max_batches: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        pin_memory: bool | None = None,
    ) -> None:
        """Plan the batches.

        Args:
            max_batches: packed batches over all workers; all there are if left out. Which ones is random but fixed.
            seed: of the choice and of the masks. Not the run's seed, so that figures of runs compare.
            Others: as for :class:`TrainingBatches`.

        Raises:
            DataError: the store can't be read.
        """
        store = Store(store_path)
        self._plan = _plan(store.lengths[indices], indices.astype(np.int64), data, batch, seed, epoch=0)
        self._preparer = _Preparer(store, _preparation(data, task, masked_lm, seed, random_crops=False), 0, 1)
        self._pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._num_batches = min(self._plan.num_batches, max_batches or self._plan.num_batches)
        mine: list[int | None] = list(range(rank, self._num_batches, world_size))
        self._mine = mine + [None] * (micro_batches(self._num_batches, world_size) - len(mine))

    def __len__(self) -> int:
        """Steps of an evaluation, the same on every rank."""
        return len(self._mine)

    def steps(self) -> Iterator[StepBatches]:
        """One batch of this rank at a time, fillers included; nothing where nothing is held out.

        Raises:
            DataError: the store is damaged.
        """
        requests = ((0, self._plan.batch_records(batch)) for batch in self._mine if batch is not None)
        prepared = self._preparer.prepared(requests)
        for step, batch in enumerate(self._mine):
            yield _assemble(self._plan, [batch], prepared, (0, step), (0, step + 1), self._pin_memory)

    def close(self) -> None:
        """Nothing to end; here so that both kinds of batches are handled alike."""
        self._preparer.close()


def filler_batch() -> PackedBatch:
    """What a rank computes where a step has no batch left for it: a sequence of one X without targets or record.

    It keeps collective operations equally many on every rank and adds nothing to loss, metrics or counts.
    """
    return PackedBatch(
        tokens=torch.tensor([CLS, int(RESIDUE_TABLE[ord("X")]), EOS]),
        cu_seqlens=torch.tensor([0, 3], dtype=torch.int32),
        max_seqlen=3,
        positions=torch.arange(3),
        records=torch.empty(0, dtype=torch.int64),
        targets=torch.full((3,), IGNORED_TARGET),
    )


class _Preparer:
    """Prepares batches in the order asked for, here or in loader processes that live until closed."""

    def __init__(self, store: Store, settings: PreparationSettings, num_workers: int, prefetch: int) -> None:
        self._store, self._settings = store, settings
        self._num_workers, self._prefetch = num_workers, prefetch
        self._processes: list[LoaderProcess] = []
        self._in_flight: deque[LoaderProcess] = deque()
        self._turn = 0

    def prepared(self, requests: Iterable[Request]) -> Iterator[PreparedBatch]:
        if self._num_workers == 0:
            return (prepare_batch(self._store, self._settings, *request) for request in requests)
        return self._from_processes(iter(requests))

    def close(self) -> None:
        processes, self._processes = self._processes, []
        self._in_flight.clear()
        for process in processes:
            process.close()

    def _from_processes(self, requests: Iterator[Request]) -> Iterator[PreparedBatch]:
        self._turn += 1
        turn = self._turn
        try:
            self._start()
            turns = cycle(self._processes)
            for request in islice(requests, self._num_workers * self._prefetch):
                self._send(next(turns), request)
            while self._in_flight:
                prepared = self._in_flight.popleft().reply()
                for request in islice(requests, 1):
                    self._send(next(turns), request)
                yield prepared
                if turn != self._turn:
                    raise RuntimeError("another iteration over the same batches was started, which ended this one")
        except GeneratorExit:
            raise  # what is on its way is dropped when the next iteration starts
        except BaseException:
            if turn == self._turn:
                self.close()  # a request may be half written, so nothing further can be asked of these processes
            raise

    def _start(self) -> None:
        """Drop what an abandoned iteration left on its way, or start the processes."""
        while self._in_flight:
            self._in_flight.popleft().discard()
        while len(self._processes) < self._num_workers:
            self._processes.append(LoaderProcess(self._store.path, self._settings))

    def _send(self, process: LoaderProcess, request: Request) -> None:
        process.request(*request)
        self._in_flight.append(process)


def _preparation(
    data: DataSection, task: Task, masked_lm: MaskedLMSection, seed: int, random_crops: bool
) -> PreparationSettings:
    shares = MaskingShares(masked_lm.mask_share, masked_lm.mask_token_share, masked_lm.random_token_share)
    return PreparationSettings(
        max_length=data.max_length,
        seed=seed,
        random_crops=random_crops,
        masking=shares if task == "masked_lm" else None,
    )


def _plan(
    residues_N: NDArray[np.integer], indices: Indices, data: DataSection, batch: BatchSection, seed: int, epoch: int
) -> EpochPlan:
    return plan_epoch(
        cropped_lengths(residues_N, data.max_length) + SPECIAL_TOKENS_PER_SEQUENCE,
        batch.tokens,
        batch.packing_window,
        seed,
        epoch,
        records=indices,
        batches_per_step=batch.batches_per_step,
    )


def _assemble(
    plan: EpochPlan,
    batches: list[int | None],
    prepared: Iterator[PreparedBatch],
    position: tuple[int, int],
    following: tuple[int, int],
    pin_memory: bool,
) -> StepBatches:
    """Take this rank's batches of one step from those prepared, and put fillers where there are none."""
    packed, num_tokens, num_targets = [], 0, 0
    for batch in batches:
        if batch is None:
            packed.append(filler_batch())
            continue
        arrays = next(prepared)
        packed.append(_to_torch(arrays, plan.batch_records(batch)))
        num_tokens += arrays.tokens.size
        num_targets += int(np.count_nonzero(arrays.targets != NO_TARGET))
    if pin_memory:
        packed = [batch.pin_memory() for batch in packed]
    return StepBatches(packed, *position, *following, num_tokens=num_tokens, num_targets=num_targets)


def _to_torch(prepared: PreparedBatch, records_N: Indices) -> PackedBatch:
    cu_seqlens = prepared.cu_seqlens
    return PackedBatch(
        tokens=torch.from_numpy(prepared.tokens.astype(np.int64)),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        max_seqlen=int((cu_seqlens[1:] - cu_seqlens[:-1]).max()),
        positions=torch.from_numpy(token_positions(cu_seqlens)),
        records=torch.from_numpy(records_N.copy()),
        targets=torch.from_numpy(prepared.targets.view(np.int8).astype(np.int64)),
    )
