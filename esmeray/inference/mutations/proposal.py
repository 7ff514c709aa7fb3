"""Propose mutants to measure next with a fitted model: candidates, and a plate chosen jointly.

Shape legend: N candidates, S candidates on the shortlist.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from esmeray.common.errors import ConfigError, DataError
from esmeray.common.text import counted
from esmeray.inference.mutations.features import Features
from esmeray.inference.mutations.fitted import Fitted
from esmeray.inference.mutations.gaussian_process import Posterior
from esmeray.inference.mutations.section import MutationProposeSection, Strategy
from esmeray.inference.mutations.table import PROTEIN_COLUMN
from esmeray.inference.mutations.variants import Mutant, Variant

_SHORTLIST = 1024
"""Maximum number of candidates whose covariance is computed."""
_COMBINATIONS = {"one_hot": 50_000, "embeddings": 5_000}
"""Maximum number of combinations among the candidates, by the fit's features."""
_SHOWN = 3
"""Number of example mutants per line of the report."""
_OPTIMISM = 2.0
"""Standard deviations above the mean in the upper confidence bound."""


def choose(process: Posterior, features: Features, number: int, strategy: Strategy, seed: int) -> NDArray[np.int64]:
    """Choose the rows of a batch, best first.

    After each choice the covariance is updated as if the mutant had been measured with its expected value (Desautels et
    al. 2014). Similar mutants then lose value, and the batch becomes diverse. Draws of ``thompson`` are diverse by
    themselves.
    """
    mean_N, deviation_N, *_ = process.predict(features)
    shortlist = np.argsort(-(mean_N + _OPTIMISM * deviation_N), kind="stable")[:_SHORTLIST]
    mean_S = mean_N[shortlist]
    covariance_SS = process.covariance(features[shortlist])
    best = process.best() if strategy == "ei" else 0.0
    if strategy == "thompson":
        random = np.random.default_rng(seed)
        draws = random.multivariate_normal(mean_S, covariance_SS, number, check_valid="ignore", method="eigh")
    chosen: list[int] = []
    for _ in range(min(number, len(shortlist))):
        deviation_S = np.sqrt(np.maximum(np.diag(covariance_SS), 1e-12))
        if strategy == "thompson":
            value_S = draws[len(chosen)]
        elif strategy == "ucb":
            value_S = mean_S + _OPTIMISM * deviation_S
        else:
            gain_S = (mean_S - best) / deviation_S
            # Jones et al. 1998, equation 15.
            value_S = deviation_S * (gain_S * norm.cdf(gain_S) + norm.pdf(gain_S))
        value_S[chosen] = -np.inf
        chosen.append(int(value_S.argmax()))
        column_S = covariance_SS[:, chosen[-1]]
        covariance_SS -= np.outer(column_S, column_S / (column_S[chosen[-1]] + process.noise))
    return shortlist[chosen]


