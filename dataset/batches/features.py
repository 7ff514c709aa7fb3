"""Batches of features in place of tokens: what training a head on a frozen network takes.

In: a source of labelled records and the features of each record's sequence. Out: batches of the same records in the
same order as the source's own, with features: training takes the same steps as when they are computed each time.

Shape legend: T tokens, N sequences, D channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dataset.batches.feature_store import FeatureStore
from dataset.batches.steps import Indices, Request, SourceBatch
from dataset.packed_batch import PackedBatch


class LabelledBatchSource(Protocol):
    """What is needed of :class:`dataset.batches.labelled.LabelledSource`."""

    def token_lengths(self, records_N: Indices) -> NDArray[np.int64]:
        """(N,) tokens of each record."""

    def plan_settings(self) -> dict[str, int]:
        """What lengths depend on."""

    def batches(self, requests: Iterable[Request]) -> Iterator[SourceBatch]:
        """Batches with tokens."""

    def without_tokens(self, records_N: Indices) -> SourceBatch:
        """Targets and weights of records, whose sequences have no tokens here."""

    def filler(self) -> PackedBatch:
        """A batch without targets."""


class FeatureSource:
    """Batches of features.

    Args:
        source: of the records; its cropping is that which the features were computed with.
        features: of every record's sequence.
        hashes: (records,) uint64, of each record's sequence.
        pooled: each sequence has one row, and a batch no tokens; else a row for each token.
        pin_memory: put batches into page-locked memory; by default where there is a CUDA device.
    """

    def __init__(
        self,
        source: LabelledBatchSource,
        features: FeatureStore,
        hashes: NDArray[np.uint64],
        *,
        pooled: bool,
        pin_memory: bool | None = None,
    ) -> None:
        self._source, self._features, self._hashes, self._pooled = source, features, hashes, pooled
        self._pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory

    def token_lengths(self, records_N: Indices) -> NDArray[np.int64]:
        """(N,) tokens of each record, whether or not they are in the batch: what steps are planned by."""
        return self._source.token_lengths(records_N)

    def plan_settings(self) -> dict[str, int]:
        """Those of the records."""
        return self._source.plan_settings()

    def batches(self, requests: Iterable[Request]) -> Iterator[SourceBatch]:
        """The batches asked for, in order."""
        for epoch, records_N in requests:
            if self._pooled:
                made = self._source.without_tokens(records_N)
            else:
                made = next(self._source.batches([(epoch, records_N)]))
            rows = list(self._features.rows(self._hashes[records_N]))
            batch = replace(made.batch, features=torch.from_numpy(np.concatenate(rows)))
            yield made._replace(batch=batch.pin_memory() if self._pin_memory else batch)

    def filler(self) -> PackedBatch:
        """As many rows of zeros as a filler has sequences, or tokens."""
        filler = self._source.filler()
        if self._pooled:
            filler = filler.without_tokens()
        rows = filler.num_sequences if self._pooled else filler.num_tokens
        return replace(filler, features=torch.zeros(rows, self._features.channels))

    def close(self) -> None:
        """Nothing was started."""
