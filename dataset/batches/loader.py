"""Packed batches of residues for one training worker, step by step, from any position of any epoch.

In: a store, the records of one side of the split, and the settings. Out: for each optimizer step
(:mod:`dataset.batches.steps`) the batches that this rank takes, as torch tensors. They are prepared in loader processes
(or here, with ``num_workers`` 0) and come in the plan's order however many there are.

Shape legend: T tokens, N sequences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from dataset.batches.cropping import CropCount, count_cropped, cropped_lengths
from dataset.batches.loader_process import LoaderProcess
from dataset.batches.masking import NO_TARGET, MaskingShares
from dataset.batches.preparation import PreparationSettings, PreparedBatch, prepare_batch
from dataset.batches.steps import Indices, Request, SourceBatch, TrainingSteps, ValidationSteps
from dataset.packed_batch import IGNORED_TARGET, PackedBatch
from dataset.store.reader import Store
from dataset.tokens.esm import CLS, EOS, RESIDUE_TABLE, token_positions
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE, BatchSection, DataSection, MaskedLMSection

_Prepared: TypeAlias = tuple[PreparedBatch, Indices] | None
"""A prepared batch and its records; None stands for a filler."""


class TrainingBatches(TrainingSteps):
    """Steps of training on a store of residues, for one rank."""

    def __init__(
        self,
        store_path: Path | str,
        indices: Indices,
        *,
        data: DataSection,
        batch: BatchSection,
        masked_lm: MaskedLMSection | None,
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
            masked_lm: how much is masked; None takes every residue as its own target.
            seed: of shuffling, cropping and masking.
            rank, world_size: which part of each step is this worker's.
            pin_memory: put batches into page-locked memory; by default where there is a CUDA device.

        Raises:
            DataError: the store can't be read.
        """
        settings = _preparation(data, masked_lm, seed, random_crops=True)
        source = ResidueSource(Store(store_path), settings, data.num_workers, data.prefetch)
        super().__init__(
            source, indices, batch=batch, seed=seed, rank=rank, world_size=world_size, pin_memory=pin_memory
        )
        self.cropped: CropCount = source.count_cropped(self._indices)
        """Sequences that an epoch crops, and residues that it leaves out by that."""


