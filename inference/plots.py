"""Pictures of a classifier's confusions, ranking and calibration, and of predicted numbers.

In: probabilities, targets and names as arrays and strings. Out: one PNG each, which is replaced only when the new one
is complete. They stay legible with a hundred classes: of many curves the best and the worst are named, and of many more
classes those that are confused most are shown.

Shape legend: N rows (records, or residues), C classes, labels or columns, P points of a curve.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score, roc_curve

from common.figure_style import BLUE, GREEN, GREY, GRID, INK, ORANGE, RED, heading, legend, new_figure, save, style
from common.text import counted
from dataset.labels.label_space import IGNORED_TARGET
from model.metrics.weighted import CALIBRATION_BINS

_MOST_CLASSES = 100
"""In one confusion matrix; beyond, those that are confused most."""
_NUMBERED_CLASSES = 20
"""Up to here the cells have numbers."""
_COLOURED_CURVES = 8
"""Up to here each curve has a colour and a name of its own."""
_NAMED_CURVES = 3
"""Of many curves, how many of the best and how many of the worst are named."""
_LONGEST_NAME = 36
_MOST_POINTS = 2000
_COLOURS = (BLUE, ORANGE, GREEN, RED, "#7b5aa6", "#8c564b", "#d6539b", "#4ab4c4")
_CURVES_GRID = np.linspace(0.0, 1.0, 201)


class Curve(NamedTuple):
    """One class against the rest in P points.

    Attributes:
        name: of the class.
        x: (P,) in rising order: the false positive rate, or the recall.
        y: (P,) the recall, or the precision from the point before to this one.
        area: AUROC, or the average precision.
    """

    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    area: float


def draw_confusion(path: Path | str, counts_CC: NDArray[np.integer], names: Sequence[str]) -> None:
    """Draw which classes are predicted as which, each row as shares of a true class: right in blue, wrong in red.

    Args:
        path: the PNG.
        counts_CC: (C, C) rows of each true class (first axis) that were predicted as each class.
        names: C names.
    """
    total, right, num_classes = int(counts_CC.sum()), int(np.trace(counts_CC)), len(names)
    title = f"{right:,} of {total:,} right ({right / max(total, 1):.1%})"
    shown_C = _most_confused(counts_CC)
    if len(shown_C) < num_classes:
        title += f"; the {len(shown_C)} most confused of {num_classes} classes"
    shares_CC = counts_CC / np.maximum(counts_CC.sum(axis=1, keepdims=True), 1)
    counts_CC, shares_CC = counts_CC[np.ix_(shown_C, shown_C)], shares_CC[np.ix_(shown_C, shown_C)]
    labels = [_legible(names[index]) for index in shown_C]

    cell_inches = 0.55 if len(labels) <= 12 else 0.4 if len(labels) <= _NUMBERED_CLASSES else 0.18
    font = 9 if len(labels) <= _NUMBERED_CLASSES else 7
    margin = 1.2 + font / 72 * 0.55 * max(map(len, labels), default=0)
    side = max(len(labels) * cell_inches + margin, 5.0)
    figure = new_figure(side, side, title)
    axes = figure.subplots()
    axes.imshow(_confusion_colours(shares_CC), aspect="equal", interpolation="nearest")
    places = np.arange(len(labels))
    axes.set_xticks(places, labels, rotation=90)
    axes.set_yticks(places, labels)
    for lines in (axes.hlines, axes.vlines):  # a grid of minor ticks takes seconds with a hundred classes
        lines(places[1:] - 0.5, -0.5, len(labels) - 0.5, color=GRID, linewidth=0.6)
    axes.tick_params(colors=INK, labelsize=font)
    axes.spines[:].set_color(GREY)
    axes.set_xlabel("predicted\n(right in blue, wrong in red;\ndarker: larger share of its row)", color=INK)
    axes.set_ylabel("true class", color=INK)
    if len(labels) <= _NUMBERED_CLASSES:
        _write_counts(axes, counts_CC, shares_CC)
    save(figure, path)


def draw_roc_pr(path: Path | str, probabilities_NC: NDArray, targets: NDArray, names: Sequence[str]) -> None:
    """Draw recall against false positives, and precision against recall, of each class and as their mean.

    Args:
        path: the PNG.
        probabilities_NC: (N, C).
        targets: (N,) classes with IGNORED_TARGET where there is none, or (N, C) of 0 and 1 with NaN where unknown.
        names: C names. Of two classes, the second is drawn.
    """
    roc_curves, precision_curves = ranking_curves(probabilities_NC, targets, names)
    figure = new_figure(12, 5.8, f"Ranking of {counted(len(roc_curves), 'class{es}')} against the rest")
    roc, precision = figure.subplots(1, 2)
    heading(roc, "Recall against false positives (ROC)")
    heading(precision, "Precision against recall")
    for axes, x, y in ((roc, "false positive rate", "recall"), (precision, "recall", "precision")):
        style(axes)
        axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.02))
        axes.set_xlabel(x, color=INK)
        axes.set_ylabel(y, color=INK)
    roc.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1.2, label="0.500  chance")
    _draw_curves(roc, roc_curves, [np.interp(_CURVES_GRID, c.x, c.y) for c in roc_curves], "default")
    reached = [c.y[np.searchsorted(c.x, _CURVES_GRID - 1e-9)] for c in precision_curves]
    _draw_curves(precision, precision_curves, reached, "steps-pre")
    for axes in (roc, precision):
        legend(axes, over_curves=True)
    save(figure, path)


def draw_reliability(path: Path | str, probabilities_NC: NDArray, targets: NDArray) -> None:
    """Draw how often predictions are right against how sure they are, and how many are how sure (Guo et al. 2017).

    Args:
        path: the PNG.
        probabilities_NC: (N, C).
        targets: (N,) classes, of which the likeliest counts, or (N, C) labels, of which each counts.
    """
    confidences, outcomes = _confidences(probabilities_NC, targets)
    bins = np.minimum((confidences * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
    counts = np.bincount(bins, minlength=CALIBRATION_BINS)
    right = np.bincount(bins, weights=outcomes, minlength=CALIBRATION_BINS) / np.maximum(counts, 1)
    sure = np.bincount(bins, weights=confidences, minlength=CALIBRATION_BINS) / np.maximum(counts, 1)
    error = float(np.abs(right - sure) @ counts / max(len(confidences), 1))

    figure = new_figure(6.4, 7.2, f"Calibration error {error:.3f}")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    centres, width, filled = (np.arange(CALIBRATION_BINS) + 0.5) / CALIBRATION_BINS, 0.94 / CALIBRATION_BINS, counts > 0
    heading(above, "Observed frequency against confidence")
    above.bar(centres[filled], right[filled], width, color=BLUE, label="observed")
    gaps = (right - sure)[filled]
    hatched: dict[str, Any] = {"facecolor": "none", "edgecolor": RED, "hatch": "////", "linewidth": 0.8}
    above.bar(centres[filled], gaps, width, bottom=sure[filled], label="gap to the confidence", **hatched)
    above.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1.2, label="perfect calibration")
    above.set_ylim(0, 1.02)
    above.set_ylabel("share that is right", color=INK)
    legend(above)
    heading(below, "Predictions of each confidence")
    below.bar(centres, counts / max(len(confidences), 1), width, color=GREY)
    below.set_xlabel("confidence", color=INK)
    below.set_ylabel("share of all", color=INK)
    for axes in (above, below):
        style(axes)
        axes.set_xlim(0, 1)
    save(figure, path)


def draw_predictions(
    path: Path | str, predicted_NC: NDArray, measured_NC: NDArray, names: Sequence[str], most_columns: int = 9
) -> None:
    """Draw predicted numbers against measured ones, a panel for each of the first columns.

    Args:
        path: the PNG.
        predicted_NC: (N, C).
        measured_NC: (N, C) with NaN where not measured.
        names: C names.
        most_columns: panels at most.
    """
    num_panels = min(len(names), most_columns)
    across = min(num_panels, 3)
    down = -(-num_panels // across)
    title = "Predicted against measured"
    if num_panels < len(names):
        title += f": the first {num_panels} of {len(names)} columns"
    figure = new_figure(1.2 + 4.2 * across, 0.8 + 4.0 * down, title)
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for index, axes in enumerate(panels):
        if index < num_panels:
            _draw_column(axes, predicted_NC[:, index], measured_NC[:, index], _legible(names[index]))
        else:
            axes.set_visible(False)
    save(figure, path)


def ranking_curves(
    probabilities_NC: NDArray, targets: NDArray, names: Sequence[str]
) -> tuple[list[Curve], list[Curve]]:
    """ROC and precision curves of the classes that have positives and negatives; see :func:`draw_roc_pr`."""
    of_labels = targets.ndim == 2
    rocs: list[Curve] = []
    precisions: list[Curve] = []
    for index in range(1 if not of_labels and len(names) == 2 else 0, len(names)):
        target = targets[:, index] if of_labels else targets
        known = np.isfinite(target) if of_labels else target != IGNORED_TARGET
        positive = (target == 1 if of_labels else target == index)[known]
        if not positive.any() or positive.all():
            continue
        scores = probabilities_NC[known, index]
        false_rate, recall, _ = roc_curve(positive, scores)
        rocs.append(Curve(names[index], false_rate, recall, float(roc_auc_score(positive, scores))))
        precision, recall, _ = precision_recall_curve(positive, scores, drop_intermediate=True)
        precision[-1] = precision[-2]  # scikit-learn ends in (0, 1), which no threshold gives
        area = float(average_precision_score(positive, scores))
        precisions.append(Curve(names[index], recall[::-1], precision[::-1], area))
    return rocs, precisions


def _draw_curves(axes: Axes, curves: Sequence[Curve], on_grid: Sequence[NDArray], drawstyle: str) -> None:
    """Draw each curve, and their mean on the grid."""
    for curve, look in _looks(curves):
        shown = np.linspace(0, len(curve.x) - 1, min(len(curve.x), _MOST_POINTS)).astype(np.int64)
        axes.plot(curve.x[shown], curve.y[shown], drawstyle=drawstyle, **look)
    if len(curves) > 1:
        label = f"{np.mean([curve.area for curve in curves]):.3f}  mean over classes"
        axes.plot(_CURVES_GRID, np.mean(on_grid, axis=0), color=INK, linewidth=2.4, label=label)


def _looks(curves: Sequence[Curve]) -> Iterable[tuple[Curve, dict[str, Any]]]:
    """Each curve with its colour and label; of many, only the best and the worst stand out."""
    labels = [f"{curve.area:.3f}  {_legible(curve.name)}" for curve in curves]
    if len(curves) <= _COLOURED_CURVES:
        for curve, color, label in zip(curves, _COLOURS, labels, strict=False):
            yield curve, {"color": color, "linewidth": 1.4, "label": label}
        return
    order = np.argsort([-curve.area for curve in curves], kind="stable").tolist()
    best, rest, worst = order[:_NAMED_CURVES], order[_NAMED_CURVES:-_NAMED_CURVES], order[-_NAMED_CURVES:]
    for index in rest:
        yield curves[index], {"color": GREY, "linewidth": 0.7, "alpha": 0.45}
    for index, color in zip(best + worst, (GREEN, BLUE, "#4ab4c4", "#d9a441", ORANGE, RED), strict=True):
        yield curves[index], {"color": color, "linewidth": 1.2, "label": labels[index]}


def _most_confused(counts_CC: NDArray[np.integer]) -> NDArray[np.int64]:
    """Classes to show, in their order."""
    if len(counts_CC) <= _MOST_CLASSES:
        return np.arange(len(counts_CC))
    wrong_CC = counts_CC - np.diag(np.diag(counts_CC))
    order = np.argsort(-(wrong_CC.sum(axis=0) + wrong_CC.sum(axis=1)), kind="stable")
    return np.sort(order[:_MOST_CLASSES])


def _confusion_colours(shares_CC: NDArray[np.float64]) -> NDArray[np.float64]:
    """(C, C, 3): by square root, so that one record in a hundred still shows."""
    depth = np.sqrt(shares_CC)[..., None]
    right = np.eye(len(shares_CC), dtype=bool)[..., None]
    return 1 - depth * (1 - np.where(right, to_rgb(BLUE), to_rgb(RED)))


def _write_counts(axes: Axes, counts_CC: NDArray[np.integer], shares_CC: NDArray[np.float64]) -> None:
    for row, column in np.argwhere(counts_CC > 0):
        color = "white" if shares_CC[row, column] > 0.4 else INK
        text = f"{counts_CC[row, column]:,}"
        axes.text(column, row, text, ha="center", va="center", fontsize=8 if len(text) < 5 else 6, color=color)


def _draw_column(axes: Axes, predicted_N: NDArray, measured_N: NDArray, name: str) -> None:
    known = np.isfinite(measured_N)
    x, y = measured_N[known], predicted_N[known]
    heading(axes, f"{name} ({len(x):,} records)")
    style(axes)
    axes.set_xlabel("measured", color=INK)
    axes.set_ylabel("predicted", color=INK)
    if not len(x):
        return
    if len(x) > _MOST_POINTS:
        axes.hexbin(x, y, gridsize=60, bins="log", cmap="Blues", mincnt=1, linewidths=0)
    else:
        axes.scatter(x, y, s=9, color=BLUE, alpha=0.5, linewidths=0)
    ends = min(x.min(), y.min()), max(x.max(), y.max())
    axes.plot(ends, ends, color=GREY, linestyle=":", linewidth=1.2)
    axes.margins(0.03)


def _confidences(probabilities_NC: NDArray, targets: NDArray) -> tuple[NDArray, NDArray]:
    if targets.ndim == 2:
        known = np.isfinite(targets)
        return probabilities_NC[known], targets[known] == 1
    known = targets != IGNORED_TARGET
    return probabilities_NC[known].max(axis=1), probabilities_NC[known].argmax(axis=1) == targets[known]


def _legible(name: str) -> str:
    """Not too long, on one line, and with no sign that Matplotlib reads as mathematics."""
    name = " ".join(name.split())
    short = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
    return short.replace("$", r"\$")
