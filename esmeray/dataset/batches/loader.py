"""Sources of batches, and a loader that prepares batches in other processes.

In: a source of batches; for residues, a store and the preparation settings; for labelled records, a token store or
cached features, and labels. Out: packed batches as torch tensors, in the order of the requests. A batch of labelled
records consists of a few slices of a memory map (:mod:`esmeray.dataset.tokens.token_store`), about a microsecond each.

Shape legend: T tokens, N sequences, M tokens to predict, C labels, D channels, R residues of the whole store.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, starmap
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from esmeray.dataset.batches.loader_process import LoaderProcess
from esmeray.dataset.batches.preparation import (
    NO_TARGET,
    Crop,
    PreparationSettings,
    PreparedBatch,
    crop_starts,
    cropped_lengths,
    head_length,
    prepare_batch,
)
from esmeray.dataset.packed_batch import FEATURES, TARGETS, WEIGHTS, PackedBatch
from esmeray.dataset.section import SPECIAL_TOKENS_PER_SEQUENCE
from esmeray.dataset.store.reader import Store
from esmeray.dataset.targets import IGNORED_TARGET, SparseTargets, has_target
from esmeray.dataset.tokens.esm import packed_from_tokens
from esmeray.dataset.tokens.token_store import TokenStore

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


@dataclass(frozen=True)
class Labels:
    """Targets of all records: (records,) int64, (records, C) float32 (maybe sparse), or (R,) int64 for residues.

    ``weights``: (records,) float32, weight of each sequence in the loss, or None.
    """

    targets: NDArray[np.generic] | SparseTargets
    per_residue: bool = False
    weights: NDArray[np.float32] | None = None


class LabelledSource(BatchSource):
    """Batches of labelled records.

    ``max_length``: maximum tokens of a record, without special tokens; longer records are cropped. ``seed``: seed of
    random windows.
    """

    def __init__(self, tokens: TokenStore, labels: Labels, *, max_length: int, crop: Crop, seed: int = 0) -> None:
        self._tokens, self._labels = tokens, labels
        self._max_length, self._crop, self._seed = max_length, crop, seed
        self._around = [np.asarray(ids, dtype=np.int64) for ids in (tokens.manifest.prefix, tokens.manifest.suffix)]
        self._num_special = sum(ids.size for ids in self._around)
        lengths = tokens.lengths.astype(np.int64)
        # Only for per-residue labels, because the array is sent to each loader process.
        self._residue_starts = np.cumsum(lengths) - lengths if labels.per_residue else lengths[:0]

    def token_lengths(self, records_N: Indices) -> NDArray[np.int64]:
        return cropped_lengths(self._tokens.lengths[records_N], self._max_length) + self._num_special

    def without_tokens(self, records_N: Indices) -> SourceBatch:
        """Return targets and weights of records, without their tokens; not for per-residue targets."""
        batch = packed_from_tokens(np.empty(0, dtype=np.int64), np.zeros_like(records_N), records_N)
        return self._labelled(batch, self.token_lengths(records_N), self._labels.targets[records_N])

    def batch(self, epoch: int, records_N: Indices, step: int | None = None) -> SourceBatch:
        kept_N = cropped_lengths(self._tokens.lengths[records_N], self._max_length)
        prefix, suffix = self._around
        pieces: list[NDArray[np.generic]] = []
        residue_targets: list[NDArray[np.generic]] = []
        for record, spans in zip(records_N.tolist(), self._spans(epoch, records_N, kept_N), strict=True):
            pieces += [prefix, *(self._tokens.piece(record, start, length) for start, length in spans), suffix]
            if self._labels.per_residue:
                first = int(self._residue_starts[record])
                inner = [self._labels.targets[first + start : first + start + length] for start, length in spans]
                # Special tokens have no label, but targets must be as long as the tokens.
                before, after = (np.full_like(ids, IGNORED_TARGET) for ids in self._around)
                residue_targets += [before, *inner, after]
        lengths_N = kept_N + self._num_special
        batch = packed_from_tokens(np.concatenate(pieces), lengths_N, records_N)
        targets = np.concatenate(residue_targets) if residue_targets else self._labels.targets[records_N]
        return self._labelled(batch, lengths_N, targets)

    def _labelled(self, batch: PackedBatch, lengths_N: Indices, targets: NDArray[np.generic]) -> SourceBatch:
        weights = self._labels.weights
        if weights is not None:
            batch = batch.adding(by_sequence={WEIGHTS: torch.from_numpy(weights[batch.records.numpy()])})
        named = {TARGETS: torch.from_numpy(np.ascontiguousarray(targets))}
        batch = batch.adding(by_token=named) if self._labels.per_residue else batch.adding(by_sequence=named)
        return SourceBatch(batch, int(has_target(targets).sum()), int(lengths_N.sum()))

    def _spans(self, epoch: int, records_N: Indices, kept_N: NDArray[np.int64]) -> list[list[tuple[int, int]]]:
        """Return the windows of each record as (start, length)."""
        whole_N = self._tokens.lengths[records_N].astype(np.int64)
        if self._crop == "ends":
            return [_both_ends(whole, kept) for whole, kept in zip(whole_N.tolist(), kept_N.tolist(), strict=True)]
        starts_N = (
            crop_starts(whole_N, self._max_length, records_N, self._seed, epoch)
            if self._crop == "random"
            else np.zeros_like(kept_N)
        )
        return [[span] for span in zip(starts_N.tolist(), kept_N.tolist(), strict=True)]


def _both_ends(whole: int, kept: int) -> list[tuple[int, int]]:
    head = head_length(kept, "ends")
    return [(0, head), (whole - (kept - head), kept - head)]


class FeatureSource(BatchSource):
    """Batches of a :class:`LabelledSource` with cached features in place of running the frozen network.

    Args:
        source: source of the records; its cropping must be the one that the features were computed with.
        features: features of all sequences; ``features.rows(keys)`` yields (rows, D) per key.
        keys: (records,) key of each record's features.
        pooled: True if each sequence has one row and batches have no tokens; False if each token has a row.
    """

    def __init__(self, source: LabelledSource, features: Any, keys: NDArray[np.integer], *, pooled: bool) -> None:
        self._source, self._features, self._keys, self._pooled = source, features, keys, pooled

    def token_lengths(self, records_N: Indices) -> NDArray[np.int64]:
        """(N,) tokens of each record, even if batches have no tokens, because steps are planned by tokens."""
        return self._source.token_lengths(records_N)

    def batch(self, epoch: int, records_N: Indices, step: int | None = None) -> SourceBatch:
        made = self._source.without_tokens(records_N) if self._pooled else self._source.batch(epoch, records_N)
        rows = torch.from_numpy(np.concatenate(list(self._features.rows(self._keys[records_N]))))
        named = {"by_sequence" if self._pooled else "by_token": {FEATURES: rows}}
        return made._replace(batch=made.batch.adding(**named))


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
