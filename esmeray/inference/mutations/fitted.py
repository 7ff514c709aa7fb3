"""Score mutants with several models, also from Python.

A model may be fitted to measured mutants: a folder with mutations.json.

Shape legend: N mutants, D channels.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from esmeray.common.command_line import say
from esmeray.common.errors import ConfigError, DataError
from esmeray.common.publishing import verified
from esmeray.common.text import counted
from esmeray.dataset.sequence_list import checked_text, checked_texts, clean_list
from esmeray.inference.models.source import find_model
from esmeray.inference.mutations.features import Inputs, Measured
from esmeray.inference.mutations.gaussian_process import Posterior, Prediction, Weights, learn
from esmeray.inference.mutations.job import Scorer
from esmeray.inference.mutations.metrics import summary_lines
from esmeray.inference.mutations.section import MutationFitSection, MutationsSection
from esmeray.inference.mutations.table import MutantTable, by_row, distinct, read_variants
from esmeray.inference.mutations.validation import Evaluations, draw_learning_curves, evaluations
from esmeray.inference.mutations.variants import WILD_TYPE, Protein, Variant
from esmeray.model.export.exported_folder import exported_folder, read_settings_of, write_settings
from esmeray.train_config.removed import stored_in
from esmeray.train_config.section import Section

TASK = "mutations"
"""Task name in the manifest of a fitted model's folder."""
_FILE = "mutations.json"
_EMBEDDINGS = "embeddings.npy"
_MIN_ROWS = 20

Columns: TypeAlias = Mapping[str, NDArray[np.float64]]


def inputs_of(section: MutationFitSection, variants: Sequence[Variant], scorer: Any, columns: Columns) -> Inputs:
    """Compute the inputs of all proteins' mutants at once, by a :class:`Scorer`; None if the section needs no model."""
    column = section.zero_shot_column
    if column is not None and column not in columns:
        raise ConfigError(
            f"the model was fitted with scores from a column {column!r}: with esmeray mutations score, pass the "
            f"column by --score.compare {column}"
        )
    scores_N = scorer.zero_shot(variants) if column is None else columns[column]
    embeddings_ND = scorer.embeddings(variants) if section.features == "embeddings" else None
    return Inputs(scores_N, embeddings_ND)


class FittedProtein(BaseModel, extra="forbid", frozen=True):
    """Measurements of a protein, which the process is rebuilt from, and its kernel weights.

    Attributes:
        measured: means over measurements.
        replicates: numbers of measurements relative to their mean; 1 each if empty.
        scores, embeddings: inputs of the measured mutants.
        listed: mutants of the tables without a measured value, with their score from the column, or 0.
    """

    name: str
    sequence: str
    mutants: list[str]
    measured: list[float]
    replicates: list[float] = Field(default=[])
    scores: list[float]
    listed: dict[str, float]
    weights: Weights
    embeddings: Any = Field(default=None, exclude=True)

    def data(self, first_position: int) -> Measured:
        """Rebuild the measured mutants and their features; ``first_position`` is the numbering of the fit."""
        protein = Protein(self.sequence, first_position, self.name)
        mutants = [*map(protein.read, self.mutants)]
        inputs = Inputs(np.array(self.scores), self.embeddings)
        # Models of earlier versions have no replicates.
        replicates_N = np.array(self.replicates or [1] * len(mutants))
        return Measured(protein, mutants, inputs, np.array(self.measured), replicates_N)


