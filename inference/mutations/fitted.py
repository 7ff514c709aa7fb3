"""Scores by several models, also from Python, of which a model may be one that was fitted to measured mutants: a folder
with mutations.json. Shape legend: N mutants, D features.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from esmeray.common.command_line import say
from esmeray.common.errors import ConfigError, DataError
from esmeray.common.text import counted
from esmeray.inference.classify.report import metrics_lines
from esmeray.inference.models.source import find_model
from esmeray.inference.mutations.job import Scorer
from esmeray.inference.mutations.metrics import evaluation_of
from esmeray.inference.mutations.ridge import Features, Ridge, cross_validated, fit, folds, one_hot, with_composition
from esmeray.inference.mutations.section import MutationFitSection, MutationsSection
from esmeray.inference.mutations.table import MutantTable
from esmeray.inference.mutations.variants import WILD_TYPE, Mutant, Protein
from esmeray.model.export.exported_folder import exported_folder
from esmeray.model.saved_settings import read_settings_of, write_settings

TASK = "mutations"
"""In the manifest of a fitted model's folder."""
_FILE = "mutations.json"
_FEWEST = 20

Columns: TypeAlias = Mapping[str, NDArray[np.float64]]
Evaluations: TypeAlias = dict[str, dict[str, Any]]
"""By kind of fold and number of training mutants, as metrics_lines reads them."""