class Proposer:
    """A fitted model of one protein and its candidates for measurement; ``folder`` is for the work.

    ``left_out`` lists the mutants that are not candidates, by reason. Raises ConfigError for a protein that is not part
    of the fit.
    """

    def __init__(self, fitted: Fitted, section: MutationProposeSection, folder: Path) -> None:
        self._fitted = fitted
        self._section = section
        self._folder = folder
        parts = [part for part in fitted.proteins if section.protein in (None, part.name)]
        if len(parts) != 1:
            raise ConfigError(
                f"propose.protein {section.protein}: give one of {', '.join(p.name for p in fitted.proteins)}"
            )
        self._part = parts[0]
        self._data = self._part.data(fitted.section.first_position)
        self._process = Posterior(self._data.features, self._data.values, self._part.weights, self._data.replicates)
        self._protein = self._data.protein
        self._known = dict(zip(self._part.mutants, self._part.scores, strict=True)) | self._part.listed
        self._excluded: set[int] = set()
        for text in section.exclude_positions:
            first, _, last = text.partition("-")
            self._excluded |= {*range(int(first), int(last or first) + 1)}
        self.left_out: defaultdict[str, list[str]] = defaultdict(list)

    def plate(self) -> dict[str, Any]:
        """Columns of the mutants to measure, in the fit's input format, with their predictions.

        Raises DataError if no candidate is left.
        """
        candidates = self._candidates()
        if not candidates:
            raise DataError(
                f"no candidates left ({'; '.join(self.lines()).strip() or 'there were none'}); exclude less, or "
                "add scores of more mutants to the table of the fit"
            )
        section = self._section
        fit = self._fitted.section
        features = self._features(candidates, "candidates")
        rows = choose(self._process, features, section.number, section.strategy, section.seed)
        mutants = [candidates[row] for row in rows]
        predicted = self._process.predict(features[rows])
        texts = [*map(self._protein.text_of, mutants)]
        if fit.sequence_column is not None:
            texts = [mutant.sequence(self._protein.sequence) for mutant in mutants]
        columns: dict[str, Any] = {PROTEIN_COLUMN: [self._protein.name] * len(rows)} if self._protein.name else {}
        columns |= {fit.sequence_column or str(fit.mutant_column): texts, fit.measured_column: [np.nan] * len(rows)}
        if fit.groups is not None:
            columns[fit.groups] = [None] * len(rows)
        if fit.zero_shot_column is not None:
            columns[fit.zero_shot_column] = [*map(self._score, mutants)]
        return columns | {"predicted": predicted.mean, "predicted_low": predicted.low, "predicted_high": predicted.high}

    def _candidates(self) -> list[Mutant]:
        kinds = self._section.candidates
        candidates: list[Mutant] = []
        if "singles" in kinds:
            candidates += self._protein.singles()
        if "listed" in kinds:
            candidates += map(self._protein.read, self._part.listed)
        if "combinations" in kinds:
            candidates += self._combinations()
        measured = {*self._data.mutants}
        allowed = []
        for mutant in dict.fromkeys(candidates):
            objection = "already measured" if mutant in measured else self._objection(mutant)
            noun = "single mutant" if len(mutant.mutations) == 1 else "mutant"
            if objection:
                self.left_out[f"{noun}{{s}} not proposed, {objection}"].append(self._protein.text_of(mutant))
            else:
                allowed.append(mutant)
        return allowed

    def lines(self) -> list[str]:
        """Lines with the number of mutants that are not candidates, with examples, by reason."""
        return [
            f"  {counted(len(texts), reason)}: {', '.join(texts[:_SHOWN])}{' ...' * (len(texts) > _SHOWN)}"
            for reason, texts in self.left_out.items()
        ]

    def _combinations(self) -> list[Mutant]:
        """Combine the best measured mutations. The limit on candidates sets how many mutations are used."""
        measured = {mutation for mutant in self._data.mutants for mutation in mutant.mutations}
        singles = [Mutant((mutation,)) for mutation in sorted(measured)]
        singles = [mutant for mutant in singles if not self._objection(mutant)]
        if not singles:
            return []
        largest = self._section.mutations
        limit = _COMBINATIONS[self._fitted.section.features]
        number = len(singles)
        while math.comb(number, largest) > limit:
            number -= 1
        mean_N = self._process.predict(self._features(singles, "mutations")).mean
        best = [singles[row].mutations[0] for row in np.argsort(-mean_N, kind="stable")[:number]]
        mutants = []
        for size in range(2, largest + 1):
            for group in combinations(best, size):
                # At most one mutation per position.
                if len({mutation.offset for mutation in group}) == size:
                    mutants.append(Mutant(tuple(sorted(group, key=lambda mutation: mutation.offset))))
        return mutants

    def _objection(self, mutant: Mutant) -> str:
        """Reason why a mutant is not a candidate; empty for a candidate."""
        residues = self._section.exclude_residues.upper()
        reasons = {
            "at excluded positions": any(m.offset + self._protein.first in self._excluded for m in mutant.mutations),
            "with excluded residues": any(m.mutant in residues for m in mutant.mutations),
            f"without a value in column {self._fitted.section.zero_shot_column!r}": math.isnan(self._score(mutant)),
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def _score(self, mutant: Mutant) -> float:
        """Score from the column. For a combination without one, the sum over its mutations, as for log-ratios."""
        unknown = 0.0 if self._fitted.section.zero_shot_column is None else np.nan
        text = self._protein.text_of(mutant)
        names = [text] if text in self._known else text.split(":")
        return sum(self._known.get(name, unknown) for name in names)

    def _features(self, mutants: Sequence[Mutant], work: str) -> Features:
        # Each kind of work has its own folder, so that a resumed job finds both again.
        name = self._fitted.section.zero_shot_column
        columns = {} if name is None else {name: np.array([*map(self._score, mutants)])}
        variants = [Variant(self._protein, mutant) for mutant in mutants]
        return self._data.encode(mutants, self._fitted.inputs(variants, self._section, self._folder / work, columns))
