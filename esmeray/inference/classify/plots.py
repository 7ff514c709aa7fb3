"""Plots of a classifier's confusions, ranking and calibration, and of predicted numbers, with scikit-learn's displays.

Each is one PNG. Shape legend: N records or residues, C classes, labels or columns.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import PowerNorm
from numpy.typing import NDArray
from sklearn.calibration import CalibrationDisplay
from sklearn.metrics import ConfusionMatrixDisplay, PrecisionRecallDisplay, PredictionErrorDisplay, RocCurveDisplay

from esmeray.common.figure_style import BLUE, GREEN, GREY, INK, ORANGE, RED, legend, picture, style
from esmeray.dataset.targets import IGNORED_TARGET
from esmeray.model.metrics.weighted import CALIBRATION_BINS

MAX_CLASSES = 100
"""Maximum number of classes of a legible confusion matrix."""
_NUMBERED_CLASSES = 20
"""Maximum classes of a confusion matrix with numbers in its cells."""
_MAX_COLUMNS = 9
_MAX_POINTS = 2000
_MAX_NAME_LENGTH = 36
_COLOURS = (BLUE, ORANGE, GREEN, RED, "#7b5aa6", "#8c564b", "#d6539b", "#4ab4c4")


def draw_confusion(path: Path | str, counts_CC: NDArray[np.integer], names: Sequence[str]) -> None:
    """Draw a (C, C) confusion matrix of counts: true classes as rows, predicted classes as columns."""
    total, right = int(counts_CC.sum()), int(np.trace(counts_CC))
    title = f"{right:,} of {total:,} correct ({right / max(total, 1):.1%})"
    shares_CC = counts_CC / np.maximum(counts_CC.sum(axis=1, keepdims=True), 1)
    labels = list(map(_legible, names))
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
    """Draw the ROC and precision-recall curves of the most frequent classes, one colour each.

    Targets are (N,) classes, with IGNORED_TARGET if missing, or (N, C) of 0 and 1, with NaN if unknown. If there are
    two classes, the second is drawn.
    """
    first = 0
    if targets.ndim == 1:
        known_N = targets != IGNORED_TARGET
        probabilities_NC = probabilities_NC[known_N]
        targets = np.equal.outer(targets[known_N], np.arange(len(names)))
        first = int(len(names) == 2)  # with two classes, the second is the positive one by convention
    frequent = first + np.argsort(-(targets[:, first:] == 1).sum(axis=0), kind="stable")
    with picture(path, 12, 5.8, "One-vs-rest curves") as figure:
        roc, precision = figure.subplots(1, 2)
        for index, colour in zip(frequent.tolist(), _COLOURS, strict=False):
            known_N = np.isfinite(targets[:, index])
            is_class, scores = targets[known_N, index] == 1, probabilities_NC[known_N, index]
            if is_class.any() and not is_class.all():  # otherwise neither curve is defined
                look = {"name": _legible(names[index]), "curve_kwargs": {"color": colour}}
                RocCurveDisplay.from_predictions(is_class, scores, ax=roc, **look)
                PrecisionRecallDisplay.from_predictions(is_class, scores, ax=precision, **look)
        roc.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1.2, label="chance (AUC = 0.50)")
        for axes, title, x, y in (
            (roc, "ROC curve", "false positive rate", "recall"),
            (precision, "Precision-recall curve", "recall", "precision"),
        ):
            style(axes, title)
            axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.02), xlabel=x, ylabel=y, aspect="auto")
            legend(axes, over_curves=True)


def draw_reliability(
    path: Path | str, probabilities_NC: NDArray, targets: NDArray, calibrated_NC: NDArray | None = None
) -> None:
    """Draw the observed accuracy against the confidence (Guo et al. 2017).

    Targets are as in :func:`draw_roc_pr`. For (N,) classes the likeliest class counts, for (N, C) each label counts.
    """
    curves = {"observed": (probabilities_NC, BLUE)}
    if calibrated_NC is not None:
        curves = {"model": (probabilities_NC, BLUE), "calibrated": (calibrated_NC, ORANGE)}
    known = targets != IGNORED_TARGET if targets.ndim == 1 else np.isfinite(targets)
    with picture(path, 6.4, 5.4, "Calibration") as figure:
        axes = figure.subplots()
        for name, (predicted_NC, colour) in curves.items():
            confidences, outcomes = predicted_NC[known], targets[known]
            if targets.ndim == 1:
                confidences, outcomes = confidences.max(axis=1), confidences.argmax(axis=1) == outcomes
            if len(confidences):  # scikit-learn rejects empty input
                # The metric's bins, so that the plot agrees with the reported calibration error.
                CalibrationDisplay.from_predictions(
                    outcomes, confidences, n_bins=CALIBRATION_BINS, pos_label=True, ax=axes, name=name, color=colour
                )
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="confidence", ylabel="fraction correct")
        legend(axes)
        style(axes)


def draw_predictions(path: Path | str, predicted_NC: NDArray, measured_NC: NDArray, names: Sequence[str]) -> None:
    """Draw measured (NaN if missing) against predicted numbers, one panel for each of the first columns."""
    shown = names[:_MAX_COLUMNS]
    across = min(len(shown), 3)
    down = -(-len(shown) // across)
    with picture(path, 1.2 + 4.2 * across, 0.8 + 4.0 * down, "Measured vs. predicted") as figure:
        panels = figure.subplots(down, across, squeeze=False).ravel()
        for axes, name, predicted_N, measured_N in zip(panels, shown, predicted_NC.T, measured_NC.T, strict=False):
            known_N = np.isfinite(measured_N)
            if known_N.any():
                PredictionErrorDisplay.from_predictions(
                    measured_N[known_N],
                    predicted_N[known_N],
                    kind="actual_vs_predicted",
                    subsample=min(_MAX_POINTS, int(known_N.sum())),  # more points overlap, and are slow to draw
                    random_state=0,
                    ax=axes,
                    scatter_kwargs={"s": 9, "color": BLUE, "alpha": 0.5, "linewidths": 0},
                    line_kwargs={"color": GREY, "linestyle": ":"},
                )
                axes.set_aspect("auto")  # with the display's equal aspect, outliers would make a panel a line
            axes.set(xlabel="predicted", ylabel="measured")
            style(axes, f"{_legible(name)} ({known_N.sum():,} records)")
        for axes in panels[len(shown) :]:
            axes.set_visible(False)


def _legible(name: str) -> str:
    """Shorten a name to one line and escape Matplotlib's math."""
    name = " ".join(name.split())
    short = name if len(name) <= _MAX_NAME_LENGTH else name[: _MAX_NAME_LENGTH - 1] + "…"
    return short.replace("$", r"\$")
