"""Sources of batches, and batches prepared in loader processes.

In: a source of batches; for residues a store and the settings of the preparation. Out: packed batches as torch tensors,
in the order in which they are asked for.

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

Indices: TypeAlias = NDArray[np.int64]
Request: TypeAlias = tuple[int, Indices] | tuple[int, Indices, int]
"""An epoch, the records of a batch and, where the source follows it, the step of training."""


class SourceBatch(NamedTuple):
    """A batch, how many of its targets a loss is taken at, and how many tokens its records have."""

    batch: PackedBatch
    num_targets: int
    num_tokens: int

    def without_targets(self) -> "SourceBatch":
        """The batch of a rank for which a step has none left: nothing counts, and collectives are equally many."""
        return SourceBatch(self.batch.without_targets(), 0, 0)


class BatchSource(ABC):
    """Makes batches of records.

    Attributes:
        follows_steps: what is made of them depends on the step of training.
        record_sequences: sequences that a record gives, such as two of a pair.
    """

    follows_steps = False
    record_sequences = 1

    @abstractmethod
    def token_lengths(self, records_N: Indices) -> NDArray[np.int64]:
        """(N,) tokens that each record gives, special tokens included, after cropping."""

    @abstractmethod
    def batch(self, epoch: int, records_N: Indices) -> SourceBatch:
        """The records of one batch, a function of epoch and records alone."""

    def batches(self, requests: Iterable[Request]) -> Iterator[SourceBatch]:
        """The batches in the order asked for. Starting another iteration ends this one."""
        return starmap(self.batch, requests)

    def preparation(self) -> Callable[..., Any]:
        """The callable that a loader process unpickles and calls instead of :meth:`batch`; its result is sent back."""
        return partial(_arrays_of, self.batch)

    def finished(self, prepared: Any, records_N: Indices) -> SourceBatch:
        """The batch, of what a loader process prepared."""
        arrays, num_targets, num_tokens = prepared
        return SourceBatch(arrays.map(torch.from_numpy), num_targets, num_tokens)


def _arrays_of(make: Callable[..., SourceBatch], epoch: int, records_N: Indices) -> SourceBatch:
    """A batch with NumPy's arrays for tensors: these are pickled in a tenth of the time."""
    made = make(epoch, records_N)
    return made._replace(batch=made.batch.map(torch.Tensor.numpy))


class ResidueSource(BatchSource):
    """Batches of residues."""

    def __init__(self, store: Store, settings: PreparationSettings) -> None:
        self._store, self._settings = store, settings
        self.follows_steps = settings.masking is not None and settings.masking.first_mask_share is not None

    def token_lengths(self, records_N: Indices) -> NDArray[np.int64]:
        return cropped_lengths(self._store.lengths[records_N], self._settings.max_length) + SPECIAL_TOKENS_PER_SEQUENCE

    def batch(self, epoch: int, records_N: Indices, step: int | None = None) -> SourceBatch:
        """Raises DataError where the store is damaged."""
        return self.finished(prepare_batch(self._store, self._settings, epoch, records_N, step), records_N)

    def preparation(self) -> Callable[..., PreparedBatch]:
        return partial(prepare_batch, self._store, self._settings)

    def finished(self, prepared: PreparedBatch, records_N: Indices) -> SourceBatch:
        positions_M = prepared.target_positions
        batch = packed_from_tokens(
            prepared.tokens,
            np.diff(prepared.cu_seqlens),
            records_N,
            # The byte of "no target" is -100 in int8, torch's own value for it: no second pass over the targets.
            by_token={TARGETS: torch.from_numpy(prepared.targets.view(np.int8).astype(np.int64))},
            target_positions=None if positions_M is None else torch.from_numpy(positions_M),
        )
        num_targets = np.count_nonzero(prepared.targets != NO_TARGET) if positions_M is None else positions_M.size
        return SourceBatch(batch, int(num_targets), batch.num_tokens)


class Loader:
    """Batches of a source, prepared in loader processes that live until closed."""

    def __init__(self, source: BatchSource, num_workers: int, prefetch: int) -> None:
        """Start nothing yet; each of ``num_workers`` processes will prepare ``prefetch`` batches ahead."""
        self._source, self._num_workers, self._prefetch = source, num_workers, prefetch
        self._processes: list[LoaderProcess] = []
        self._in_flight: deque[tuple[LoaderProcess, Indices]] = deque()
        self._turn = 0  # of iterations: an old one finds out by it that another has begun

    def batches(self, requests: Iterable[Request]) -> Iterator[SourceBatch]:
        """The batches asked for, in order.

        Raises LoaderProcessLost where a loader process was killed; the next iteration starts a new one.
        """
        if not self._num_workers:
            yield from self._source.batches(requests)
            return
        requests = iter(requests)
        self._turn += 1
        turn = self._turn
        try:
            self._start()  # here and not before: a plan alone, as of a dry run, starts no process
            # In turn, and replies are taken in the same turn: so batches come in the order of the requests.
            turns = cycle(self._processes)
            for request in islice(requests, self._num_workers * self._prefetch):
                self._send(turns, request)
            while self._in_flight:
                process, records_N = self._in_flight.popleft()
                prepared = process.reply()
                # Asked before the batch is handed out: the process works while the step computes.
                for request in islice(requests, 1):
                    self._send(turns, request)
                yield self._source.finished(prepared, records_N)
                if turn != self._turn:
                    raise RuntimeError("another iteration over the same batches was started, which ended this one")
        except GeneratorExit:
            raise  # what is on its way is dropped when the next iteration starts
        except BaseException:
            if turn == self._turn:
                self.close()  # a request may be half written, so nothing further can be asked of these processes
            raise

    @property
    def queue_depth(self) -> int | None:
        """Batches that are prepared and not taken yet; None where they are made when they are asked for."""
        return sum(process.replies.qsize() for process in self._processes) if self._num_workers else None

    def close(self) -> None:
        """End the processes. May be called again."""
        self._in_flight.clear()
        while self._processes:
            self._processes.pop().close()

    def _start(self) -> None:
        while self._in_flight:
            process, _ = self._in_flight.popleft()
            process.next_reply()  # which nobody wants any more
        missing = self._num_workers - len(self._processes)
        self._processes += [LoaderProcess(self._source.preparation()) for _ in range(missing)]

    def _send(self, turns: Iterator[LoaderProcess], request: Request) -> None:
        process = next(turns)
        process.request(*request)
        self._in_flight.append((process, request[1]))