class Fitted(BaseModel):
    """A fitted model: the model below it, by its source and fingerprint, the settings of the fit, and the ridge."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    wild_type: str
    model: str
    fingerprint: str | None
    section: MutationFitSection
    ridge: Ridge

    def predict(
        self, protein: Protein, mutants: Sequence[Mutant], section: MutationsSection, folder: Path, columns: Columns
    ) -> NDArray[np.float64]:
        """(N,) measured values. Raises DataError for another protein, or where the model below it has changed."""
        if protein.sequence != self.wild_type:
            raise DataError("the model is fitted to mutants of another protein; give its wild type")
        fit_section = self.section.model_copy(update=section.model_dump(include={"device", "tokens", "stream"}))

        # Opened only where it is needed: one-hot features with a column of scores take no model at all.
        @cache
        def open_scorer() -> Scorer:
            scorer = Scorer(self.model, protein, fit_section, folder)
            if scorer.facts.fingerprint != self.fingerprint:
                raise DataError(f"model {self.model}: has changed since the fit; fit again")
            return scorer

        return self.ridge.predict(*_inputs(fit_section, protein, mutants, open_scorer, columns))


def scores_of(
    sources: Sequence[str],
    protein: Protein,
    mutants: Sequence[Mutant | None],
    section: MutationsSection,
    folder: Path,
    columns: Columns,
) -> NDArray[np.float64]:
    """(models, N) scores by each model, or what it predicts where it is fitted; NaN where there is no mutant.

    Raises DataError where there is none at all, and as :class:`Scorer` and :meth:`Fitted.predict`.
    """
    # Each mutant once: codons that differ alone, and tables of replicates, repeat them.
    first_rows = {mutant: row for row, mutant in reversed([*enumerate(mutants)]) if mutant is not None}
    if not first_rows:
        raise DataError("no mutants are left to score; mend the table")
    distinct = [*first_rows]
    columns = {name: values[[*first_rows.values()]] for name, values in columns.items()}
    scores = []
    for source in sources:
        located = find_model(source)
        if located.task == TASK:
            fitted = read_settings_of(located.folder / _FILE, "fitted model", Fitted.model_validate)
            values = fitted.predict(protein, distinct, section, folder, columns)
        else:
            values = Scorer(source, protein, section, folder).zero_shot(distinct)
        of_mutant = dict(zip(distinct, values.tolist(), strict=True))
        scores.append([np.nan if mutant is None else of_mutant[mutant] for mutant in mutants])
    return np.array(scores)


def score_mutants(
    model: str | Path,
    sequence: str,
    mutants: Sequence[str],
    *,
    method: Literal["wild_type", "masked", "pseudo"] = "masked",
    first_position: int = 1,
    device: str | None = None,
) -> NDArray[np.float64]:
    """(N,) zero-shot scores of mutants, log-probability ratios to the wild type (Meier et al. 2021), or what a model of
    ``esmeray mutations fit`` predicts.

    Args:
        model: a masked language model, as :func:`esmeray.open_model` takes it, or a fitted one.
        sequence: the wild type.
        mutants: as A24G or A24G:C25D.
        method: wild_type is one pass, masked one for each mutated position, pseudo one for each position of each
            mutant (Salazar et al. 2020).
        first_position: number of the first residue.
        device: cpu, cuda, cuda:1 ...; by default CUDA where there is one.

    Raises ValueError for a mutant that the wild type can't have, ConfigError for another kind of model.

    >>> esmeray.score_mutants("esm2", "MKTAYIAKQR", ["K2R", "T3S:A4G"], method="wild_type").shape
    (2,)
    """
    protein = Protein(sequence, first_position)
    # A job as the command's, in a folder that goes: nothing of a call from Python is resumed.
    section = MutationsSection(sequence=Path(), method=method, device=device)
    with TemporaryDirectory() as folder:
        (scores_N,) = scores_of([str(model)], protein, [*map(protein.mutant, mutants)], section, Path(folder), {})
    return scores_N


def fit_table(
    source: str, protein: Protein, table: MutantTable, section: MutationFitSection, folder: Path
) -> tuple[Fitted, Evaluations]:
    """Fit to the mutants of a table that have a value in each column, and cross-validate.

    Raises DataError where these are too few, and as :class:`Scorer` and :mod:`esmeray.inference.mutations.ridge`.
    """
    # Not the wild type: it has no mutation to learn from, and belongs to no fold of positions.
    known_N = np.logical_and.reduce([np.isfinite(values) for values in table.numbers.values()])
    used = {row: mutant for row, mutant in enumerate(table.mutants) if known_N[row] and mutant not in (None, WILD_TYPE)}
    rows, mutants = [*used], [mutant for mutant in used.values() if mutant is not None]
    if len(rows) < _FEWEST:
        raise DataError(f"{section.table}: {len(rows)} mutants have all their values; give at least {_FEWEST}")
    columns = {name: values[rows] for name, values in table.numbers.items()}
    zero_shot = f"{source} ({section.method})" if section.zero_shot_column is None else section.zero_shot_column
    say(f"features of {counted(len(rows), 'mutant{s}')}: {section.features}; zero-shot scores by {zero_shot}")
    open_scorer = cache(lambda: Scorer(source, protein, section, folder))
    features_ND, zero_shot_N = _inputs(section, protein, mutants, open_scorer, columns)
    measured_N = columns[section.measured_column]
    evaluations = _cross_validations(protein, mutants, features_ND, zero_shot_N, measured_N, section)
    fitted = Fitted(
        wild_type=protein.sequence,
        # Absolute, since the fitted model may be used from another folder.
        model=str(Path(source).absolute()) if Path(source).exists() else source,
        fingerprint=open_scorer().facts.fingerprint if open_scorer.cache_info().currsize else None,
        section=section,
        # Of all mutants: cross-validation has said how good one of fewer is.
        ridge=fit(features_ND, zero_shot_N, measured_N),
    )
    return fitted, evaluations


def export(fitted: Fitted, evaluations: Evaluations, output: Path, overwrite: bool) -> None:
    """Write the folder of a fitted model, with report.md and evaluation.json."""
    with exported_folder(output, TASK, overwrite, None) as (building, _):
        write_settings(building / _FILE, fitted.model_dump(mode="json"))
        (building / "evaluation.json").write_text(json.dumps(evaluations, indent=1) + "\n", encoding="utf-8")
        (building / "report.md").write_text(
            "\n".join(["# Evaluation", "", *report_lines(evaluations)]), encoding="utf-8"
        )


def report_lines(evaluations: Evaluations) -> list[str]:
    return [line for name, evaluation in evaluations.items() for line in (f"## {name}", "", *metrics_lines(evaluation))]


def _inputs(
    section: MutationFitSection,
    protein: Protein,
    mutants: Sequence[Mutant],
    open_scorer: Callable[[], Scorer],
    columns: Columns,
) -> tuple[Features, NDArray[np.float64]]:
    """(N, D) features and (N,) zero-shot scores; a model is opened where they need it."""
    column = section.zero_shot_column
    if column is not None and column not in columns:
        raise ConfigError(
            f"the model is fitted with the scores of a column {column!r}: esmeray mutations score takes them from its "
            f"table by --score.compare {column}"
        )
    is_one_hot = section.features == "one_hot"
    features = with_composition(one_hot(protein, mutants)) if is_one_hot else open_scorer().embeddings(mutants)
    return features, open_scorer().zero_shot(mutants) if column is None else columns[column]


def _cross_validations(
    protein: Protein,
    mutants: Sequence[Mutant],
    features_ND: Features,
    zero_shot_N: NDArray[np.float64],
    measured_N: NDArray[np.float64],
    section: MutationFitSection,
) -> Evaluations:
    """The model on each kind of fold and size, beside the zero-shot score alone and, of substitutions, one-hot."""
    substitutions = all(mutant.whole is None for mutant in mutants)
    resampled = {"samples": section.bootstrap, "seed": section.seed}
    # The zero-shot score is the same in all folds: resampled once, as that takes longer than the fits.
    zero_shot = evaluation_of({"": zero_shot_N}, measured_N, **resampled)
    zero_shot = {key: zero_shot[key] for key in ("metrics", "intervals")}
    evaluations = {}
    for kind in section.folds:
        say(f"cross-validating: folds {kind}")
        fold_N = folds(kind, mutants, section.seed)
        for size in (None, *section.sizes):
            validate = partial(cross_validated, measured_N=measured_N, fold_N=fold_N, size=size, seed=section.seed)
            scores = {"model": validate(features_ND, zero_shot_N)}
            if substitutions:  # insertions have no one-hot features
                scores["ridge on one-hot"] = validate(one_hot(protein, mutants), 0 * zero_shot_N)
            evaluation = evaluation_of(scores, measured_N, **resampled)
            evaluation["baselines"] = {"zero-shot score": zero_shot, **evaluation["baselines"]}
            evaluations[f"Folds {kind}, {'all' if size is None else size} training mutants"] = evaluation
    return evaluations
