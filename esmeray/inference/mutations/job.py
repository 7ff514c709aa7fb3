"""Score mutants with models, as a job that the same command resumes.

Each step (log-probabilities of positions, pseudo-log-likelihoods, embeddings) has a folder in the unfinished output,
with its identity and the finished rows. In long sequences the model sees a window around the position. Unmasked
positions with the same window share a pass.

Shape legend: N mutants or sequences, C numbers per row, M requested positions, K tokens of the vocabulary, D
channels.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from esmeray.common.command_line import warn
from esmeray.common.errors import ConfigError, DataError
from esmeray.common.progress import record_bar
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.models.masking import (
    Windows,
    amino_acid_ids,
    head_columns,
    log_probabilities,
    pseudo_log_likelihoods,
)
from esmeray.inference.models.opening import open_model
from esmeray.inference.mutations.section import MutationsSection
from esmeray.inference.mutations.variants import Variant, marginal_scores
from esmeray.run_folder.job import accept, journal

WINDOW = 1022
"""Maximum residues of a sequence in ESM-2's training."""


PIECE_TOKENS = 262_144
"""Tokens per piece of work. After a kill at most one piece is computed again."""

Item = TypeVar("Item", list[int], str)


class Scorer:
    """A masked language model that scores the mutants of all proteins in shared passes. Its work is in ``folder``.

    Raises ConfigError for another kind of model, or a window longer than the model's maximum.
    """

    def __init__(self, source: str, section: MutationsSection, folder: Path) -> None:
        model = open_model(source, section.precision, section.device, heads=["masked_lm"])
        if "masked_lm" not in model.heads or model.tokenizer.mask is None or not model.tokenizer.one_token_per_residue:
            raise ConfigError(
                f"model {model.facts.name}: is not a masked language model with one token per residue; give "
                "ESM-2, ESM C, a protein BERT or a run of model.task masked_lm"
            )
        longest = model.facts.longest or section.max_length or WINDOW
        if section.max_length is not None and section.max_length > longest:
            raise ConfigError(
                f"max_length {section.max_length}: model {model.facts.name} supports at most {longest} residues; set "
                f"it to at most {longest}"
            )
        self.max_length = section.max_length or min(WINDOW, longest)
        self.facts, self._model = model.facts, model
        self._tokens = model.token_budget(section.tokens)
        self._method = section.method
        self._folder = folder
        self._columns = head_columns(model, amino_acid_ids(model))

    def zero_shot(self, variants: Sequence[Variant]) -> NDArray[np.float64]:
        """(N,) zero-shot scores. Raises DataError for insertions and deletions if the method can't score them."""
        wild_types = list(dict.fromkeys(variant.protein.sequence for variant in variants))
        number_of = {sequence: number for number, sequence in enumerate(wild_types)}
        numbers_N = [number_of[variant.protein.sequence] for variant in variants]
        longest = max(map(len, wild_types))
        width = min(longest, self.max_length)
        whole = [variant.mutant.whole for variant in variants if variant.mutant.whole is not None]
        unknown = self.facts.unknown.report([*wild_types, *whole])
        if unknown is not None:  # mutations are to amino acids, which every model here knows
            warn(unknown)
        if self._method == "pseudo":
            # Wild types are the first rows, so that a resumed job does not compute them again.
            sequences = wild_types + [variant.sequence() for variant in variants]
            sums_N1 = self._rows(
                "pseudo",
                sequences,
                longest * width,
                lambda texts: pseudo_log_likelihoods(
                    self._model, self._model.tokenize(texts), self.max_length, self._tokens
                )[:, 1:2],
            )
            return sums_N1[len(wild_types) :, 0] - sums_N1[numbers_N, 0]
        if whole:
            raise DataError(f"method {self._method}: can't score insertions and deletions; use pseudo")
        # Each position of a wild type once, because one pass gives all its 20 probabilities.
        positions: set[tuple[int, int]] = set()
        for number, variant in zip(numbers_N, variants, strict=True):
            positions.update((number, mutation.offset) for mutation in variant.mutant.mutations)
        wanted = sorted(positions)
        masked = self._method == "masked"
        # Unmasked, all positions of a protein within one window share a pass.
        one_pass = not masked and width == longest
        logs_M20 = self._rows(
            self._method,
            [list(position) for position in wanted],
            1 if one_pass else width,
            lambda items: self.log_probabilities(wild_types, np.array(items), masked),
            wild_types,
        )
        # Mutations with the row of their position in place of the offset.
        row_of = {position: row for row, position in enumerate(wanted)}
        mutations = []
        for number, variant in zip(numbers_N, variants, strict=True):
            mutations.append([m._replace(offset=row_of[number, m.offset]) for m in variant.mutant.mutations])
        return marginal_scores(mutations, logs_M20)

    def embeddings(self, variants: Sequence[Variant]) -> NDArray[np.float64]:
        """(N, D) mean embeddings of the mutants' sequences. Raises ConfigError for a sequence that is too long."""
        sequences = [variant.sequence() for variant in variants]
        longest = max(map(len, sequences))
        if self.facts.longest is not None and longest > self.facts.longest:
            raise ConfigError(
                f"features embeddings: a sequence has more than {self.facts.longest:,} residues; use one_hot"
            )
        return self._rows(
            "embeddings",
            sequences,
            longest,
            lambda texts: np.asarray(self._model.embed(texts, tokens=self._tokens), np.float64),
        )

    def log_probabilities(
        self, sequences: Sequence[str], wanted_M2: NDArray[np.int64], masked: bool
    ) -> NDArray[np.float64]:
        """(M, 20) log-probabilities of :data:`AMINO_ACIDS`.

        ``wanted_M2`` holds the number of a sequence and an offset in it, from 0. If ``masked``, each position is masked
        in a separate pass; otherwise nothing is masked.
        """
        windows = Windows(self._model, self._model.tokenize(sequences), wanted_M2, masked, self.max_length)
        return log_probabilities(self._model, windows, self._tokens)[:, self._columns]

    def _rows(
        self,
        name: str,
        items: Sequence[Item],
        tokens: int,
        compute: Callable[[Sequence[Item]], NDArray[np.float64]],
        wild_types: Sequence[str] = (),
    ) -> NDArray[np.float64]:
        """(items, C) rows, computed piece by piece; finished pieces are read back.

        ``tokens``: tokens per item. ``wild_types``: sequences that items refer to by number.
        """
        if not items:
            return np.empty((0, len(AMINO_ACIDS)))
        # Named by the model's fingerprint, because a folder of scores may hold several models, each with its own
        # journal.
        folder = self._folder / f"{name}-{self.facts.fingerprint}"
        job = {
            "model": self.facts.name,
            "precision": self.facts.precision,
            "max_length": self.max_length,
            "tokens": self._tokens,
            "mutants": xxhash.xxh3_128_hexdigest(json.dumps([*wild_types, *items]).encode()),
        }
        accept(folder, job)
        at_once = max(1, PIECE_TOKENS // tokens)
        starts = range(0, len(items), at_once)
        with journal(folder) as kept, record_bar(name) as bar:
            for start in starts[kept.done :]:
                rows = compute(items[start : start + at_once])
                # repr reads back to the same float, so that a resumed job gives the same bytes.
                kept.add(" ".join(map(repr, row)) for row in rows.tolist())
                bar(kept.done / len(starts), start + len(rows))
            return np.loadtxt(kept.lines(), np.float64, ndmin=2)
