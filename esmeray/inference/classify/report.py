"""Report of an evaluation: metrics with intervals, baselines and plots.

The report folder holds:

- evaluation.json: all values
- report.md: the report to read
- confusion.tsv: the confusion matrix as counts, true classes as rows; not for several labels or numbers
- plots as PNG

Shape legend: N records, R concatenated residues of all records, C classes, labels or columns.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esmeray.common.progress import record_bar
from esmeray.common.statistics import RESAMPLINGS, SHARE
from esmeray.dataset.section import TokenizerSection
from esmeray.dataset.targets import LabelSpace, has_target
from esmeray.inference.calibration import Calibration, set_metrics
from esmeray.inference.classifier import ClassifierPipeline
from esmeray.inference.classify.baselines import baselines
from esmeray.inference.classify.labelled import LabelledTexts
from esmeray.inference.classify.plots import (
    MAX_CLASSES,
    draw_confusion,
    draw_predictions,
    draw_reliability,
    draw_roc_pr,
)
from esmeray.model.metrics.classification import (
    bootstrap_intervals,
    classification_metrics,
    confusion_matrix,
    metrics_of_each,
)

_CLASSES_SHOWN = 100

_WITH_UNIT = ("mse", "mae")
_IDENTITY_EDGES = (0, 0.3, 0.5, 0.7, 0.95, 1.01)
_NEAR_COPIES = "95–100 %"
_IDENTITY_BINS = ("below 30 %", "30–50 %", "50–70 %", "70–95 %", _NEAR_COPIES)


@dataclass(frozen=True)
class Scored:
    """N records with their targets and a model's predictions, in the format of
    :func:`esmeray.model.metrics.classification.classification_metrics`.

    Attributes:
        probabilities: (N, C), or (R, C) for per_residue.
        targets: (N,), (N, C) or (R,).
        weights: (N,) weight of each record, or None.
        lengths: (N,) residues of each record, for per_residue, because whole records are resampled; otherwise None.
    """

    label_space: LabelSpace
    ids: Sequence[str]
    probabilities: NDArray
    targets: NDArray
    weights: NDArray | None = None
    lengths: NDArray | None = None

    @property
    def records(self) -> NDArray[np.int64]:
        """Record index of each row: (N,), or (R,) for per_residue."""
        return np.repeat(np.arange(len(self.ids)), 1 if self.lengths is None else self.lengths)


def scored_by(
    pipeline: ClassifierPipeline, tokenizer: TokenizerSection, texts: LabelledTexts, training: LabelledTexts | None
) -> tuple[Scored, dict[str, Any], dict[str, int]]:
    """Predict the records. Return them with the predictions, the baselines' predictions by name, and counts of records.

    For per-residue labels, targets and baselines are restricted to the residues that remain after cropping.
    """
    space = pipeline.label_space
    with record_bar("predicting") as bar:
        predictions = pipeline.predict_clean(texts.texts, progress=lambda done, total: bar(done / total, done))
    others = (
        {}
        if training is None
        else baselines(space.kind, tokenizer.content, training.texts, training.targets, texts.texts, space.num_outputs)
    )
    targets = texts.targets
    if (rows := predictions.kept_residues()) is not None:
        targets, others = targets[rows], {name: values[rows] for name, values in others.items()}
    cropped = int((predictions.cropped > 0).sum())
    unknown, _ = pipeline.model.facts.unknown.counts_of(texts.texts)
    counts = {**texts.counts, "records_cropped": cropped, "residues_unknown": unknown.total()}
    # Zero counts are dropped to keep the report short.
    counts = {name: number for name, number in counts.items() if number}
    scored = Scored(space, texts.ids, predictions.probabilities, targets, texts.weights, predictions.lengths)
    return scored, others, counts


def evaluation_of(
    scored: Scored,
    baselines: Mapping[str, NDArray],
    *,
    trained_N: NDArray[np.bool_] | None = None,
    samples: int = RESAMPLINGS,
    seed: int = 0,
    identities_N: NDArray[np.float64] | None = None,
    calibration: Calibration | None = None,
) -> dict[str, Any]:
    """Compute the contents of ``evaluation.json``, with bootstrap intervals; ``baselines`` are predictions by name.

    ``identities_N``: identity of each record with its nearest training protein, NaN if unknown. Metrics by identity
    are added.

    ``calibration`` adds the calibration error that it leaves, and the coverage and size of conformal sets.

    ``trained_N``: records that the model was trained on, if known. Metrics without them are added. Raises
    DivergenceError if a prediction is NaN or infinite.
    """
    kind, targets, records = scored.label_space.kind, scored.targets, scored.records
    metrics_of = partial(_metrics_of, scored, samples, seed, calibration)

    def metrics_of_records(chosen_N: NDArray[np.bool_]) -> dict[str, Any]:
        return {"records": int(chosen_N.sum()), **metrics_of(scored.probabilities, chosen_N[records])}

    residues = {} if scored.lengths is None else {"residues": len(targets)}
    not_in_training = {}
    # Training records inflate the metrics, and the file may contain some unnoticed. If it contains none, or no others,
    # there is nothing to compare.
    if trained_N is not None and 0 < trained_N.sum() < len(trained_N):
        not_in_training = {"not_in_training": metrics_of_records(~trained_N)}
    by_identity = {}
    if identities_N is not None:
        bins_N = pd.cut(identities_N, _IDENTITY_EDGES, right=False, labels=_IDENTITY_BINS)
        by_identity = {name: metrics_of_records(bins_N == name) for name in _IDENTITY_BINS if name in bins_N.unique()}
    of_classes = metrics_of_each(kind, scored.probabilities, targets)
    return {
        "kind": kind,
        "records": len(scored.ids),
        "without_target": int((~has_target(targets)).sum()),
        **residues,
        **metrics_of(scored.probabilities),
        "in_training": None if trained_N is None else int(trained_N.sum()),
        **not_in_training,
        "by_identity": by_identity,
        "baselines": {name: metrics_of(predictions) for name, predictions in baselines.items()},
        "bootstrap": {"samples": samples, "seed": seed, "share": SHARE},
        "classes": [
            {"name": name, **metrics} for name, metrics in zip(scored.label_space.names, of_classes, strict=True)
        ],
    }


def _metrics_of(
    scored: Scored,
    samples: int,
    seed: int,
    calibration: Calibration | None,
    predictions: NDArray,
    rows: NDArray[np.bool_] | slice = slice(None),
) -> dict[str, Any]:
    """Return the metrics of predictions on some rows, and their intervals."""
    kind, targets, records = scored.label_space.kind, scored.targets[rows], scored.records[rows]
    # Each residue has its record's weight.
    weights = None if scored.weights is None else scored.weights[records]
    # Whole records are resampled. Residues of one protein are correlated, so that resampling residues would make
    # intervals too narrow.
    intervals = bootstrap_intervals(kind, predictions[rows], targets, samples, seed, weights=weights, groups=records)
    metrics = classification_metrics(kind, predictions[rows], targets, weights)
    if calibration is not None and predictions is scored.probabilities:
        calibrated = calibration.probabilities(predictions[rows])
        after = classification_metrics(kind, calibrated, targets, weights)
        metrics |= {"ece_calibrated": after["ece"]} if "ece" in after else {}
        metrics |= set_metrics(calibration, calibrated, targets, records)
    return {
        "metrics": metrics,
        "intervals": {name: list(interval) for name, interval in intervals.items()},
    }


def write_report(
    folder: Path,
    scored: Scored,
    evaluation: Mapping[str, Any],
    *,
    best_of: str | None = None,
    counts: Mapping[str, int] | None = None,
    facts: Mapping[str, Any] | None = None,
    calibration: Calibration | None = None,
) -> None:
    """Write tables, plots and metrics to an existing folder.

    Args:
        best_of: metric that the model was selected by, shown first.
        counts: number of records by kind, e.g. skipped records.
        facts: properties of the model, its checkpoint and the data, by name.
    """
    content = dict(evaluation, best_of=best_of, counts=dict(counts or {}), facts=dict(facts or {}))
    _draw(folder, scored, calibration)  # first, because the report links the existing plots
    content["pictures"] = sorted(path.name for path in folder.glob("*.png"))
    (folder / "report.md").write_text(_report_text(content), encoding="utf-8")
    # NaN is not valid JSON; undefined metrics have been left out.
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / "evaluation.json").write_text(text + "\n", encoding="utf-8")


def metrics_lines(evaluation: Mapping[str, Any], best_of: str | None = None) -> list[str]:
    """Markdown table with the metrics of the model and the baselines with their intervals, ``best_of`` first."""
    records = f"{evaluation['records']:,} records"
    about = f"{evaluation['residues']:,} residues of {records}" if "residues" in evaluation else records
    about += f", {evaluation['without_target']:,} without a target."
    if evaluation.get("in_training") is not None:
        about += f" {evaluation['in_training']:,} of the {records} were in the model's training data."
    columns: dict[str, Mapping[str, Any]] = {"model": evaluation}
    if "not_in_training" in evaluation:
        columns["model, not trained on"] = evaluation["not_in_training"]
    columns |= evaluation["baselines"]
    # A metric may be undefined for the model and defined for a baseline.
    present = {name for column in columns.values() for name in column["metrics"]}
    names = [*evaluation["metrics"], *sorted(present)]
    chosen = ""
    if best_of in present:
        names.insert(0, best_of)
        chosen = f" The checkpoint was selected by {best_of} (first row)."
    bootstrap = evaluation["bootstrap"]
    note = (
        f"In brackets: {bootstrap['share']:.0%} confidence intervals (percentile bootstrap over the records, "
        f"{bootstrap['samples']:,} resamples, seed {bootstrap['seed']}). A dash means undefined.{chosen}"
    )
    return [about, "", *_metric_table(columns, names), "", note, "", *_identity_lines(evaluation, names)]


def _identity_lines(evaluation: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Markdown table of the metrics by identity with the training proteins, and a warning about near copies."""
    by_identity = evaluation.get("by_identity", {})  # fitted mutants have none
    if not by_identity:
        return []
    compared = sum(metrics["records"] for metrics in by_identity.values())
    columns = {f"{name}, {metrics['records']:,} records": metrics for name, metrics in by_identity.items()}
    lines = [
        "By identity with the nearest training protein, in an alignment over 80 % of both "
        f"({compared:,} records{', a random sample' if compared < evaluation['records'] else ''}):",
        "",
        *_metric_table(columns, names),
        "",
    ]
    if _NEAR_COPIES in by_identity:
        lines += [
            f"**Warning**: {by_identity[_NEAR_COPIES]['records']:,} of {compared:,} records have near copies in "
            "training (95 % identity or more), which inflates the metrics. To hold out whole clusters of similar "
            "proteins, set data.labels.split to clusters.",
            "",
        ]
    return lines


