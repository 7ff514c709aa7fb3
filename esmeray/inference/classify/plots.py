"""Picture of a classifier's confusion matrix, with scikit-learn's display.

Shape legend: C classes.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import PowerNorm
from numpy.typing import NDArray
from sklearn.metrics import ConfusionMatrixDisplay

from esmeray.common.figure_style import INK, picture

MAX_CLASSES = 100
"""Maximum number of classes of a legible confusion matrix."""
_NUMBERED_CLASSES = 20
"""Maximum classes of a confusion matrix with numbers in its cells."""
_MAX_NAME_LENGTH = 36


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


def _legible(name: str) -> str:
    """Shorten a name to one line and escape Matplotlib's math."""
    name = " ".join(name.split())
    short = name if len(name) <= _MAX_NAME_LENGTH else name[: _MAX_NAME_LENGTH - 1] + "…"
    return short.replace("$", r"\$")
