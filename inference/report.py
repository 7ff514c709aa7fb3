"""What an evaluation found, for machines and for people: figures, intervals, baselines, mistakes and pictures.

In: predictions of a model and of its baselines for the same records, and their targets. Out, in a folder:

    evaluation.json          everything below as numbers
    report.md                tables that a person reads
    confusion.tsv            rows of each true class that were taken for each class
    confusion.png, ranking.png, reliability.png; predictions.png for regression

That the folder appears complete or not at all is left to :mod:`common.publishing`.

Shape legend: N records, R residues of all records end to end, C classes, labels or columns.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataset.labels.label_space import IGNORED_TARGET, LabelSpace
from inference.plots import draw_confusion, draw_predictions, draw_reliability, draw_roc_pr
from model.metrics.classification import (
    bootstrap_intervals,
    classification_metrics,
    confusion_matrix,
    metrics_of_each,
)

EVALUATION_FILE, REPORT_FILE, CONFUSION_FILE = "evaluation.json", "report.md", "confusion.tsv"
SHARE = 0.95
_CONFUSED_PAIRS = 15
_EXAMPLES = 3
_CLASSES_SHOWN = 100

_NAMES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "f1_macro": "F1, mean over classes",
    "f1_micro": "F1, over all",
    "mcc": "Matthews correlation",
    "auroc": "AUROC",
    "average_precision": "average precision",
    "fmax": "Fmax",
    "ece": "calibration error (less is better)",
    "mse": "mean squared error (less is better)",
    "mae": "mean absolute error (less is better)",
    "r2": "R²",
    "pearson": "Pearson correlation",
    "spearman": "Spearman correlation",
}
_WITH_UNIT = ("mse", "mae")


def write_report(
    folder: Path | str,
    label_space: LabelSpace,
    ids: Sequence[str],
    probabilities: NDArray,
    targets: NDArray,
    baselines: Mapping[str, NDArray],
    counts: Mapping[str, int],
    *,
    best_of: str | None = None,
    seed: int = 0,
    samples: int = 1000,
    weights: NDArray | None = None,
    lengths: NDArray | None = None,
    facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Compute and write it all.

    Args:
        folder: made if need be.
        label_space: what the columns mean.
        ids: of the N records.
        probabilities: (N, C), or (R, C) for per_residue.
        targets: (N,), (N, C) or (R,), as of :func:`model.metrics.classification.classification_metrics`.
        baselines: predictions of that shape by name.
        counts: of records that were read, skipped and so on, by what was done to them.
        best_of: figure by which the model was chosen, shown first.
        seed: of the resamplings.
        samples: resamplings for the intervals.
        weights: (N,) weight of each record, or None.
        lengths: (N,) residues of each record, for per_residue, whose resamplings draw whole records.
        facts: what else is to be told, by name: the model, its checkpoint, the data.

    Returns:
        What ``evaluation.json`` holds.

    Raises:
        DivergenceError: a prediction is NaN or infinite.
        ValueError: lengths are missing or don't fit.
    """
    folder, kind = Path(folder), label_space.kind
    groups = _groups(ids, lengths, len(targets)) if kind == "per_residue" else None
    if groups is not None and weights is not None:
        weights = weights[groups]

    def judged(predictions: NDArray) -> dict[str, Any]:
        intervals = bootstrap_intervals(
            kind, predictions, targets, samples, seed, SHARE, weights=weights, groups=groups
        )
        return {
            "figures": classification_metrics(kind, predictions, targets, weights),
            "intervals": {name: list(interval) for name, interval in intervals.items()},
        }

    known_N = _known(targets)
    evaluation: dict[str, Any] = {
        "kind": kind,
        "records": len(ids),
        "without_target": int((~known_N).sum()),
        **({"residues": len(targets)} if groups is not None else {}),
        "best_of": best_of,
        **judged(probabilities),
        "baselines": {name: judged(predictions) for name, predictions in baselines.items()},
        "bootstrap": {"samples": samples, "seed": seed, "share": SHARE},
        "classes": _classes(label_space, probabilities, targets),
        "counts": dict(counts),
        "facts": dict(facts or {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    evaluation["pictures"] = _draw(folder, label_space, probabilities, targets)
    if kind not in ("multilabel", "regression"):
        matrix_CC = confusion_matrix(probabilities, targets)
        record_ids = ids if groups is None else [ids[group] for group in groups.tolist()]
        evaluation["confused"] = _confused(matrix_CC, label_space.names, record_ids, probabilities, targets)
        (folder / CONFUSION_FILE).write_text(_matrix_text(matrix_CC, label_space.names), encoding="utf-8")
    (folder / REPORT_FILE).write_text(report_text(evaluation), encoding="utf-8")
    text = json.dumps(evaluation, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / EVALUATION_FILE).write_text(text + "\n", encoding="utf-8")
    return evaluation


def report_text(evaluation: Mapping[str, Any]) -> str:
    """``report.md`` of what ``evaluation.json`` holds."""
    judged = evaluation["records"] if "residues" not in evaluation else evaluation["residues"]
    unit = "records" if "residues" not in evaluation else f"residues of {evaluation['records']:,} records"
    lines = ["# Evaluation", "", f"{judged:,} {unit}, {evaluation['without_target']:,} of them without a target.", ""]
    lines += _figures_section(evaluation)
    if evaluation.get("confused"):
        lines += _confused_section(evaluation["confused"])
    lines += _classes_section(evaluation["kind"], evaluation["classes"])
    for title, entries in (("Records", evaluation["counts"]), ("About", evaluation["facts"])):
        if entries:
            lines += [f"## {title}", "", *_table(["", ""], [[_words(k), _cell(k, v)] for k, v in entries.items()]), ""]
    lines += [f"![{Path(name).stem}]({name})" for name in evaluation["pictures"]]
    return "\n".join(lines).rstrip() + "\n"


def _figures_section(evaluation: Mapping[str, Any]) -> list[str]:
    judged = {"model": evaluation, **evaluation["baselines"]}
    present = {name for one in judged.values() for name in one["figures"]}
    first = [evaluation["best_of"]] if evaluation["best_of"] in present else []
    order = list(dict.fromkeys(first + [name for name in _NAMES if name in present] + sorted(present)))
    rows = [[_NAMES.get(name, name), *(_figure(one, name) for one in judged.values())] for name in order]
    chosen = f" The model was chosen by {_NAMES.get(first[0], first[0])}, the first row." if first else ""
    bootstrap = evaluation["bootstrap"]
    note = (
        f"In brackets: {bootstrap['share']:.0%} of {bootstrap['samples']:,} resamplings of the records lie between "
        f"these (percentile bootstrap, seed {bootstrap['seed']}). A dash: undefined here.{chosen}"
    )
    return ["## Figures", "", *_table(["figure", *judged], rows), "", note, ""]


def _confused_section(confused: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [pair["truth"], pair["taken_for"], f"{pair['rows']:,}", f"{pair['share']:.1%}", ", ".join(pair["examples"])]
        for pair in confused
    ]
    header = ["truth", "taken for", "how often", "share of the true class", "surest examples"]
    return ["## Confused most", "", *_table(header, rows), ""]


def _classes_section(kind: str, classes: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = ["records", "predicted", "precision", "recall", "f1", "auroc", "average_precision"]
    if kind == "regression":
        columns = ["records", "mse", "mae", "r2", "pearson", "spearman"]
    shown = sorted(classes, key=lambda entry: -entry["records"])[:_CLASSES_SHOWN]
    rows = [
        [entry["name"], *(_cell(name, entry[name]) if name in entry else "–" for name in columns)] for entry in shown
    ]
    title = "## Columns" if kind == "regression" else "## Classes"
    more = [f"The {len(shown)} most frequent of {len(classes):,}.", ""] if len(shown) < len(classes) else []
    return [title, "", *_table(["name", *map(_words, columns)], rows), "", *more]


def _classes(label_space: LabelSpace, probabilities: NDArray, targets: NDArray) -> list[dict[str, Any]]:
    whole = ("records", "predicted")
    each = metrics_of_each(label_space.kind, probabilities, targets)
    return [
        {"name": name, **{key: int(value) if key in whole else value for key, value in figures.items()}}
        for name, figures in zip(label_space.names, each, strict=True)
    ]


def _confused(
    matrix_CC: NDArray[np.int64],
    names: Sequence[str],
    row_ids: Sequence[str],
    probabilities: NDArray,
    targets: NDArray,
) -> list[dict[str, Any]]:
    """Pairs of a true class and what it was taken for, most frequent first, each with ids of the surest mistakes."""
    wrong_CC = matrix_CC - np.diag(np.diag(matrix_CC))
    order = np.argsort(-wrong_CC, axis=None, kind="stable")[:_CONFUSED_PAIRS]
    predicted, sureness = probabilities.argmax(axis=1), probabilities.max(axis=1)
    pairs: list[dict[str, Any]] = []
    for truth, taken_for in zip(*np.unravel_index(order, wrong_CC.shape), strict=True):
        if not wrong_CC[truth, taken_for]:
            break
        mistakes = np.flatnonzero((targets == truth) & (predicted == taken_for))
        surest = mistakes[np.argsort(-sureness[mistakes], kind="stable")]
        pairs.append(
            {
                "truth": names[truth],
                "taken_for": names[taken_for],
                "rows": int(wrong_CC[truth, taken_for]),
                "share": float(wrong_CC[truth, taken_for] / matrix_CC[truth].sum()),
                "examples": list(dict.fromkeys(row_ids[row] for row in surest.tolist()))[:_EXAMPLES],
            }
        )
    return pairs


def _draw(folder: Path, label_space: LabelSpace, probabilities: NDArray, targets: NDArray) -> list[str]:
    """Draw the pictures that the kind has; their names."""
    names = label_space.names
    if label_space.kind == "regression":
        draw_predictions(folder / "predictions.png", probabilities, targets, names)
        return ["predictions.png"]
    pictures = ["ranking.png", "reliability.png"]
    if label_space.kind != "multilabel":
        draw_confusion(folder / "confusion.png", confusion_matrix(probabilities, targets), names)
        pictures = ["confusion.png", *pictures]
    draw_roc_pr(folder / "ranking.png", probabilities, targets, names)
    draw_reliability(folder / "reliability.png", probabilities, targets)
    return pictures


def _groups(ids: Sequence[str], lengths: NDArray | None, num_rows: int) -> NDArray[np.int64]:
    """(R,) which record each residue belongs to."""
    if lengths is None or len(lengths) != len(ids) or int(np.sum(lengths)) != num_rows:
        given = "none" if lengths is None else f"{len(lengths)} lengths of {int(np.sum(lengths))} residues"
        raise ValueError(f"{len(ids)} records with {num_rows} residues need their lengths, given were {given}")
    return np.repeat(np.arange(len(ids)), lengths)


def _known(targets: NDArray) -> NDArray[np.bool_]:
    return np.isfinite(targets).any(axis=1) if targets.ndim == 2 else targets != IGNORED_TARGET


def _figure(judged: Mapping[str, Any], name: str) -> str:
    if name not in judged["figures"]:
        return "–"
    interval = judged["intervals"].get(name)
    between = f" [{_short(name, interval[0])}, {_short(name, interval[1])}]" if interval else ""
    return _short(name, judged["figures"][name]) + between


def _short(name: str, value: float) -> str:
    """Three places of what is at most 1, three digits of what has a unit."""
    return f"{value:#.3g}" if name in _WITH_UNIT else f"{value:.3f}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in lines]


def _escaped(cell: str) -> str:
    return " ".join(cell.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        return _short(name, value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _matrix_text(matrix_CC: NDArray[np.int64], names: Sequence[str]) -> str:
    text = io.StringIO()
    rows = csv.writer(text, dialect="excel-tab", lineterminator="\n")
    rows.writerow(["truth \\ taken for", *names])
    rows.writerows([name, *row] for name, row in zip(names, matrix_CC.tolist(), strict=True))
    return text.getvalue()
