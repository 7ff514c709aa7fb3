"""Evaluate predicted terms of proteins as CAFA does, with intervals.

Prints Fmax, Smin, area under the precision-recall curve and coverage for each aspect of the ontology, with 95 %
intervals. Metrics that end in _w weight terms by information accretion. Values agree with cafaeval 1.3; with known
annotations or terms of interest they agree with CAFA 5 and 6. --evaluate.output writes a folder with evaluation.json,
curves.tsv and curves.png.

With --evaluate.input, evaluates a run: the coverage and mean size of its conformal sets of coverage 0.9, also by the
bits per residue of the best hit, and the expected calibration error of the ranker's scores and of the calibrated
probabilities, also by the frequency of the terms. --evaluate.output writes both tables and reliability curves.
--evaluate.calibrate true calibrates the run with these proteins first, in place of its held-out ones. The coverage of
the calibrating proteins themselves is then 0.9 by construction.

Examples:
  esmeray function evaluate predictions.tsv --evaluate.truth truth.tsv --evaluate.ontology go-basic.obo
  esmeray function evaluate predictions.tsv --evaluate.truth truth.tsv --evaluate.ontology go-basic.obo \
--evaluate.output evaluation
  esmeray function evaluate runs/function --evaluate.input known.fasta --evaluate.truth known.tsv \
--evaluate.calibrate true
  esmeray function evaluate runs/function --evaluate.input test.fasta --evaluate.truth test.tsv
"""

import json
import logging
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from rich.table import Table

from esmeray.common.command_line import result_console
from esmeray.common.errors import ConfigError, DataError
from esmeray.common.text import counted
from esmeray.dataset.identifiers import match_ids
from esmeray.function.annotations import (
    EXPERIMENTAL,
    information_accretion,
    read_accretion,
    read_annotations,
    read_scores,
    read_terms,
)
from esmeray.function.evaluation import Evaluation, evaluate_functions
from esmeray.function.ontology import read_ontology
from esmeray.function.section import EvaluateTermsSection, EvaluationSection
from esmeray.tools.grammar import OutputWriter, command

log = logging.getLogger(__name__)

_SETS_SHOWN = {"proteins": ("coverage", "size"), "coverage": ("coverage", "mean"), "set_size": ("set_size", "mean")}


@command("function evaluate", __doc__, made_by="evaluate_function")
def main(
    predictions: Annotated[Path, Field(description="TSV with protein, term and score (0 to 1), or a run for input.")],
    evaluate: EvaluateTermsSection,
    writer: OutputWriter,
) -> None:
    if evaluate.ia and evaluate.ia_from:
        raise ConfigError("--evaluate.ia and --evaluate.ia_from are mutually exclusive; give one")
    writer.refuse_existing(evaluate.output)
    if evaluate.input:
        _evaluate_run(predictions, evaluate, writer)
        return
    evaluations = _evaluated(predictions, evaluate)
    _print(evaluations)  # before writing the folder, which may fail
    if evaluate.output is not None:
        with writer.folder(evaluate.output) as building:
            _write(building, evaluations, evaluate)


def _evaluate_run(run: Path, section: EvaluateTermsSection, writer: OutputWriter) -> None:
    # Here: they load torch and matplotlib.
    from esmeray.inference.classify.plots import draw_reliability
    from esmeray.inference.function.prediction import evaluate_sets
    from esmeray.inference.function.sets import calibration_errors

    sets, pairs = evaluate_sets(run, section)
    tables = {}
    for keys in ["aspect"], ["aspect", "bits"], ["aspect", "frequency"]:
        if keys[-1] in sets:
            tables[f"sets_by_{keys[-1]}"] = sets.groupby(keys, observed=True).agg(**_SETS_SHOWN)
        if not pairs.empty:  # empty if the ranker scores no term, e.g. without hits
            errors = pairs.groupby(keys, observed=True)[["score", "probability", "is_true"]].apply(calibration_errors)
            tables[f"probabilities_by_{keys[-1]}"] = errors.astype({"terms": int})
    for table in tables.values():
        print(table.to_string(float_format="{:.3f}".format))
    if section.output is not None:
        with writer.folder(section.output) as building:
            for name, table in tables.items():
                table.to_csv(building / f"{name}.tsv", sep="\t", lineterminator="\n")
            for aspect, own in pairs.groupby("aspect"):
                shown = (own[name].to_numpy()[:, None] for name in ("score", "is_true", "probability"))
                draw_reliability(building / f"reliability_{aspect}.png", *shown)


