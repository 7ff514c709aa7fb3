"""Probabilities of residues by a masked language model, each position masked in a copy of its sequence.

In long sequences the model sees a window around the position. Copies and windows are packed into batches by their
tokens; a batch may hold windows of several sequences.

Shape legend: N sequences, T tokens of a batch, M positions, R residues of all sequences, L residues of a window,
K tokens of the vocabulary.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax
from torch import Tensor

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.models.model import Model, TokenizedTexts, run
from esmeray.inference.models.packing import ModelInput, Tokenized, input_of_pieces
from esmeray.model.forward_loop import Indices
from esmeray.model.heads.pooling import residues_of


class Windows(TokenizedTexts):
    """Windows of sequences as texts of a model.

    ``wanted_M2`` holds the number of a sequence and an offset in it, from 0. ``positions`` lists, per window, the
    indices (into M) of its positions; ``rows`` (M,) are their rows in the window.
    """

    def __init__(
        self, model: Model, tokenized: Tokenized, wanted_M2: NDArray[np.int64], masked: bool, max_length: int
    ) -> None:
        super().__init__(tokenized, model)
        numbers_M, offsets_M = wanted_M2.T
        sizes_M = self.lengths[numbers_M]
        widths_M = np.minimum(sizes_M, max_length)
        # Centred on the position and shifted at the ends, so that each window is as wide as possible for the most
        # context.
        starts_M = np.clip(offsets_M - max_length // 2, 0, sizes_M - widths_M)
        self.rows = offsets_M - starts_M
        hidden_M = self.rows if masked else np.full_like(self.rows, -1)
        # Equal windows share a pass: unmasked, e.g. all positions of a short protein; masked, a repeated position.
        keys_M4 = np.column_stack([numbers_M, starts_M, widths_M, hidden_M])
        self._windows, window_M = np.unique(keys_M4, axis=0, return_inverse=True)
        self.lengths = self._windows[:, 2]
        self.positions = np.split(np.argsort(window_M, kind="stable"), np.cumsum(np.bincount(window_M))[:-1])

    def _input(self, model: Model, indices: Indices) -> ModelInput:
        pieces = []
        for number, start, width, hidden in self._windows[indices].tolist():
            ids = self.tokenized.pieces[number][start : start + width]
            if hidden >= 0:
                ids = ids.copy()  # otherwise the mask would stay in the sequence for later windows
                ids[hidden] = model.tokenizer.mask
            pieces.append(ids)
        return input_of_pieces(model.tokenizer, pieces)

    def name(self, index: int) -> str:
        number, start, width, _ = self._windows[index].tolist()
        return f"residues {start + 1} to {start + width} of sequence {number + 1}"


def log_probabilities(model: Model, windows: Windows, token_budget: int) -> NDArray[np.float64]:
    """Return the (M, K) log-probabilities of the tokens at each position."""
    (output,) = model.outputs(["logits"])
    logits_MK = np.empty((windows.rows.size, output.channels))
    for batch in run(model, windows, [output], token_budget):
        for window, logits_LK in zip(batch.indices.tolist(), batch.by_text(output), strict=True):
            positions = windows.positions[window]
            logits_MK[positions] = logits_LK[windows.rows[positions]]
    # Normalized over the whole vocabulary: ratios of two amino acids are the same, but a pseudo-log-likelihood
    # includes the probability of other tokens. In float64, because thousands of values are summed.
    return log_softmax(logits_MK, axis=1)


def likelihoods_of_batch(model: Model, tokens_T: Tensor, inputs: ModelInput) -> Tensor:
    """Return (N, 3) fp32 pseudo-log-likelihoods of the sequences of a batch."""
    lengths_N = residues_of(inputs.batch, *model.around)[1].cpu().numpy()
    pieces = np.split(tokens_T[inputs.residues].int().cpu().numpy(), np.cumsum(lengths_N)[:-1])
    tokenized = Tokenized(pieces, np.zeros_like(lengths_N))
    rows_N3 = pseudo_log_likelihoods(model, tokenized, int(lengths_N.max()), model.token_budget(inputs.token_budget))
    return torch.from_numpy(rows_N3).to(model.device, torch.float32)


def pseudo_log_likelihoods(
    model: Model, tokenized: Tokenized, max_length: int, token_budget: int
) -> NDArray[np.float64]:
    """Return (N, 3) pseudo-log-likelihoods: mean per amino acid, sum, and number of amino acids.

    The sum over a sequence's amino acids of log p of each, when it alone is masked (Salazar et al. 2020, equation 1).
    """
    positions_M4 = scored_positions(model, tokenized)
    windows = Windows(model, tokenized, positions_M4[:, :2], True, max_length)
    logs_MK = log_probabilities(model, windows, token_budget)
    return summed(model, positions_M4, logs_MK, len(tokenized.pieces))


def scored_positions(model: Model, tokenized: Tokenized) -> NDArray[np.int64]:
    """Return (M, 4) positions of amino acids: number of the sequence, offset, row (in R) and token id.

    Other letters, such as X, have no probability and are left out.
    """
    lengths_N = tokenized.lengths
    ids_R = np.concatenate(tokenized.pieces)
    rows_R = np.arange(ids_R.size)
    offsets_R = rows_R - np.repeat(np.cumsum(lengths_N) - lengths_N, lengths_N)
    numbers_R = np.repeat(np.arange(lengths_N.size), lengths_N)
    return np.column_stack([numbers_R, offsets_R, rows_R, ids_R])[np.isin(ids_R, amino_acid_ids(model))]


def summed(
    model: Model, positions_M4: NDArray[np.int64], logs_MK: NDArray[np.float64], number: int
) -> NDArray[np.float64]:
    """Return (N, 3) as :func:`pseudo_log_likelihoods` from the log-probabilities at :func:`scored_positions`."""
    own_M = logs_MK[np.arange(len(logs_MK)), head_columns(model, positions_M4[:, 3])]
    sums_N = np.bincount(positions_M4[:, 0], own_M, number)
    counts_N = np.bincount(positions_M4[:, 0], minlength=number)
    return np.column_stack([sums_N / counts_N.clip(min=1), sums_N, counts_N])


def amino_acid_ids(model: Model) -> NDArray[np.integer]:
    """Return the (20,) token ids of :data:`AMINO_ACIDS`."""
    return model.tokenizer.encode([*AMINO_ACIDS])[0]


def head_columns(model: Model, ids: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return the columns of the head's logits for token ids; their order may differ from the tokenizer's."""
    backbone_ids = model.backbone.residue_ids
    return ids if backbone_ids is None else backbone_ids.cpu().numpy()[ids]
