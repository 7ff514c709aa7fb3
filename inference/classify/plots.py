"""Pictures of a classifier's confusions, ranking and calibration, and of predicted numbers.

In: probabilities, targets and names. Out: one PNG each, legible with a hundred classes.

Shape legend: N rows (records, or residues), C classes, labels or columns, P points of a curve.
"""

from __future__ import annotations

from collections.abc import Sequence
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
_MOST_COLUMNS = 9
_MOST_POINTS = 2000
_LONGEST_NAME = 36
_COLOURS = (BLUE, ORANGE, GREEN, RED, "#7b5aa6", "#8c564b", "#d6539b", "#4ab4c4")


class Curve(NamedTuple):
    """One class against the rest.

    x (P,) is its false positive rate, or recall, in rising order; y (P,) its recall, or its precision from the point
    before to this one; the area is its AUROC, or average precision.
    """

    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    area: float


def draw_confusion(path: Path | str, counts_CC: NDArray[np.integer], names: Sequence[str]) -> None:
    """Draw (C, C) numbers of rows of each true class (first axis) that were predicted as each class."""
    total, right = int(counts_CC.sum()), int(np.trace(counts_CC))
    title = f"{right:,} of {total:,} right ({right / max(total, 1):.1%})"
    shown_C = _most_confused(counts_CC)
    if len(shown_C) < len(names):
        title += f"; the {len(shown_C)} most confused of {len(names)} classes"
    shares_CC = counts_CC / np.maximum(counts_CC.sum(axis=1, keepdims=True), 1)
    counts_CC, shares_CC = counts_CC[np.ix_(shown_C, shown_C)], shares_CC[np.ix_(shown_C, shown_C)]
    labels = [_legible(names[index]) for index in shown_C]

    numbered = len(labels) <= _NUMBERED_CLASSES
    cell_inches, font = (0.5, 9) if numbered else (0.18, 7)
    margin = 1.2 + font / 72 * 0.55 * max(map(len, labels), default=0)
    side = max(len(labels) * cell_inches + margin, 5.0)
    figure = new_figure(side, side, title)
    axes = figure.subplots()
    # By square root, so that one record in a hundred still shows.
    colours = np.where(np.eye(len(labels), dtype=bool)[..., None], to_rgb(BLUE), to_rgb(RED))
    axes.imshow(1 - np.sqrt(shares_CC)[..., None] * (1 - colours), aspect="equal", interpolation="nearest")
    places = np.arange(len(labels))
    axes.set_xticks(places, labels, rotation=90)
    axes.set_yticks(places, labels)
    for lines in (axes.hlines, axes.vlines):  # a grid of minor ticks takes seconds with a hundred classes
        lines(places[1:] - 0.5, -0.5, len(labels) - 0.5, color=GRID, linewidth=0.6)
    axes.tick_params(colors=INK, labelsize=font)
    axes.spines[:].set_color(GREY)
    axes.set_xlabel("predicted\n(right in blue, wrong in red;\ndarker: larger share of its row)", color=INK)
    axes.set_ylabel("true class", color=INK)
    for row, column in np.argwhere(counts_CC > 0) if numbered else ():
        color = "white" if shares_CC[row, column] > 0.4 else INK
        axes.text(column, row, f"{counts_CC[row, column]:,}", ha="center", va="center", fontsize=7, color=color)
    save(figure, path)


def draw_roc_pr(path: Path | str, probabilities_NC: NDArray, targets: NDArray, names: Sequence[str]) -> None:
    """Draw recall against false positives, and precision against recall, of each class.

    Targets are (N,) classes with IGNORED_TARGET where there is none, or (N, C) of 0 and 1 with NaN where unknown. Of
    two classes, the second is drawn.
    """
    rocs, precisions = ranking_curves(probabilities_NC, targets, names)
    figure = new_figure(12, 5.8, f"Ranking of {counted(len(rocs), 'class{es}')} against the rest")
    roc, precision = figure.subplots(1, 2)
    _draw_curves(roc, rocs, "Recall against false positives (ROC)", "default")
    roc.set(xlabel="false positive rate", ylabel="recall")
    roc.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1.2, label="0.500  chance")
    _draw_curves(precision, precisions, "Precision against recall", "steps-pre")
    precision.set(xlabel="recall", ylabel="precision")
    for axes in (roc, precision):
        legend(axes, over_curves=True)
    save(figure, path)


def draw_reliability(path: Path | str, probabilities_NC: NDArray, targets: NDArray) -> None:
    """Draw the share that is right against the confidence, and how many have which confidence (Guo et al. 2017).

    Targets as of :func:`draw_roc_pr`; of (N,) classes the likeliest counts, of (N, C) labels each.
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
    above.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="share that is right")
    legend(above)
    heading(below, "Predictions of each confidence")
    below.bar(centres, counts / max(len(confidences), 1), width, color=GREY)
    below.set(xlabel="confidence", ylabel="share of all")
    style(above)
    style(below)
    save(figure, path)


def draw_predictions(path: Path | str, predicted_NC: NDArray, measured_NC: NDArray, names: Sequence[str]) -> None:
    """Draw predicted numbers against measured ones (NaN where not measured), a panel for each of the first columns."""
    shown = names[:_MOST_COLUMNS]
    across = min(len(shown), 3)
    down = -(-len(shown) // across)
    title = "Predicted against measured"
    if len(shown) < len(names):
        title += f": the first {len(shown)} of {len(names)} columns"
    figure = new_figure(1.2 + 4.2 * across, 0.8 + 4.0 * down, title)
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes, name, predicted_N, measured_N in zip(panels, shown, predicted_NC.T, measured_NC.T, strict=False):
        _draw_column(axes, predicted_N, measured_N, _legible(name))
    for axes in panels[len(shown) :]:
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


def _draw_curves(axes: Axes, curves: Sequence[Curve], title: str, drawstyle: Any) -> None:
    """Draw each curve; of many, only the best and the worst have a colour and a name."""
    ordered = sorted(curves, key=lambda curve: -curve.area)
    half = len(_COLOURS) // 2
    named = ordered if len(ordered) <= len(_COLOURS) else ordered[:half] + ordered[-half:]
    heading(axes, title)
    style(axes)
    axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.02))
    colours = {curve.name: color for curve, color in zip(named, _COLOURS, strict=False)}
    for curve in ordered:
        shown = np.linspace(0, len(curve.x) - 1, min(len(curve.x), _MOST_POINTS)).astype(np.int64)
        look: dict[str, Any] = {"color": GREY, "linewidth": 0.7, "alpha": 0.45, "zorder": 1.5}
        if curve.name in colours:
            label = f"{curve.area:.3f}  {_legible(curve.name)}"
            look = {"color": colours[curve.name], "linewidth": 1.4, "label": label}
        axes.plot(curve.x[shown], curve.y[shown], drawstyle=drawstyle, **look)


def _most_confused(counts_CC: NDArray[np.integer]) -> NDArray[np.int64]:
    """Classes to show, in their order."""
    wrong_CC = counts_CC - np.diag(np.diag(counts_CC))
    order = np.argsort(-(wrong_CC.sum(axis=0) + wrong_CC.sum(axis=1)), kind="stable")
    return np.sort(order[:_MOST_CLASSES])


def _draw_column(axes: Axes, predicted_N: NDArray, measured_N: NDArray, name: str) -> None:
    known = np.isfinite(measured_N)
    x, y = measured_N[known], predicted_N[known]
    heading(axes, f"{name} ({len(x):,} records)")
    style(axes)
    axes.set(xlabel="measured", ylabel="predicted")
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