def _metric_table(columns: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> list[str]:
    rows = [[name, *(_value(column, name) for column in columns.values())] for name in dict.fromkeys(names)]
    return table_lines(["metric", *columns], rows)


def _draw(folder: Path, scored: Scored, calibration: Calibration | None) -> None:
    probabilities, targets, names = scored.probabilities, scored.targets, scored.label_space.names
    if scored.label_space.kind == "regression":
        draw_predictions(folder / "predictions.png", probabilities, targets, names)
        return
    draw_roc_pr(folder / "ranking.png", probabilities, targets, names)
    calibrated = None if calibration is None else calibration.probabilities(probabilities)
    draw_reliability(folder / "reliability.png", probabilities, targets, calibrated)
    if scored.label_space.kind == "multilabel":
        return
    counts_CC = confusion_matrix(probabilities, targets)
    table = pd.DataFrame(counts_CC, names, names)
    table.to_csv(folder / "confusion.tsv", sep="\t", index_label="true class", lineterminator="\n")
    if len(names) <= MAX_CLASSES:
        draw_confusion(folder / "confusion.png", counts_CC, names)


def _report_text(evaluation: Mapping[str, Any]) -> str:
    lines = ["# Evaluation", "", *metrics_lines(evaluation, evaluation["best_of"])]
    lines += _classes_section(evaluation["kind"], evaluation["classes"])
    for title, entries in (("Records", evaluation["counts"]), ("About", evaluation["facts"])):
        if entries:
            rows = [[name.replace("_", " "), _cell(name, value)] for name, value in entries.items()]
            lines += [f"## {title}", "", *table_lines(["", ""], rows), ""]
    lines += [f"![{Path(name).stem}]({name})" for name in evaluation["pictures"]]
    return "\n".join(lines).rstrip() + "\n"


def _classes_section(kind: str, classes: Sequence[Mapping[str, Any]]) -> list[str]:
    title, columns = "Classes", ["records", "predicted", "precision", "recall", "f1", "auroc", "average_precision"]
    if kind == "regression":
        title, columns = "Columns", ["records", "mse", "mae", "r2", "pearson", "spearman"]
    # A GO model has thousands of terms; evaluation.json contains all of them.
    shown = sorted(classes, key=lambda entry: -entry["records"])[:_CLASSES_SHOWN]
    rows = [[entry["name"], *(_cell(name, entry.get(name, "–")) for name in columns)] for entry in shown]
    table = table_lines(["name", *(name.replace("_", " ") for name in columns)], rows)
    more = f"The {len(shown)} most frequent of {len(classes):,}.\n" if len(shown) < len(classes) else ""
    return [f"## {title}", "", *table, "", more]


def _value(scores: Mapping[str, Any], name: str) -> str:
    if name not in scores["metrics"]:
        return "–"
    interval = scores["intervals"].get(name)
    between = f" [{_short(name, interval[0])}, {_short(name, interval[1])}]" if interval else ""
    return _short(name, scores["metrics"][name]) + between


def _short(name: str, value: float) -> str:
    """Three decimals for values up to 1, three significant digits for values with a unit."""
    return f"{value:#.3g}" if name in _WITH_UNIT else f"{value:.3f}"


def table_lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown table with aligned columns, readable as plain text."""
    lines = [[_escaped(cell) for cell in line] for line in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]


def _escaped(cell: str) -> str:
    # Names come from files: a bar would end a cell, and a renderer would read "<" as HTML.
    return " ".join(cell.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        return _short(name, value)
    return f"{value:,}" if isinstance(value, int) else str(value)
