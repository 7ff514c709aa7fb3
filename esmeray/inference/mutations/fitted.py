"""Scores by several models, also from Python, of which a model may be one that was fitted to measured mutants: a folder
with mutations.json. Shape legend: N mutants, D channels.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from esmeray.common.command_line import say
from esmeray.common.errors import ConfigError, DataError
from esmeray.common.progress import record_bar
from esmeray.common.text import counted
from esmeray.common.verification import verified
from esmeray.dataset.sequence_list import checked_text, checked_texts, clean_list
from esmeray.inference.models.source import find_model
from esmeray.inference.mutations.features import Features, Inputs
from esmeray.inference.mutations.gaussian_process import Posterior, Prediction, Weights, learn
from esmeray.inference.mutations.job import Scorer
from esmeray.inference.mutations.metrics import summary_lines
from esmeray.inference.mutations.section import MutationFitSection, MutationLearningSection, MutationsSection
from esmeray.inference.mutations.table import MutantTable, by_row, distinct, read_variants
from esmeray.inference.mutations.validation import Evaluations, Measured, draw_learning_curves, evaluations
from esmeray.inference.mutations.variants import WILD_TYPE, Mutant, Protein, Variant
from esmeray.model.export.exported_folder import exported_folder, read_settings_of, write_settings
from esmeray.train_config.section import ComputeSection

TASK = "mutations"
"""In the manifest of a fitted model's folder."""
_FILE = "mutations.json"
_EMBEDDINGS = "embeddings.npy"
_FEWEST = 20

Floats: TypeAlias = NDArray[np.float64]
Columns: TypeAlias = Mapping[str, Floats]


def inputs_of(
    section: MutationLearningSection, variants: Sequence[Variant], open_scorer: Callable[[], Scorer], columns: Columns
) -> Inputs:
    """Of mutants of all proteins at once; a model is opened where they need it, and never for a column alone."""
    column = section.zero_shot_column
    if column is not None and column not in columns:
        raise ConfigError(
            f"the model is fitted with the scores of a column {column!r}: esmeray mutations score takes them from its "
            f"table by --score.compare {column}"
        )
    embeddings_ND = open_scorer().embeddings(variants) if section.features == "embeddings" else None
    return Inputs(open_scorer().zero_shot(variants) if column is None else columns[column], embeddings_ND)