class ValidationBatches(ValidationSteps):
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
        masked_lm: MaskedLMSection | None,
        max_batches: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Plan the batches.

        Args:
            max_batches: packed batches over all workers; all there are if left out. Which ones is random but fixed.
            seed: of the choice and of the masks. Not the run's seed, so that metrics of runs compare.
            Others: as for :class:`TrainingBatches`.

        Raises:
            DataError: the store can't be read.
        """
        settings = _preparation(data, masked_lm, seed, random_crops=False)
        source = ResidueSource(Store(store_path), settings, num_workers=0, prefetch=1)
        super().__init__(
            source, indices, batch=batch, max_batches=max_batches, seed=seed, rank=rank, world_size=world_size
        )


def filler_batch() -> PackedBatch:
    """The batch of a rank for which a step has none left: a sequence of one X without targets or record.

    It keeps collective operations equally many on every rank and adds nothing to loss, metrics or counts.
    """
    return PackedBatch(
        tokens=torch.tensor([CLS, int(RESIDUE_TABLE[ord("X")]), EOS]),
        cu_seqlens=torch.tensor([0, 3], dtype=torch.int32),
        max_seqlen=3,
        positions=torch.arange(3),
        records=torch.empty(0, dtype=torch.int64),
        targets=torch.full((3,), IGNORED_TARGET),
        target_positions=torch.empty(0, dtype=torch.int64),
    )


class ResidueSource:
    """Batches of residues, prepared here or in loader processes that live until closed."""

    def __init__(
        self,
        store: Store,
        settings: PreparationSettings,
        num_workers: int,
        prefetch: int,
    ) -> None:
        self._store, self._settings = store, settings
        self._num_workers, self._prefetch = num_workers, prefetch
        self._processes: list[LoaderProcess] = []
        self._in_flight: deque[tuple[LoaderProcess, Indices] | None] = deque()  # None for a filler
        self._turn = 0

    def token_lengths(self, records_N: Indices) -> NDArray[np.int64]:
        """(N,) tokens of each record after cropping."""
        cropped_N = cropped_lengths(self._store.lengths[records_N], self._settings.max_length)
        return (cropped_N + SPECIAL_TOKENS_PER_SEQUENCE).astype(np.int64)

    def count_cropped(self, records_N: Indices) -> CropCount:
        """Count the records that are cropped, and the residues dropped."""
        return count_cropped(self._store.lengths[records_N], self._settings.max_length)

    def batches(self, requests: Iterable[Request]) -> Iterator[SourceBatch]:
        """The batches asked for, in order.

        Raises:
            DataError: the store is damaged.
            LoaderProcessLost: a loader process was killed; the next iteration starts a new one.
        """
        prepared = self._from_processes(iter(requests)) if self._num_workers else self._from_here(requests)
        for made in prepared:
            yield SourceBatch(filler_batch(), 0, 0) if made is None else self._source_batch(*made)

    @property
    def queue_depth(self) -> int | None:
        """Batches that are prepared and not taken yet; None where no process prepares them."""
        return sum(process.replies_waiting for process in self._processes) if self._num_workers else None

    def _from_here(self, requests: Iterable[Request]) -> Iterator[_Prepared]:
        for request in requests:
            yield None if request is None else (prepare_batch(self._store, self._settings, *request), request[1])

    def _source_batch(self, prepared: PreparedBatch, records_N: Indices) -> SourceBatch:
        has_target_T = prepared.targets != NO_TARGET
        if self._settings.masking is None:
            batch, num_targets = _to_torch(prepared, records_N), int(np.count_nonzero(has_target_T))
        else:
            positions_M = has_target_T.nonzero()[0]
            batch, num_targets = _to_torch(prepared, records_N, positions_M), positions_M.size
        return SourceBatch(batch, num_targets, batch.num_tokens)

    def close(self) -> None:
        """End the loader processes. May be called again."""
        processes, self._processes = self._processes, []
        self._in_flight.clear()
        for process in processes:
            process.close()

    def _from_processes(self, requests: Iterator[Request]) -> Iterator[_Prepared]:
        self._turn += 1
        turn = self._turn
        try:
            self._start()
            turns = cycle(self._processes)
            for request in islice(requests, self._num_workers * self._prefetch):
                self._send(turns, request)
            while self._in_flight:
                asked = self._in_flight.popleft()
                prepared = None if asked is None else (asked[0].reply(), asked[1])
                for request in islice(requests, 1):
                    self._send(turns, request)
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
            if (asked := self._in_flight.popleft()) is not None:
                asked[0].discard()
        while len(self._processes) < self._num_workers:
            self._processes.append(LoaderProcess(self._store.path, self._settings))

    def _send(self, turns: Iterator[LoaderProcess], request: Request) -> None:
        if request is None:
            self._in_flight.append(None)
            return
        process = next(turns)
        process.request(*request)
        self._in_flight.append((process, request[1]))


def _preparation(
    data: DataSection, masked_lm: MaskedLMSection | None, seed: int, random_crops: bool
) -> PreparationSettings:
    masking = None
    if masked_lm is not None:
        masking = MaskingShares(masked_lm.mask_share, masked_lm.mask_token_share, masked_lm.random_token_share)
    return PreparationSettings(max_length=data.max_length, seed=seed, random_crops=random_crops, masking=masking)


def _to_torch(prepared: PreparedBatch, records_N: Indices, positions_M: Indices | None = None) -> PackedBatch:
    cu_seqlens = prepared.cu_seqlens
    return PackedBatch(
        tokens=torch.from_numpy(prepared.tokens.astype(np.int64)),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        max_seqlen=int((cu_seqlens[1:] - cu_seqlens[:-1]).max()),
        positions=torch.from_numpy(token_positions(cu_seqlens)),
        records=torch.from_numpy(records_N.copy()),
        targets=torch.from_numpy(prepared.targets.view(np.int8).astype(np.int64)),
        target_positions=None if positions_M is None else torch.from_numpy(positions_M),
    )
