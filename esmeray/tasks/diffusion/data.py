"""Training batches of sequence diffusion: sequences with structures, some of whose residues are hidden.

Hidden residues, dropped structures and the noise on coordinates depend only on (seed, epoch, record). A resumed run
therefore sees the same data as an uninterrupted one.

Shape legend: T tokens, N sequences, L residues of one sequence.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esmeray.dataset.batches.loader import BatchSource, Indices, SourceBatch
from esmeray.dataset.batches.preparation import chosen_positions, crop_starts, cropped_lengths
from esmeray.dataset.batches.random_bits import Bits, keyed_bits, positional_bits, threshold
from esmeray.dataset.packed_batch import CHAINS, COORDINATES, LABELS, NO_LABEL, NUMBERS, TARGETS, WEIGHTS
from esmeray.dataset.section import SPECIAL_TOKENS_PER_SEQUENCE
from esmeray.dataset.structures.store import StructureStore, chain_positions
from esmeray.dataset.targets import IGNORED_TARGET
from esmeray.dataset.tokens.esm import MASK, cumulative_lengths, packed_from_tokens, tokenize_pieces
from esmeray.tasks.diffusion.section import DiffusionSection

_TIME, _HIDDEN, _NO_STRUCTURE, _NO_LABEL, _NOISE = range(11, 16)
"""Purposes of random bits (:func:`~esmeray.dataset.batches.random_bits.keyed_bits`)."""


class StructureSource(BatchSource):
    """Batches of a structure store. In training with noise, dropped conditions and random crops.

    ``seed``: seed of all random choices. Validation does not use the run's seed, so that metrics of runs are
    comparable.
    """

    def __init__(
        self, store: StructureStore, section: DiffusionSection, *, max_length: int, seed: int, training: bool
    ) -> None:
        self._store, self._section, self._max_length = store, section, max_length
        self._seed, self._training = seed, training

    def token_lengths(self, records_N: Indices) -> NDArray[np.int64]:
        return cropped_lengths(self._store.store.lengths[records_N], self._max_length) + SPECIAL_TOKENS_PER_SEQUENCE

    def batch(self, epoch: int, records_N: Indices, step: int | None = None) -> SourceBatch:
        whole_N = self._store.store.lengths[records_N]
        lengths_N = cropped_lengths(whole_N, self._max_length)
        starts_N = np.zeros_like(lengths_N)
        if self._training:
            starts_N = crop_starts(whole_N, self._max_length, records_N, self._seed, epoch)
        tokens_T = tokenize_pieces(self._store.store.windows(records_N, starts_N, lengths_N))
        cu_seqlens = cumulative_lengths(lengths_N + SPECIAL_TOKENS_PER_SEQUENCE)
        # Times are in (0, 1]: at time 0 nothing would be hidden, and nothing learnt.
        times_N = (self._bits(_TIME, epoch, records_N).astype(np.float64) + 1) / 2.0**64
        # Bounded below, since a weighting divides by the share.
        shares_N = np.maximum(hidden_share(times_N, self._section.schedule), 1e-3)
        bits_T = positional_bits(self._bits(_HIDDEN, epoch, records_N), cu_seqlens)
        below_T = np.array([threshold(share) for share in shares_N.tolist()]).repeat(np.diff(cu_seqlens))
        hidden_M = chosen_positions(bits_T, tokens_T, cu_seqlens, below_T)
        targets_T = np.full(tokens_T.size, IGNORED_TARGET)
        targets_T[hidden_M] = tokens_T[hidden_M]
        # Only after the targets were copied.
        tokens_T[hidden_M] = MASK
        # Separate random bits: a sequence may lose its label and keep its structure.
        unlabelled_N = self._dropped(_NO_LABEL, epoch, records_N)
        structures = self._structures(epoch, records_N, starts_N, lengths_N, cu_seqlens)
        batch = packed_from_tokens(
            tokens_T,
            lengths_N + SPECIAL_TOKENS_PER_SEQUENCE,
            records_N,
            by_token={
                TARGETS: torch.from_numpy(targets_T),
                **{name: torch.from_numpy(rows) for name, rows in structures.items()},
            },
            by_sequence={
                WEIGHTS: torch.from_numpy(loss_weights(shares_N, self._section).astype(np.float32)),
                LABELS: torch.from_numpy(np.where(unlabelled_N, NO_LABEL, self._store.labels[records_N])),
            },
            target_positions=torch.from_numpy(hidden_M),
        )
        return SourceBatch(batch, hidden_M.size, tokens_T.size)

    def _structures(
        self, epoch: int, records_N: Indices, starts_N: Indices, lengths_N: Indices, cu_seqlens: NDArray[np.int32]
    ) -> dict[str, NDArray]:
        """Return coordinates (T, 4, 3), chains (T,) and numbers (T,) by name. Coordinates are NaN for special tokens
        and dropped structures."""
        coordinates = np.full((int(cu_seqlens[-1]), 4, 3), np.nan, dtype=np.float32)
        chains, numbers = np.zeros((2, int(cu_seqlens[-1])), dtype=np.int64)
        dropped_N = self._dropped(_NO_STRUCTURE, epoch, records_N)
        windows = zip(records_N.tolist(), starts_N.tolist(), lengths_N.tolist(), cu_seqlens.tolist(), strict=False)
        for number, (record, start, length, first) in enumerate(windows):
            # The rows after <cls>, which has no coordinates.
            rows = slice(first + 1, first + 1 + length)
            atoms, confidence, chains[rows] = self._store.atoms(record, start, length)
            numbers[rows] = chain_positions(self._store.numbers(record, start, length))
            # Dropped structures keep their chains: the number of chains is no structural information.
            if dropped_N[number]:
                continue
            known = confidence >= self._section.min_confidence
            coordinates[rows] = np.where(known[:, None, None], atoms, np.nan)
            if self._training and self._section.noise:
                # A generator per record, so that noise does not depend on the other records in the batch.
                random = np.random.default_rng(self._bits(_NOISE, epoch, records_N[number : number + 1]))
                coordinates[rows] += self._section.noise * random.standard_normal((length, 4, 3), dtype=np.float32)
        return {COORDINATES: coordinates, CHAINS: chains, NUMBERS: numbers}

    def _dropped(self, purpose: int, epoch: int, records_N: Indices) -> NDArray[np.bool_]:
        # Held-out sequences keep their conditions: the model evaluates the loss without them itself.
        share = self._section.drop_share if self._training else 0.0
        return self._bits(purpose, epoch, records_N) < threshold(share)

    def _bits(self, purpose: int, epoch: int, records_N: Indices) -> Bits:
        return keyed_bits(purpose, self._seed, epoch, records_N)


def hidden_share(times: Any, schedule: str) -> Any:
    """Return the share of hidden residues at times in [0, 1], a number or an array."""
    return times if schedule == "linear" else 1 - np.cos(times * np.pi / 2)


def loss_weights(shares_N: NDArray[np.float64], section: DiffusionSection) -> NDArray[np.float64]:
    """Return the weight (N,) of each sequence; its mean over hidden residues is 1 for the linear schedule."""
    if section.weighting == "none":
        return np.ones_like(shares_N)
    # Means over residues that are hidden with share m, at uniform times: 1/3 for 1 - m, and 2 for 1 / m.
    return 3 * (1 - shares_N) if section.weighting == "linear" else 1 / (2 * shares_N)