class FittedProtein(BaseModel, extra="forbid", frozen=True):
    """Measurements of a protein, from which the process is made anew, and the weights of its kernels.

    ``measured`` are means over measurements, whose numbers, relative to their mean, are ``replicates``; 1 each if it is
    empty. ``scores`` and ``embeddings`` are the inputs of its mutants. ``listed``: mutants of the tables without a
    measured value, with their score of the column or 0.
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

    def posterior(self, protein: Protein) -> tuple[Posterior, Callable[[Sequence[Mutant], Inputs], Features]]:
        """The process, and the function from mutants and their inputs to what it takes."""
        mutants = [*map(protein.read, self.mutants)]
        own = Inputs(np.array(self.scores), self.embeddings)
        sites = _are_substitutions(mutants)
        features = own.features(protein, mutants, own, sites)
        with record_bar("measured mutants") as bar:
            process = Posterior(
                features,
                np.array(self.measured),
                self.weights,
                lambda done: bar(done / len(mutants), done),
                # A model of a version without replicates has one of each.
                np.array(self.replicates or [1] * len(mutants)),
            )
        return process, lambda others, inputs: inputs.features(protein, others, own, sites)


class Fitted(BaseModel, extra="forbid", frozen=True):
    """A fitted model: the model below it, by its source and fingerprint, the settings of the fit, and the proteins.

    ``model`` is None if the fit opened none.
    """

    model: str | None
    fingerprint: str | None
    section: MutationFitSection
    proteins: list[FittedProtein]

    def inputs(self, variants: Sequence[Variant], compute: ComputeSection, folder: Path, columns: Columns) -> Inputs:
        """Of mutants that are new. Raises DataError where the model below has changed."""
        fit_section = self.section.model_copy(update=compute.model_dump(include={"device", "tokens", "stream"}))

        # Opened only where it is needed: one-hot features with a column of scores take no model at all.
        @cache
        def open_scorer() -> Scorer:
            scorer = Scorer(str(self.model), fit_section, folder)
            if scorer.facts.fingerprint != self.fingerprint:
                raise DataError(f"model {self.model}: has changed since the fit; fit again")
            return scorer

        return inputs_of(fit_section, variants, open_scorer, columns)

    def find(self, protein: Protein) -> FittedProtein:
        """The part that was fitted to this protein. Raises DataError where none was."""
        same = [part for part in self.proteins if part.sequence == protein.sequence]
        # Of one protein several values may have been measured, each under its own name.
        named = [part for part in same if part.name == protein.name] or same
        if not named:
            raise DataError("the model is fitted to mutants of another protein; give its wild type")
        if len(named) > 1:
            names = " and ".join(part.name for part in named)
            raise DataError(f"the model is fitted to {names}; name one in the FASTA file")
        return named[0]

    def predict(
        self, variants: Sequence[Variant], section: ComputeSection, folder: Path, columns: Columns
    ) -> Prediction:
        """(N,) measured values. Raises DataError for another protein, or where the model below it has changed."""
        groups = _by_protein(variants)
        parts = {protein: self.find(protein) for protein in groups}
        inputs = self.inputs(variants, section, folder, columns)
        predicted = Prediction.unknown(len(variants))
        for protein, rows in groups.items():
            process, features = parts[protein].posterior(protein)
            predicted.put(rows, process.predict(features([variants[row].mutant for row in rows], inputs.of(rows))))
        return predicted


def read_fitted(source: str) -> Fitted | None:
    """The fitted model that a source names; None where it is another model. Raises as :func:`find_model`."""
    located = find_model(source)
    if located.task != TASK:
        return None
    fitted = read_settings_of(located.folder / _FILE, "fitted model", Fitted.model_validate)
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


def _are_substitutions(mutants: Sequence[Mutant]) -> bool:
    return all(mutant.whole is None for mutant in mutants)


def predictions_of(
    sources: Sequence[str], variants: Sequence[Variant], section: MutationsSection, folder: Path, columns: Columns
) -> list[Prediction]:
    """Scores of each model as means, or predictions if the model is fitted.

    Raises as :class:`Scorer` and :meth:`Fitted.predict`.
    """
    predicted = []
    for source in sources:
        fitted = read_fitted(source)
        predicted.append(
            Prediction.unknown(len(variants))._replace(mean=Scorer(source, section, folder).zero_shot(variants))
            if fitted is None
            else fitted.predict(variants, section, folder, columns)
        )
    return predicted


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
        mutants: as A24G, A24G:C25D or p.Ala24Gly, in any notation of :mod:`esmeray.inference.mutations.variants`.
        method: wild_type is one pass, masked one for each mutated position, pseudo one for each position of each
            mutant (Salazar et al. 2020).
        first_position: number of the first residue.
        device: cpu, cuda, cuda:1 ...; by default CUDA where there is one.

    The wild type is cleaned as commands clean it, with a warning that counts the changes. NaN for a mutant without a
    score, such as a stop. Raises DataError for a wild type that a command would refuse, for a mutant that it can't have
    and if no mutant has a score; ConfigError for another kind of model, and if ``mutants`` is no list.

    >>> esmeray.score_mutants("esm2", "MKTAYIAKQR", ["K2R", "T3S:A4G"], method="wild_type").shape
    (2,)
    """
    mutants = checked_texts(mutants, "mutants")
    # A job as the command's, in a folder that goes: nothing of a call from Python is resumed.
    section = MutationsSection.of(method=method, device=device, first_position=first_position)
    protein = Protein(clean_list([checked_text(sequence, "sequence")], "sequence")[0], section.first_position)
    counts: Counter[str] = Counter()
    variants = read_variants(mutants, [protein] * len(mutants), "mutants", counts)
    own_variants, number_of_row = distinct(variants, "mutants", counts)
    with TemporaryDirectory() as folder:
        (predicted,) = predictions_of([str(model)], own_variants, section, Path(folder), {})
    return by_row(predicted.mean, number_of_row)


def fit_table(
    source: Path | None, table: MutantTable, section: MutationFitSection, folder: Path
) -> tuple[Fitted, Evaluations]:
    """Fit to the mutants of a table that have a value in each column, and cross-validate.

    ``source`` is None if the section needs no model. Raises DataError for too few mutants, and as :class:`Scorer` and
    :mod:`esmeray.inference.mutations.validation`.
    """
    open_scorer = cache(lambda: Scorer(str(source), section, folder))
    parts = measured_parts(table, section, open_scorer, source)
    evaluated = evaluations(parts, section)
    proteins = [
        FittedProtein(
            name=part.protein.name,
            sequence=part.protein.sequence,
            mutants=[*map(part.protein.text_of, part.mutants)],
            measured=part.values.tolist(),
            replicates=part.replicates.tolist(),
            scores=part.inputs.scores.tolist(),
            listed=_listed(part, table, section),
            # Of all mutants: cross-validation has said how good one of fewer is.
            weights=learn(part.features, part.values, part.replicates),
            embeddings=part.inputs.embeddings,
        )
        for part in parts
    ]
    opened = open_scorer.cache_info().currsize > 0
    # Absolute, since the fitted model may be used from another folder.
    model = str(source.absolute() if source is not None and source.exists() else source)
    fitted = Fitted(
        model=model if opened else None,
        fingerprint=open_scorer().facts.fingerprint if opened else None,
        # With the column that was read, which proposals are written in.
        section=section.model_copy(update={} if section.sequence_column else {"mutant_column": table.column}),
        proteins=proteins,
    )
    return fitted, evaluated


