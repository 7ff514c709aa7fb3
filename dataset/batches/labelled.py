"""Packed batches of labelled records: slices of a token store, or cached features, with the label of each.

A batch is a few slices of a memory map (:mod:`dataset.tokens.token_store`), a microsecond each.

Shape legend: T tokens, N sequences, C labels, D channels, R residues of the whole store.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataset.batches.cropping import Crop, crop_starts, cropped_lengths, head_length
from dataset.batches.steps import BatchSource, Indices, SourceBatch
from dataset.packed_batch import FEATURES, TARGETS, WEIGHTS, PackedBatch, filler_value
from dataset.targets import IGNORED_TARGET, SparseTargets, has_target
from dataset.tokens.esm import packed_from_tokens
from dataset.tokens.token_store import TokenStore


@dataclass(frozen=True)
class Labels:
    """Targets of every sequence, (records,) int64 or (records, C) float32, maybe sparse, or of residues, (R,) int64.

    ``weights``: (records,) float32 or None, of each sequence in the loss.
    """

    targets: NDArray[np.generic] | SparseTargets
    per_residue: bool = False
    weights: NDArray[np.float32] | None = None


class LabelledSource(BatchSource):
    """Batches of labelled records, or, without labels, of those to predict.

    ``max_length``: tokens without special ones; a longer record is cropped. ``seed``: of random windows.
    """

    def __init__(
        self, tokens: TokenStore, labels: Labels | None, *, max_length: int, crop: Crop, seed: int = 0
    ) -> None:
        self._tokens, self._labels = tokens, labels
        self._max_length, self._crop, self._seed = max_length, crop, seed
        self._prefix = np.asarray(tokens.prefix, dtype=np.int64)
        self._suffix = np.asarray(tokens.suffix, dtype=np.int64)
        self._num_special = self._prefix.size + self._suffix.size
        lengths = tokens.lengths.astype(np.int64)
        self._residue_starts = np.cumsum(lengths) - lengths if labels is not None and labels.per_residue else None

    def token_lengths(self, records_N: Indices) -> NDArray[np.int64]:
        return self._kept(records_N) + self._num_special

    def filler(self) -> PackedBatch:
        """A sequence of two padding tokens, whose targets no loss looks at."""
        by_token: dict[str, torch.Tensor] = {}
        by_sequence: dict[str, torch.Tensor] = {}
        if self._labels is not None:
            no_targets = torch.from_numpy(self._labels.targets[:0])
            rows = 2 if self._labels.per_residue else 1
            value = filler_value(TARGETS, no_targets.dtype)
            targets = no_targets.new_full((rows, *no_targets.shape[1:]), value)
            (by_token if self._labels.per_residue else by_sequence)[TARGETS] = targets
            if self._labels.weights is not None:
                by_sequence[WEIGHTS] = torch.zeros(1)
        tokens_T, no_records = np.array([self._tokens.pad] * 2), np.empty(0, dtype=np.int64)
        return packed_from_tokens(tokens_T, np.array([2]), no_records, by_token=by_token, by_sequence=by_sequence)

    def without_tokens(self, records_N: Indices) -> SourceBatch:
        """Targets and weights of records, whose sequences have no tokens here; not for targets of residues."""
        nothing, no_lengths_N = np.empty(0, dtype=np.int64), np.zeros_like(records_N)
        batch = packed_from_tokens(nothing, no_lengths_N, records_N)
        return self._labelled(batch, self.token_lengths(records_N), [])

    def batch(self, epoch: int, records_N: Indices) -> SourceBatch:
        kept_N = self._kept(records_N)
        pieces: list[NDArray[np.generic]] = []
        targets: list[NDArray[np.generic]] = []
        for record, spans in zip(records_N.tolist(), self._spans(epoch, records_N, kept_N), strict=True):
            cut = [self._tokens.piece(record, start, length) for start, length in spans]
            pieces += [self._prefix, *cut, self._suffix]
            if self._residue_starts is not None:
                targets += self._residue_targets(int(self._residue_starts[record]), spans)
        lengths_N = kept_N + self._num_special
        return self._labelled(packed_from_tokens(np.concatenate(pieces), lengths_N, records_N), lengths_N, targets)

    def _labelled(
        self, batch: PackedBatch, lengths_N: NDArray[np.int64], residue_targets: list[NDArray[np.generic]]
    ) -> SourceBatch:
        num_tokens = int(lengths_N.sum())
        if self._labels is None:
            return SourceBatch(batch, 0, num_tokens)
        records_N = batch.records.numpy()
        if self._labels.weights is not None:
            batch = batch.adding(by_sequence={WEIGHTS: torch.from_numpy(self._labels.weights[records_N])})
        if self._labels.per_residue:
            targets = torch.from_numpy(np.concatenate(residue_targets).astype(np.int64))
            batch = batch.adding(by_token={TARGETS: targets})
        else:
            targets = torch.from_numpy(np.ascontiguousarray(self._labels.targets[records_N]))
            batch = batch.adding(by_sequence={TARGETS: targets})
        return SourceBatch(batch, int(has_target(targets).sum()), num_tokens)

    def _kept(self, records_N: Indices) -> NDArray[np.int64]:
        return cropped_lengths(self._tokens.lengths[records_N], self._max_length)

    def _spans(self, epoch: int, records_N: Indices, kept_N: NDArray[np.int64]) -> list[list[tuple[int, int]]]:
        """Windows of each record, as (start, length)."""
        whole_N = self._tokens.lengths[records_N].astype(np.int64)
        if self._crop == "random":
            starts_N = crop_starts(whole_N, self._max_length, records_N, self._seed, epoch)
            return [[span] for span in zip(starts_N.tolist(), kept_N.tolist(), strict=True)]
        if self._crop == "start":
            return [[(0, length)] for length in kept_N.tolist()]
        return [_both_ends(whole, kept) for whole, kept in zip(whole_N.tolist(), kept_N.tolist(), strict=True)]

    def _residue_targets(self, first: int, spans: list[tuple[int, int]]) -> list[NDArray[np.generic]]:
        assert self._labels is not None
        before = np.full(self._prefix.size, IGNORED_TARGET)
        after = np.full(self._suffix.size, IGNORED_TARGET)
        inner = [self._labels.targets[first + start : first + start + length] for start, length in spans]
        return [before, *inner, after]


def _both_ends(whole: int, kept: int) -> list[tuple[int, int]]:
    if whole == kept:
        return [(0, whole)]
    head = head_length(kept, "ends")
    return [(0, head), (whole - (kept - head), kept - head)]


class FeatureSource(BatchSource):
    """The same batches as a source of labelled records has, with a frozen network's features in place of running it.

    Args:
        source: of the records; its cropping is that which the features were computed with.
        features: of every record's sequence: their number of ``channels``, and ``rows`` (rows, D) of each key.
        keys: (records,) of each record's features.
        pooled: each sequence has one row, and a batch no tokens; else a row for each token.
    """

    def __init__(self, source: LabelledSource, features: Any, keys: NDArray[np.integer], *, pooled: bool) -> None:
        self._source, self._features, self._keys, self._pooled = source, features, keys, pooled

    def token_lengths(self, records_N: Indices) -> NDArray[np.int64]:
        """(N,) tokens of each record, whether or not they are in the batch: what steps are planned by."""
        return self._source.token_lengths(records_N)

    def batch(self, epoch: int, records_N: Indices) -> SourceBatch:
        made = self._source.without_tokens(records_N) if self._pooled else self._source.batch(epoch, records_N)
        rows = list(self._features.rows(self._keys[records_N]))
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