def _evaluated(predictions: Path, section: EvaluateTermsSection) -> dict[str, Evaluation]:
    """Evaluations by aspect, without aspects that have nothing to evaluate."""
    assert section.ontology is not None  # the section requires it for predictions
    ontology = read_ontology(section.ontology)
    unknown, evidence = section.unknown, tuple(section.evidence) or EXPERIMENTAL
    # The same rules for the truth, known annotations and annotations for weights, so that they have the same terms.
    read = partial(read_annotations, ontology=ontology, unknown=unknown, evidence=evidence)
    truth = read(section.truth, aspect=section.aspect, since=section.since, before=section.before)
    proteins = {name: annotations.proteins for name, annotations in truth.items()}
    known = read(section.known) if section.known else {}
    if known:
        # Annotations may be known for any share of the proteins. If for none, the ids are of different kinds.
        known_ids = {*chain(*(annotations.proteins for annotations in known.values()))}
        match_ids(chain(*proteins.values()), known_ids, section.truth, section.known, share=1e-9)
    terms = read_terms(section.terms, ontology, unknown) if section.terms else {}
    accretion = read_accretion(section.ia, ontology, unknown) if section.ia else {}
    if section.ia_from:
        for name, annotations in read(section.ia_from).items():
            accretion[name] = information_accretion(annotations, ontology.aspects[name])
    evaluations = {}
    # Scores of other proteins do not count, and are not kept.
    scores_of = read_scores(predictions, ontology, proteins, aspect=section.aspect, unknown=unknown)
    for name, scores in scores_of.items():
        evaluation = evaluate_functions(
            ontology.aspects[name],
            truth[name],
            scores,
            accretion_V=accretion.get(name),
            known=known.get(name),
            terms_V=terms.get(name),
            settings=section,
        )
        if evaluation.metrics:  # empty if no protein is left, for which an Fmax of 0 would be wrong
            evaluations[name] = evaluation
    for name in sorted(truth.keys() - evaluations.keys()):
        log.warning(
            "%s is left out: no annotations left to predict, or no protein with such annotations has a score "
            "above a threshold",
            name,
        )
    if not evaluations:
        raise DataError(
            f"{predictions}: no protein with annotations to predict has a score above a threshold; check the "
            "predictions, the known annotations and the terms"
        )
    return evaluations


def _print(evaluations: dict[str, Evaluation]) -> None:
    console = result_console()
    for name, evaluation in evaluations.items():
        table = Table("metric", "value", "95 % interval", "threshold")
        for metric, (value, interval, threshold) in evaluation.metrics.items():
            between = f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else ""
            table.add_row(metric, f"{value:.3f}", between, "" if threshold is None else f"{threshold:.3g}")
        console.print(
            f"{name}: {counted(evaluation.proteins, 'protein{s}')}, {evaluation.predicted:,} with predictions"
        )
        console.print(table)


def _write(folder: Path, evaluations: dict[str, Evaluation], settings: EvaluationSection) -> None:
    import pandas as pd  # here: it takes a moment

    curves = [
        pd.DataFrame({"ns": aspect, "tau": evaluation.thresholds, **evaluation.curves})
        for aspect, evaluation in evaluations.items()
    ]
    aspects: dict[str, Any] = {}
    for aspect, evaluation in evaluations.items():
        metrics = {name: metric._asdict() for name, metric in evaluation.metrics.items()}
        aspects[aspect] = {"proteins": evaluation.proteins, "predicted": evaluation.predicted, "metrics": metrics}
    # Settings without paths, so that the files are identical wherever they are made.
    content = {"settings": settings.model_dump(include=set(EvaluationSection.model_fields)), "aspects": aspects}
    (folder / "evaluation.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    pd.concat(curves).to_csv(folder / "curves.tsv", sep="\t", index=False, float_format="%.10g", lineterminator="\n")
    _draw_curves(evaluations, folder / "curves.png")


def _draw_curves(evaluations: dict[str, Evaluation], path: Path) -> None:
    """Draw precision over recall for each aspect, with the point of Fmax marked."""
    from esmeray.common.figure_style import (  # here: it loads matplotlib
        BLUE,
        ORANGE,
        legend,
        picture,
        style,
    )

    kinds = {"": ("unweighted", BLUE), "_w": ("weighted by information accretion", ORANGE)}
    with picture(path, 5 * len(evaluations), 4.6, "Precision and recall") as figure:
        for number, (name, evaluation) in enumerate(evaluations.items(), 1):
            axes = figure.add_subplot(1, len(evaluations), number)
            style(axes, f"{name.replace('_', ' ')}, {evaluation.proteins:,} proteins")
            for ending, (label, colour) in kinds.items():
                if f"f{ending}" in evaluation.curves:
                    recall_T, precision_T = evaluation.curves[f"rc{ending}"], evaluation.curves[f"pr{ending}"]
                    best = int(evaluation.curves[f"f{ending}"].argmax())
                    value = evaluation.metrics[f"fmax{ending}"].value
                    axes.plot(recall_T, precision_T, color=colour, label=f"{label}: Fmax {value:.3f}")
                    axes.plot(recall_T[best], precision_T[best], "o", color=colour)
            axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1.02), ylim=(0, 1.02))
            legend(axes, over_curves=True)
