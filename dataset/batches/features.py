"""Batches of features in place of tokens: what training a head on a frozen network takes.

In: a source of labelled records and the features of each record's sequence. Out: batches of the same records in the
same order as the source's own, with features: training takes the same steps as when they are computed each time.

Shape legend: T tokens, N sequences, D channels.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dataset.batches.labelled import LabelledSource
from dataset.batches.steps import BatchSource, Indices, SourceBatch
from dataset.packed_batch import FEATURES, PackedBatch


class FeatureRows(Protocol):
    """Features by key: a FeatureStore, by the hash of a sequence, or vectors by record."""

    channels: int

    def rows(self, keys: Any, /) -> Iterable[NDArray]:
        """One array (rows, D) of each key."""


class FeatureSource(BatchSource):
    """Batches of features.

    Args:
        source: of the records; its cropping is that which the features were computed with.
        features: of every record's sequence.
        hashes: (records,) keys of each record's features.
        pooled: each sequence has one row, and a batch no tokens; else a row for each token.
    """

    def __init__(
        self, source: LabelledSource, features: FeatureRows, hashes: NDArray[np.integer], *, pooled: bool
    ) -> None:
        self._source, self._features, self._hashes, self._pooled = source, features, hashes, pooled

    def token_lengths(self, records_N: Indices) -> NDArray[np.int64]:
        """(N,) tokens of each record, whether or not they are in the batch: what steps are planned by."""
        return self._source.token_lengths(records_N)

    def batch(self, epoch: int, records_N: Indices) -> SourceBatch:
        made = self._source.without_tokens(records_N) if self._pooled else self._source.batch(epoch, records_N)
        rows = list(self._features.rows(self._hashes[records_N]))
        return made._replace(batch=self._with_features(made.batch, torch.from_numpy(np.concatenate(rows))))

    def filler(self) -> PackedBatch:
        """Rows of zeros, one for each sequence or token of a filler."""
        filler = self._source.filler()
        if self._pooled:
            filler = filler.without_tokens()
        rows = filler.num_sequences if self._pooled else filler.num_tokens
        return self._with_features(filler, torch.zeros(rows, self._features.channels))

    def _with_features(self, batch: PackedBatch, features: torch.Tensor) -> PackedBatch:
        if self._pooled:
            return batch.adding(by_sequence={FEATURES: features})
        return batch.adding(by_token={FEATURES: features})