class Fitted(BaseModel, extra="forbid", frozen=True):
    """A fitted model: source and fingerprint of the underlying model, the settings of the fit, and the proteins.

    ``model`` is None if the fit opened no model.
    """

    model: str | None
    fingerprint: str | None
    section: MutationFitSection
    proteins: list[FittedProtein]

    def inputs(self, variants: Sequence[Variant], compute: Section, folder: Path, columns: Columns) -> Inputs:
        """Inputs of new mutants. Raises DataError if the underlying model has changed."""
        section = self.section.model_copy(update=compute.model_dump(include={"device", "tokens"}))
        scorer = None
        if self.model is not None:
            scorer = Scorer(self.model, section, folder)
            if scorer.facts.fingerprint != self.fingerprint:
                raise DataError(f"model {self.model}: its weights have changed since the fit; fit again")
        return inputs_of(section, variants, scorer, columns)

    def find(self, protein: Protein) -> FittedProtein:
        """The part fitted to this protein. Raises DataError if there is none."""
        same = [part for part in self.proteins if part.sequence == protein.sequence]
        # Several values of one protein may have been measured, each under its own name.
        named = [part for part in same if part.name == protein.name] or same
        if len(named) != 1:
            names = ", ".join(part.name for part in self.proteins)
            raise DataError(
                f"the model was fitted to mutants of another protein; give a wild type of the fit, by its name: {names}"
            )
        return named[0]

    def predict(self, variants: Sequence[Variant], section: Section, folder: Path, columns: Columns) -> Prediction:
        """(N,) predicted values. Raises DataError for another protein, or if the underlying model has changed."""
        groups = _by_protein(variants)
        parts = {protein: self.find(protein) for protein in groups}
        inputs = self.inputs(variants, section, folder, columns)
        predicted = Prediction.unknown(len(variants))
        for protein, rows in groups.items():
            part = parts[protein]
            data = part.data(self.section.first_position)
            process = Posterior(data.features, data.values, part.weights, data.replicates)
            features = data.encode([variants[row].mutant for row in rows], inputs.of(rows))
            predicted.put(rows, process.predict(features))
        return predicted


def open_fitted(model: str | Path) -> Fitted:
    """Read a fitted model. Raises ConfigError for another kind of model."""
    fitted = read_fitted(str(model))
    if fitted is None:
        raise ConfigError(f"model {model}: is not a fitted model; fit one with 'esmeray mutations fit'")
    return fitted


def read_fitted(source: str) -> Fitted | None:
    """Read the fitted model of a source; None if it is another model. Raises as :func:`find_model`."""
    located = find_model(source)
    if located.task != TASK:
        return None
    context = stored_in(located.folder)
    fitted = read_settings_of(
        located.folder / _FILE, "fitted model", lambda content: Fitted.model_validate(content, context=context)
    )
    if fitted.section.features != "embeddings":
        return fitted
    ends = np.cumsum([len(part.mutants) for part in fitted.proteins])
    embeddings = np.split(np.load(verified(located.folder / _EMBEDDINGS)), ends[:-1])
    proteins = [
        part.model_copy(update={"embeddings": rows}) for part, rows in zip(fitted.proteins, embeddings, strict=True)
    ]
    return fitted.model_copy(update={"proteins": proteins})


def _by_protein(variants: Sequence[Variant]) -> dict[Protein, list[int]]:
    groups: dict[Protein, list[int]] = {}
    for row, variant in enumerate(variants):
        groups.setdefault(variant.protein, []).append(row)
    return groups


def predict(
    source: str, variants: Sequence[Variant], section: MutationsSection, folder: Path, columns: Columns
) -> Prediction:
    """Score with a model: its zero-shot scores as means, or predictions if the model is fitted.

    Raises the errors of :class:`Scorer` and :meth:`Fitted.predict`.
    """
    fitted = read_fitted(source)
    if fitted is not None:
        return fitted.predict(variants, section, folder, columns)
    scores_N = Scorer(source, section, folder).zero_shot(variants)
    return Prediction.unknown(len(variants))._replace(mean=scores_N)