def measured_parts(
    table: MutantTable, section: MutationLearningSection, open_scorer: Callable[[], Scorer], source: Path | None
) -> list[Measured]:
    """The mutants of each protein that have a value in each column.

    What is left out is counted in the table. Raises DataError for too few, or without a group; ConfigError if there is
    no model, and the features need one.
    """
    if source is None and (section.features == "embeddings" or section.zero_shot_column is None):
        raise ConfigError("missing: MODEL; name one, or give the settings features one_hot and zero_shot_column")
    variants = table.variants
    # Not the wild type: it has no mutation to learn from, and belongs to no fold of positions.
    mutated_N = np.array([variant.mutant != WILD_TYPE for variant in variants])
    rows = np.flatnonzero(np.logical_and.reduce([mutated_N, *map(np.isfinite, table.numbers.values())]))
    proteins = _by_protein([variants[row] for row in rows])
    sizes = {protein.name: len(own) for protein, own in proteins.items()} or {"": 0}
    name, fewest = min(sizes.items(), key=lambda item: item[1])
    if fewest < _FEWEST:
        where = f"{section.table}, {name}" if name else section.table
        raise DataError(f"{where}: {fewest} mutants have all their values; give at least {_FEWEST}")
    zero_shot = section.zero_shot_column or f"{source} ({section.method})"
    say(f"features of {counted(len(rows), 'mutant{s}')}: {section.features}; zero-shot scores by {zero_shot}")
    replicates_N = table.replicates[section.measured_column][rows]
    if replicates_N.max() > 1:
        table.counts["measurement{s}, averaged for each mutant"] = int(replicates_N.sum())
    for column, values in table.numbers.items():
        missing = int(np.isnan(values[mutated_N]).sum())
        table.counts[f"mutant{{s}} left out, without a value in column {column!r}"] = missing
    columns = {column: values[rows] for column, values in table.numbers.items()}
    inputs = inputs_of(section, [variants[row] for row in rows], open_scorer, columns)
    parts = []
    for protein, own in proteins.items():
        own_mutants = [variants[row].mutant for row in rows[own]]
        own_inputs = inputs.of(own)
        sites = section.features == "one_hot" or _are_substitutions(own_mutants)
        features = own_inputs.features(protein, own_mutants, own_inputs, sites)
        groups_N = None
        if table.groups:
            groups = [table.groups[row] for row in rows[own]]
            for mutant, names in zip(own_mutants, groups, strict=True):
                if len(names) > 1 or not names[0]:
                    raise DataError(
                        f"{section.table}: {protein.text_of(mutant)} is of the groups {', '.join(map(repr, names))}; "
                        "give all its rows one group"
                    )
            groups_N = np.unique(np.concatenate(groups).astype(str), return_inverse=True)[1]
        # Relative: a table in which every mutant was measured three times is as one of these means.
        relative_N = replicates_N[own] / replicates_N[own].mean()
        measured_N = columns[section.measured_column][own]
        parts.append(Measured(protein, own_mutants, own_inputs, features, measured_N, relative_N, groups_N))
    return parts


def _listed(part: Measured, mutants: MutantTable, section: MutationFitSection) -> dict[str, float]:
    """Mutants without a measured value, and their scores if a column has them."""
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
        # Of one protein without its name, which it need not have.
        content: dict[str, Any] = {**evaluated}
        if len(fitted.proteins) == 1:
            content = {key: own for key, of_proteins in evaluated.items() for own in of_proteins.values()}
        (building / "evaluation.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (building / "report.md").write_text("\n".join(["# Evaluation", "", *report_lines(evaluated)]), encoding="utf-8")
        draw_learning_curves(building / "learning_curve.png", evaluated)


def report_lines(evaluated: Evaluations) -> list[str]:
    return [line for name, of_proteins in evaluated.items() for line in (f"## {name}", "", *summary_lines(of_proteins))]
