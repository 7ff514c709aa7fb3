"""Plots of a classifier's confusions, ranking and calibration, and of predicted numbers, with scikit-learn's displays.

Each is one PNG, legible with a hundred classes. Shape legend: N records or residues, C classes, labels or columns.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from numpy.typing import NDArray
from sklearn.calibration import CalibrationDisplay
from sklearn.metrics import (
    ConfusionMatrixDisplay,
    PrecisionRecallDisplay,
    PredictionErrorDisplay,
    RocCurveDisplay,
    average_precision_score,
    precision_recall_curve,
    roc_auc_score,
    roc_curve,
)

from esmeray.common.figure_style import BLUE, GREEN, GREY, INK, ORANGE, RED, legend, picture, style
from esmeray.common.text import counted
from esmeray.dataset.targets import IGNORED_TARGET
from esmeray.model.metrics.weighted import CALIBRATION_BINS

_MAX_CLASSES = 100
"""Maximum classes in a confusion matrix. Beyond it only the most confused classes are shown."""
_NUMBERED_CLASSES = 20
"""Maximum classes of a confusion matrix with numbers in its cells."""
_MAX_COLUMNS = 9
_MAX_POINTS = 2000
_MAX_NAME_LENGTH = 36
_COLOURS = (BLUE, ORANGE, GREEN, RED, "#7b5aa6", "#8c564b", "#d6539b", "#4ab4c4")

Displays = list[tuple[float, RocCurveDisplay | PrecisionRecallDisplay]]
"""Curves of classes, each with its area under the curve."""


def draw_confusion(path: Path | str, counts_CC: NDArray[np.integer], names: Sequence[str]) -> None:
    """Draw a (C, C) confusion matrix of counts: true classes as rows, predicted classes as columns."""
    total, right = int(counts_CC.sum()), int(np.trace(counts_CC))
    title = f"{right:,} of {total:,} correct ({right / max(total, 1):.1%})"
    wrong_CC = counts_CC - np.diag(np.diag(counts_CC))
    order = np.argsort(-(wrong_CC.sum(axis=0) + wrong_CC.sum(axis=1)), kind="stable")
    shown_C = np.sort(order[:_MAX_CLASSES])  # restore the label space's order, which a reader expects
    if len(shown_C) < len(names):
        title += f"; the {len(shown_C)} most confused of {len(names)} classes"
    # Shares of the whole row, before classes are left out, so that shown shares need not add up to 1.
    shares_CC = counts_CC / np.maximum(counts_CC.sum(axis=1, keepdims=True), 1)
    counts_CC, shares_CC = counts_CC[np.ix_(shown_C, shown_C)], shares_CC[np.ix_(shown_C, shown_C)]
    labels = [_legible(names[index]) for index in shown_C]

    is_numbered = len(labels) <= _NUMBERED_CLASSES
    cell_inches, font = (0.5, 9) if is_numbered else (0.18, 7)
    # Margins for the longest name, because Matplotlib clips text outside of the figure.
    margin = 1.2 + font / 72 * 0.55 * max(map(len, labels), default=0)
    side = max(len(labels) * cell_inches + margin, 5.0)
    with picture(path, side, side, title) as figure:
        axes = figure.subplots()
        display = ConfusionMatrixDisplay(shares_CC, display_labels=labels)
        display.plot(
            ax=axes,
            include_values=is_numbered,
            xticks_rotation="vertical",
            text_kw={"fontsize": 7} if is_numbered else None,
            cmap="Blues",
            colorbar=False,
            im_kw={"norm": PowerNorm(0.5, 0, 1)},  # square-root scale, so that 1 % is visible
        )
        if is_numbered:  # the colour is the share of the row, the number is the count
            for cell, text in np.ndenumerate(display.text_):
                text.set_text(f"{counts_CC[cell]:,}" if counts_CC[cell] else "")
        axes.tick_params(colors=INK, labelsize=font)
        axes.set_xlabel("predicted\n(darker: larger share of its row)", color=INK)
        axes.set_ylabel("true class", color=INK)


def draw_roc_pr(path: Path | str, probabilities_NC: NDArray, targets: NDArray, names: Sequence[str]) -> None:
    """Draw the ROC and precision-recall curves of each class.

    Targets are (N,) classes, with IGNORED_TARGET if missing, or (N, C) of 0 and 1, with NaN if unknown. If there are
    two classes, the second is drawn.
    """
    rocs, precisions = _ranking_curves(probabilities_NC, targets, names)
    with picture(path, 12, 5.8, f"One-vs-rest curves of {counted(len(rocs), 'class{es}')}") as figure:
        roc, precision = figure.subplots(1, 2)
        _draw_curves(roc, rocs, "ROC curve", "false positive rate", "recall")
        roc.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1.2, label="0.500  chance")
        _draw_curves(precision, precisions, "Precision-recall curve", "recall", "precision")
        for axes in (roc, precision):
            legend(axes, over_curves=True)


def draw_reliability(path: Path | str, probabilities_NC: NDArray, targets: NDArray) -> None:
    """Draw the observed accuracy against the confidence, and the distribution of confidences (Guo et al. 2017).

    Targets are as in :func:`draw_roc_pr`. For (N,) classes the likeliest class counts, for (N, C) each label counts.
    """
    confidences, outcomes = _confidences(probabilities_NC, targets)
    with picture(path, 6.4, 7.2, "Calibration") as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        if len(confidences):  # scikit-learn rejects empty input
            # The metric's bins, so that the plot agrees with the reported calibration error.
            CalibrationDisplay.from_predictions(
                outcomes, confidences, n_bins=CALIBRATION_BINS, pos_label=True, ax=above, name="observed", color=BLUE
            )
            below.hist(
                confidences,
                CALIBRATION_BINS,
                (0, 1),
                weights=np.full(len(confidences), 1 / len(confidences)),
                color=GREY,
                rwidth=0.94,
            )
        above.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="", ylabel="fraction correct")
        below.set(xlabel="confidence", ylabel="fraction of predictions")
        legend(above)
        style(above, "Calibration")
        style(below, "Predictions by confidence")


def draw_predictions(path: Path | str, predicted_NC: NDArray, measured_NC: NDArray, names: Sequence[str]) -> None:
    """Draw measured (NaN if missing) against predicted numbers, one panel for each of the first columns."""
    shown = names[:_MAX_COLUMNS]
    across = min(len(shown), 3)
    down = -(-len(shown) // across)
    title = "Measured vs. predicted"
    if len(shown) < len(names):
        title += f": the first {len(shown)} of {len(names)} columns"
    with picture(path, 1.2 + 4.2 * across, 0.8 + 4.0 * down, title) as figure:
        panels = figure.subplots(down, across, squeeze=False).ravel()
        for axes, name, predicted_N, measured_N in zip(panels, shown, predicted_NC.T, measured_NC.T, strict=False):
            known_N = np.isfinite(measured_N)
            records = int(known_N.sum())
            sampled = f", {_MAX_POINTS:,} sampled" if records > _MAX_POINTS else ""
            if records:
                PredictionErrorDisplay.from_predictions(
                    measured_N[known_N],
                    predicted_N[known_N],
                    kind="actual_vs_predicted",
                    subsample=min(_MAX_POINTS, records),  # more points overlap, and are slow to draw
                    random_state=0,
                    ax=axes,
                    scatter_kwargs={"s": 9, "color": BLUE, "alpha": 0.5, "linewidths": 0},
                    line_kwargs={"color": GREY, "linestyle": ":"},
                )
                axes.set_aspect("auto")  # with the display's equal aspect, outliers would make a panel a line
            axes.set(xlabel="predicted", ylabel="measured")
            style(axes, f"{_legible(name)} ({records:,} records{sampled})")
        for axes in panels[len(shown) :]:
            axes.set_visible(False)


def _ranking_curves(probabilities_NC: NDArray, targets: NDArray, names: Sequence[str]) -> tuple[Displays, Displays]:
    """ROC and precision-recall curves of classes with positives and negatives; see :func:`draw_roc_pr`."""
    are_labels = targets.ndim == 2
    rocs: Displays = []
    precisions: Displays = []
    # With two classes, the second is the positive one by convention.
    for index in range(1 if not are_labels and len(names) == 2 else 0, len(names)):
        target = targets[:, index] if are_labels else targets
        known = np.isfinite(target) if are_labels else target != IGNORED_TARGET
        positive = (target == 1 if are_labels else target == index)[known]
        if not positive.any() or positive.all():  # neither curve is defined
            continue
        name = _legible(names[index])
        scores = probabilities_NC[known, index]
        false_rate, recall, _ = roc_curve(positive, scores)
        # Curves are sorted and labelled by their area.
        rocs.append((roc_auc_score(positive, scores), RocCurveDisplay(fpr=false_rate, tpr=recall, name=name)))
        precision, recall, _ = precision_recall_curve(positive, scores, drop_intermediate=True)
        precisions.append(
            (average_precision_score(positive, scores), PrecisionRecallDisplay(precision, recall, name=name))
        )
    return rocs, precisions


def _draw_curves(axes: Axes, curves: Displays, title: str, x: str, y: str) -> None:
    """Draw the curves. With many curves only the best and the worst have a colour and a name."""
    ordered = sorted(curves, key=lambda curve: -curve[0])
    half = len(_COLOURS) // 2
    named = ordered if len(ordered) <= len(_COLOURS) else ordered[:half] + ordered[-half:]
    colours = {id(display): colour for (_, display), colour in zip(named, _COLOURS, strict=False)}
    for area, display in ordered:
        # A label that begins with "_" is left out of the legend.
        look = (
            {"color": colours[id(display)], "linewidth": 1.4, "label": f"{area:.3f}  {display.name}"}
            if id(display) in colours
            else {"color": GREY, "linewidth": 0.7, "alpha": 0.45, "zorder": 1.5, "label": "_"}
        )
        display.plot(axes, curve_kwargs=look)
    style(axes, title)
    axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.02), xlabel=x, ylabel=y, aspect="auto")


def _confidences(probabilities_NC: NDArray, targets: NDArray) -> tuple[NDArray, NDArray]:
    if targets.ndim == 2:
        known = np.isfinite(targets)
        return probabilities_NC[known], targets[known] == 1
    known = targets != IGNORED_TARGET
    return probabilities_NC[known].max(axis=1), probabilities_NC[known].argmax(axis=1) == targets[known]


def _legible(name: str) -> str:
    """Shorten a name to one line and escape Matplotlib's math."""
    name = " ".join(name.split())
    short = name if len(name) <= _MAX_NAME_LENGTH else name[: _MAX_NAME_LENGTH - 1] + "…"
    return short.replace("$", r"\$")