def score_mutants(
    model: str | Path,
    sequence: str,
    mutants: Sequence[str],
    *,
    method: Literal["wild_type", "masked", "pseudo"] = "masked",
    first_position: int = 1,
    device: str | None = None,
) -> NDArray[np.float64]:
    """Score mutants of a protein, (N,).

    Scores are zero-shot log-probability ratios to the wild type (Meier et al. 2021), or a fitted model's predictions.

    Args:
        model: a masked language model, as in :func:`esmeray.open_model`, or a model from ``esmeray mutations fit``.
        sequence: the wild type.
        mutants: mutants such as A24G, A24G:C25D or p.Ala24Gly, in any notation of
            :mod:`esmeray.inference.mutations.variants`.
        method: wild_type needs one pass, masked one per mutated position, pseudo one per position of each mutant
            (Salazar et al. 2020).
        first_position: number of the first residue.
        device: cpu, cuda, cuda:1 ...; by default CUDA if available.

    The wild type is cleaned as in commands, with a warning that counts the changes. A mutant without a score, such as a
    stop, gets NaN. Raises DataError for an invalid wild type, for a mutant that doesn't match it and if no mutant has a
    score; ConfigError for another kind of model, and if ``mutants`` is not a list.

    >>> esmeray.score_mutants("esm2", "MKTAYIAKQR", ["K2R", "T3S:A4G"], method="wild_type").shape
    (2,)
    """
    mutants = checked_texts(mutants, "mutants")
    # The same job as the command's, in a temporary folder, because a call from Python is not resumed.
    section = MutationsSection.of(method=method, device=device, first_position=first_position)
    protein = Protein(clean_list([checked_text(sequence, "sequence")], "sequence")[0], section.first_position)
    counts: Counter[str] = Counter()
    variants = read_variants(mutants, [protein] * len(mutants), "mutants", counts)
    own_variants, number_of_row = distinct(variants, "mutants", counts)
    with TemporaryDirectory() as folder:
        predicted = predict(str(model), own_variants, section, Path(folder), {})
    return by_row(predicted.mean, number_of_row)


def fit_table(
    source: Path | None, table: MutantTable, section: MutationFitSection, folder: Path
) -> tuple[Fitted, Evaluations]:
    """Fit to the mutants of a table that have a value in each column, and cross-validate.

    Mutants left out are counted in the table. ``source`` is None if the section needs no model. Raises ConfigError if
    it needs one; DataError for too few mutants or a missing group; and the errors of :class:`Scorer` and
    :mod:`esmeray.inference.mutations.validation`.
    """
    if source is None and section.needs_model:
        raise ConfigError("missing: MODEL; give a model, or set features one_hot and zero_shot_column")
    rows = _complete_rows(table, section)
    groups = _group_names(table, rows, section)
    replicates_N = table.replicates[section.measured_column][rows]
    if replicates_N.max() > 1:
        table.counts["measurement{s}, averaged per mutant"] = int(replicates_N.sum())
    zero_shot = section.zero_shot_column or f"{source} ({section.method})"
    say(f"features of {counted(len(rows), 'mutant{s}')}: {section.features}; zero-shot scores by {zero_shot}")
    scorer = Scorer(str(source), section, folder) if section.needs_model else None
    variants = [table.variants[row] for row in rows]
    columns = {column: values[rows] for column, values in table.numbers.items()}
    inputs = inputs_of(section, variants, scorer, columns)
    measured = []
    for protein, own in _by_protein(variants).items():
        mutants = [variants[number].mutant for number in own]
        values_N = columns[section.measured_column][own]
        # Relative numbers: a table with three measurements per mutant is equivalent to one with their means.
        relative_N = replicates_N[own] / replicates_N[own].mean()
        groups_N = None if groups is None else np.unique(groups[own], return_inverse=True)[1]
        measured.append(Measured(protein, mutants, inputs.of(own), values_N, relative_N, groups_N))
    evaluated = evaluations(measured, section)
    proteins = [
        FittedProtein(
            name=part.protein.name,
            sequence=part.protein.sequence,
            mutants=[*map(part.protein.text_of, part.mutants)],
            measured=part.values.tolist(),
            replicates=part.replicates.tolist(),
            scores=part.inputs.scores.tolist(),
            listed=_listed(part, table, section),
            # Fitted to all mutants; cross-validation estimates the quality with fewer.
            weights=learn(part.features, part.values, part.replicates),
            embeddings=part.inputs.embeddings,
        )
        for part in measured
    ]
    model = fingerprint = None
    if source is not None and scorer is not None:
        # Absolute, because the fitted model may be used from another working folder.
        model = str(source.absolute() if source.exists() else source)
        fingerprint = scorer.facts.fingerprint
    fitted = Fitted(
        model=model,
        fingerprint=fingerprint,
        # Includes the column that was read, because proposals are written to the same column.
        section=section.model_copy(update={} if section.sequence_column else {"mutant_column": table.column}),
        proteins=proteins,
    )
    return fitted, evaluated


