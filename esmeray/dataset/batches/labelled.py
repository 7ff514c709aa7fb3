"""Packed batches of labelled records: slices of a token store, or cached features, with labels.

A batch consists of a few slices of a memory map (:mod:`esmeray.dataset.tokens.token_store`), about a microsecond each.

Shape legend: T tokens, N sequences, C labels, D channels, R residues of the whole store.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esmeray.dataset.batches.loader import BatchSource, Indices, SourceBatch
from esmeray.dataset.batches.preparation import Crop, crop_starts, cropped_lengths, head_length
from esmeray.dataset.packed_batch import FEATURES, TARGETS, WEIGHTS, PackedBatch
from esmeray.dataset.targets import IGNORED_TARGET, SparseTargets, has_target
from esmeray.dataset.tokens.esm import packed_from_tokens
from esmeray.dataset.tokens.token_store import TokenStore


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
