"""Sources of batches, and a loader that prepares batches in other processes.

In: a source of batches; for residues, a store and the preparation settings. Out: packed batches as torch tensors, in
the order of the requests.

Shape legend: T tokens, N sequences, M tokens to predict.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle, islice, starmap
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from esmeray.dataset.batches.loader_process import LoaderProcess
from esmeray.dataset.batches.preparation import (
    NO_TARGET,
    PreparationSettings,
    PreparedBatch,
    cropped_lengths,
    prepare_batch,
)
from esmeray.dataset.packed_batch import TARGETS, PackedBatch
from esmeray.dataset.section import SPECIAL_TOKENS_PER_SEQUENCE
from esmeray.dataset.store.reader import Store
from esmeray.dataset.tokens.esm import packed_from_tokens

PREFETCH = 4
"""Number of batches that each loader process prepares ahead."""

Indices: TypeAlias = NDArray[np.int64]
Request: TypeAlias = tuple[int, Indices] | tuple[int, Indices, int | None]
"""Epoch, the records of a batch and, in training, the step."""


class SourceBatch(NamedTuple):
    """A batch, the number of its targets in the loss, and the number of tokens of its records."""

    batch: PackedBatch
    num_targets: int
    num_tokens: int

    def without_targets(self) -> "SourceBatch":
        """Return a filler for a rank without a batch in a step: nothing counts, but collectives stay aligned."""
        return SourceBatch(self.batch.without_targets(), 0, 0)


class BatchSource(ABC):
    """Makes batches of records.

    Attributes:
        record_sequences: number of sequences per record, e.g. 2 for pairs.
    """

    record_sequences = 1

    @abstractmethod
    def token_lengths(self, records_N: Indices) -> NDArray[np.int64]:
        """Return (N,) tokens of each record after cropping, special tokens included."""

    @abstractmethod
    def batch(self, epoch: int, records_N: Indices, step: int | None = None) -> SourceBatch:
        """Return a batch of records. ``step``: training step, if the batch depends on it; None in validation."""

    def batches(self, requests: Iterable[Request]) -> Iterator[SourceBatch]:
        """Yield the batches in the order of the requests."""
        return starmap(self.batch, requests)

    def preparation(self) -> Callable[..., Any]:
        """Return the callable that loader processes unpickle and call in place of :meth:`batch`."""
        return partial(_arrays_of, self.batch)

    def finished(self, prepared: Any, records_N: Indices) -> SourceBatch:
        """Return the batch from the result of a loader process."""
        arrays, num_targets, num_tokens = prepared
        return SourceBatch(arrays.map(torch.from_numpy), num_targets, num_tokens)


def _arrays_of(make: Callable[..., SourceBatch], *request: Any) -> SourceBatch:
    """Make a batch with NumPy arrays in place of tensors, which pickle in a tenth of the time."""
    made = make(*request)
    return made._replace(batch=made.batch.map(torch.Tensor.numpy))


class ResidueSource(BatchSource):
    """Batches of residues."""

    def __init__(self, store: Store, settings: PreparationSettings) -> None:
        self._store, self._settings = store, settings

    def token_lengths(self, records_N: Indices) -> NDArray[np.int64]:
        return cropped_lengths(self._store.lengths[records_N], self._settings.max_length) + SPECIAL_TOKENS_PER_SEQUENCE

    def batch(self, epoch: int, records_N: Indices, step: int | None = None) -> SourceBatch:
        """Return a batch. Raises DataError if the store is damaged."""
        return self.finished(prepare_batch(self._store, self._settings, epoch, records_N, step), records_N)

    def preparation(self) -> Callable[..., PreparedBatch]:
        return partial(prepare_batch, self._store, self._settings)

    def finished(self, prepared: PreparedBatch, records_N: Indices) -> SourceBatch:
        positions_M = prepared.target_positions
        batch = packed_from_tokens(
            prepared.tokens,
            np.diff(prepared.cu_seqlens),
            records_N,
            # NO_TARGET as int8 is -100, torch's ignore_index, so no second pass over the targets is needed.
            by_token={TARGETS: torch.from_numpy(prepared.targets.view(np.int8).astype(np.int64))},
            target_positions=None if positions_M is None else torch.from_numpy(positions_M),
        )
        num_targets = np.count_nonzero(prepared.targets != NO_TARGET) if positions_M is None else positions_M.size
        return SourceBatch(batch, int(num_targets), batch.num_tokens)


class Loader:
    """Batches of a source, prepared in loader processes that run until the loader is closed."""

    def __init__(self, source: BatchSource, num_workers: int) -> None:
        """Set up without starting processes. Each of ``num_workers`` will prepare :data:`PREFETCH` batches ahead."""
        self._source, self._num_workers = source, num_workers
        self._processes: list[LoaderProcess] = []
        self._current = object()  # identity of the current iteration; an older one ends when it changes
        self._in_flight: deque[tuple[LoaderProcess, Indices]] = deque()

    def batches(self, requests: Iterable[Request]) -> Iterator[SourceBatch]:
        """Yield the requested batches in order. An iteration raises RuntimeError once another one is started.

        Raises LoaderProcessLost if a loader process was killed; the next iteration starts a new one.
        """
        if not self._num_workers:
            yield from self._source.batches(requests)
            return
        requests = iter(requests)
        this = self._current = object()
        try:
            self._start()  # not earlier, so that a dry run, which only plans, starts no process
            # Requests and replies cycle through the processes in the same order, which keeps the batches in order.
            turns = cycle(self._processes)
            for request in islice(requests, self._num_workers * PREFETCH):
                self._send(turns, request)
            while self._in_flight:
                process, records_N = self._in_flight.popleft()
                prepared = process.reply()
                # Send the next request before yielding, so that the process works while the step computes.
                for request in islice(requests, 1):
                    self._send(turns, request)
                yield self._source.finished(prepared, records_N)
                if this is not self._current:
                    raise RuntimeError("this iteration ended because another one over the same batches was started")
        except GeneratorExit:
            raise  # the next iteration starts new processes
        except BaseException:
            if this is self._current:
                self.close()  # a request may be half written, so these processes can't be used any more
            raise

    @property
    def queue_depth(self) -> int | None:
        """Number of prepared batches that wait; None without loader processes."""
        return sum(process.replies.qsize() for process in self._processes) if self._num_workers else None

    def close(self) -> None:
        """End the processes. Can be called more than once."""
        self._in_flight.clear()
        while self._processes:
            self._processes.pop().close()

    def _start(self) -> None:
        if self._in_flight:
            self.close()  # an earlier iteration was abandoned, and its replies would come first
        missing = self._num_workers - len(self._processes)
        self._processes += [LoaderProcess(self._source.preparation()) for _ in range(missing)]

    def _send(self, turns: Iterator[LoaderProcess], request: Request) -> None:
        process = next(turns)
        process.request(*request)
        self._in_flight.append((process, request[1]))
