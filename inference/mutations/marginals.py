"""Log-probabilities of amino acids at positions of sequences, by a masked language model.

A long sequence is seen through a window around the position: positions of one window share a pass, but where each is
masked. Shape legend: M positions that are asked for, N sequences, K tokens of the vocabulary, D channels.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax
from torch import Tensor

from esmeray.common.errors import ConfigError
from esmeray.dataset.batches.plan import longest_first
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.models.kinds import Output
from esmeray.inference.models.model import Model, run
from esmeray.inference.models.packing import ModelInput, input_of_pieces
from esmeray.model.forward_loop import Indices


class MaskedModel:
    """A masked language model that scores sequences.

    ``max_length``: residues of a window at most. ``tokens``: budget of a batch. Raises ConfigError for another kind of
    model.
    """

    def __init__(self, model: Model, max_length: int, tokens: int) -> None:
        if "masked_lm" not in model.heads or model.tokenizer.mask is None or not model.tokenizer.one_token_per_residue:
            raise ConfigError(
                f"model {model.facts.name}: is no masked language model of residues; give ESM-2, ESM C or a run of "
                "model.task masked_lm"
            )
        self.model, self.tokens = model, tokens
        self.max_length = min(max_length, model.facts.longest or max_length)
        ids, _ = model.tokenizer.encode([*AMINO_ACIDS])
        backbone_ids = (
            model.backbone.residue_ids
        )  # where the head's columns are in another order than the tokenizer's ids
        self._columns = ids if backbone_ids is None else backbone_ids.cpu().numpy()[ids]
        self._outputs = model.outputs(["logits"])

    def log_probabilities(
        self, sequences: Sequence[str], wanted_M2: NDArray[np.int64], masked: bool
    ) -> NDArray[np.float64]:
        """(M, 20) of :data:`AMINO_ACIDS`; ``wanted_M2`` has the number of a sequence and an offset in it, from 0.

        Each position is masked in a pass of its own, or none is.
        """
        windows = _Windows(self.model, sequences, wanted_M2, masked, self.max_length)
        logits_MK = np.empty((len(wanted_M2), self._outputs[0].channels))
        for batch in run(self.model, windows, self._outputs, self.tokens):
            for window, logits_LK in zip(batch.indices.tolist(), batch.by_text(self._outputs[0]), strict=True):
                positions = windows.positions[window]
                logits_MK[positions] = logits_LK[windows.rows[positions]]
        # Normalised over the whole vocabulary before the columns are taken: ratios of two amino acids are the same, but
        # a pseudo-log-likelihood counts what the model gives to other tokens. In float64: thousands of them are summed.
        return log_softmax(logits_MK, axis=1)[:, self._columns]

    def log_likelihoods(self, sequences: Sequence[str]) -> NDArray[np.float64]:
        """(N,) pseudo-log-likelihood (Salazar et al. 2020, equation 1): the sum over the amino acids of a sequence of
        log p of each where it alone is masked."""
        # X and its like have no probability of their own, and so no part in the sum.
        wanted = [
            (number, offset, AMINO_ACIDS.index(letter))
            for number, sequence in enumerate(sequences)
            for offset, letter in enumerate(sequence)
            if letter in AMINO_ACIDS
        ]
        wanted_M3 = np.array(wanted, np.int64).reshape(-1, 3)
        logs_M20 = self.log_probabilities(sequences, wanted_M3[:, :2], masked=True)
        chosen_M = np.take_along_axis(logs_M20, wanted_M3[:, 2:], axis=1)[:, 0]
        return np.bincount(wanted_M3[:, 0], chosen_M, minlength=len(sequences)).astype(np.float64)

    def embeddings(self, sequences: Sequence[str]) -> NDArray[np.float64]:
        """(N, D) means over the residues of whole sequences. Raises ConfigError for one that is too long."""
        longest = self.model.facts.longest
        if longest is not None and max(map(len, sequences)) > longest:
            raise ConfigError(f"features embeddings: a sequence has more than {longest:,} residues; give one_hot")
        return np.asarray(self.model.embed(sequences, tokens=self.tokens), np.float64)


class _Windows:
    """Windows as texts of a model (:class:`esmeray.inference.models.model.Texts`).

    ``positions`` are, for each window, the numbers of its positions, of M; ``rows`` (M,) their rows in it.
    """

    def __init__(
        self, model: Model, sequences: Sequence[str], wanted_M2: NDArray[np.int64], masked: bool, max_length: int
    ) -> None:
        self._pieces = model.tokenize(sequences).pieces
        self._special = model.facts.special_tokens
        numbers_M, offsets_M = wanted_M2.T
        sizes_M = np.array([*map(len, self._pieces)])[numbers_M]
        widths_M = np.minimum(sizes_M, max_length)
        # Centred on the position, and shifted at the ends: a window as wide as the model takes has the most context.
        starts_M = np.clip(offsets_M - max_length // 2, 0, sizes_M - widths_M)
        self.rows = offsets_M - starts_M
        hidden_M = self.rows if masked else np.full_like(self.rows, -1)
        # Equal windows are one pass: unmasked, all positions of a short protein; masked, the same position asked twice.
        keys_M4 = np.column_stack([numbers_M, starts_M, widths_M, hidden_M])
        self._windows, window_M = np.unique(keys_M4, axis=0, return_inverse=True)
        self.lengths: NDArray[np.int64] = self._windows[:, 2]
        self.positions = np.split(np.argsort(window_M, kind="stable"), np.cumsum(np.bincount(window_M))[:-1])

    def batches(self, token_budget: int | None) -> list[Indices]:
        assert token_budget is not None
        return longest_first(self.lengths + self._special, token_budget)

    def launch(self, model: Model, group: Sequence[Indices], outputs: Sequence[Output]) -> list[dict[str, Tensor]]:
        return model.rows([self._input(model, indices) for indices in group], outputs)

    def _input(self, model: Model, indices: Indices) -> ModelInput:
        pieces = []
        for number, start, width, hidden in self._windows[indices].tolist():
            ids = self._pieces[number][start : start + width]
            if hidden >= 0:
                ids = ids.copy()  # else the mask would stay in the sequence, for the windows after this one
                ids[hidden] = model.tokenizer.mask
            pieces.append(ids)
        return input_of_pieces(model.tokenizer, pieces)

    def name(self, index: int) -> str:
        number, start, width, _ = self._windows[index].tolist()
        return f"residues {start + 1} to {start + width} of sequence {number + 1}"