def _complete_rows(table: MutantTable, section: MutationFitSection) -> NDArray[np.int64]:
    """Return the mutants with a value in each column, and count the others. Raises DataError if a protein has few."""
    # Without the wild type, which has no mutations to learn from and belongs to no fold by position.
    mutated = pd.DataFrame(table.numbers)[[variant.mutant != WILD_TYPE for variant in table.variants]]
    for column, count in mutated.isna().sum().items():
        table.counts[f"mutant{{s}} without a value in column {column!r} left out"] = int(count)
    rows = mutated.dropna().index.to_numpy()
    sizes = Counter(table.variants[row].protein.name for row in rows) or {"": 0}
    name, fewest = min(sizes.items(), key=lambda item: item[1])
    if fewest < _MIN_ROWS:
        where = f"{section.source}, {name}" if name else section.source
        raise DataError(f"{where}: only {fewest} mutants have values in all columns; give at least {_MIN_ROWS}")
    return rows


def _group_names(table: MutantTable, rows: NDArray[np.int64], section: MutationFitSection) -> NDArray | None:
    """Return the groups of mutants, None without a column of groups. Raises DataError unless each has exactly one."""
    if not table.groups:
        return None
    for row in rows:
        names = table.groups[row]
        if len(names) > 1 or not names[0]:
            protein, mutant = table.variants[row]
            raise DataError(
                f"{section.source}: {protein.text_of(mutant)} has the groups {', '.join(map(repr, names))}; give all "
                "its rows the same group"
            )
    return np.array([table.groups[row][0] for row in rows])


def _listed(part: Measured, mutants: MutantTable, section: MutationFitSection) -> dict[str, float]:
    """Mutants without a measured value, with the scores of the column, or 0 without a column."""
    measured_N = mutants.numbers[section.measured_column]
    scores_N = (
        np.zeros_like(measured_N) if section.zero_shot_column is None else mutants.numbers[section.zero_shot_column]
    )
    return {
        part.protein.text_of(variant.mutant): float(score)
        for variant, value, score in zip(mutants.variants, measured_N, scores_N, strict=True)
        if variant.protein == part.protein and variant.mutant != WILD_TYPE and np.isnan(value) and np.isfinite(score)
    }


def export(fitted: Fitted, evaluated: Evaluations, output: Path, overwrite: bool) -> None:
    """Write the folder of a fitted model, with report.md, evaluation.json and the learning curves."""
    with exported_folder(output, TASK, overwrite, None) as (building, _):
        write_settings(building / _FILE, fitted.model_dump(mode="json"))
        if fitted.section.features == "embeddings":
            np.save(building / _EMBEDDINGS, np.concatenate([part.embeddings for part in fitted.proteins]))
        # A single protein needs no name, so that its name is left out.
        content: dict[str, Any] = {**evaluated}
        if len(fitted.proteins) == 1:
            content = {key: own for key, of_proteins in evaluated.items() for own in of_proteins.values()}
        (building / "evaluation.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (building / "report.md").write_text("\n".join(["# Evaluation", "", *report_lines(evaluated)]), encoding="utf-8")
        draw_learning_curves(building / "learning_curve.png", evaluated)


def report_lines(evaluated: Evaluations) -> list[str]:
    return [line for name, of_proteins in evaluated.items() for line in (f"## {name}", "", *summary_lines(of_proteins))]
