"""Scores of a protein's mutants by models, as a job that the same command resumes.

Each part (log-probabilities of positions, pseudo-log-likelihoods, embeddings) has a folder in the unfinished output,
with its identity and the rows that are done. Shape legend: N mutants, C numbers of a row.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.common.progress import record_bar
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.models.opening import open_model
from esmeray.inference.mutations.marginals import MaskedModel
from esmeray.inference.mutations.section import MutationsSection
from esmeray.inference.mutations.variants import Mutant, Protein, marginal_scores
from esmeray.run_folder.job import accept, journal

PIECE_TOKENS = 262_144
"""Of a piece of work, which is computed again after a kill."""

Item = TypeVar("Item", int, str)


class Scorer:
    """A model that scores mutants of a protein, with its work in ``folder``."""

    def __init__(self, source: str, protein: Protein, section: MutationsSection, folder: Path) -> None:
        opened = open_model(
            source,
            section.precision,
            section.device,
            heads=["masked_lm"],
            random_weights=section.random_weights,
            stream=section.stream,
        )
        self.model = MaskedModel(opened, section.max_length, opened.token_budget(section.tokens))
        self.facts, self._folder = opened.facts, folder
        self._protein, self._method = protein, section.method

    def zero_shot(self, mutants: Sequence[Mutant]) -> NDArray[np.float64]:
        """(N,) scores. Raises DataError for insertions and deletions where the method has no score of them."""
        wild = self._protein.sequence
        width = min(len(wild), self.model.max_length)
        if self._method == "pseudo":
            # The wild type is the first row, so that a resumed job does not compute it again.
            sequences = [wild, *(mutant.sequence(wild) for mutant in mutants)]
            sums_N1 = self._rows(
                "pseudo", sequences, len(wild) * width, lambda items: self.model.log_likelihoods(items)[:, None]
            )
            return sums_N1[1:, 0] - sums_N1[0, 0]
        if any(mutant.whole is not None for mutant in mutants):
            raise DataError(f"method {self._method}: has no score of insertions and deletions; give pseudo")
        # Each position once, however many mutants change it: all its 20 probabilities are of one pass.
        offsets = sorted({mutation.offset for mutant in mutants for mutation in mutant.mutations})
        masked = self._method == "masked"
        logs_L20 = np.zeros((len(wild), len(AMINO_ACIDS)))

        def logs_of(items: Sequence[int]) -> NDArray[np.float64]:
            return self.model.log_probabilities([wild], np.array([(0, offset) for offset in items]), masked)

        # Not masked, all positions of a protein that is no longer than a window share one pass.
        one_pass = not masked and width == len(wild)
        logs_L20[offsets] = self._rows(self._method, offsets, 1 if one_pass else width, logs_of)
        return marginal_scores([mutant.mutations for mutant in mutants], logs_L20)

    def embeddings(self, mutants: Sequence[Mutant]) -> NDArray[np.float64]:
        """(N, D) of the mutants' sequences."""
        wild = self._protein.sequence
        return self._rows("embeddings", [mutant.sequence(wild) for mutant in mutants], len(wild), self.model.embeddings)

    def _rows(
        self, name: str, items: Sequence[Item], tokens: int, compute: Callable[[Sequence[Item]], NDArray[np.float64]]
    ) -> NDArray[np.float64]:
        """(items, C) piece by piece, those of an earlier process read back; ``tokens`` are those of an item."""
        if not items:
            return np.empty((0, len(AMINO_ACIDS)))
        # By the weights: a folder of scores may hold those of several models, each with a journal of its own.
        folder = self._folder / f"{name}-{self.facts.fingerprint}"
        job = {
            "model": self.facts.name,
            "precision": self.facts.precision,
            "max_length": self.model.max_length,
            "tokens": self.model.tokens,
            "mutants": xxhash.xxh3_128_hexdigest(json.dumps([self._protein.sequence, *items]).encode()),
        }
        accept(folder, job)
        at_once = max(1, PIECE_TOKENS // tokens)
        starts = range(0, len(items), at_once)
        with journal(folder) as kept, record_bar(name) as bar:
            for start in starts[kept.done :]:
                rows = compute(items[start : start + at_once])
                # By repr, which reads back to the same float: a resumed job gives the same bytes.
                kept.add(" ".join(map(repr, row)) for row in rows.tolist())
                bar(kept.done / len(starts), start + len(rows))
            return np.loadtxt(kept.lines(), np.float64, ndmin=2)
