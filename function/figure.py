"""Picture of an evaluation: precision over recall of each aspect, with the best value marked.

In: evaluations by aspect. Out: a PNG.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from common.figure_style import BLUE, ORANGE, heading, legend, new_figure, save, style
from function.evaluation import Evaluation

KINDS = {"": ("all terms alike", BLUE), "_w": ("by information accretion", ORANGE)}


def draw_curves(evaluations: Mapping[str, Evaluation], path: Path) -> None:
    figure = new_figure(5 * len(evaluations), 4.6, "Precision and recall")
    for number, (name, evaluation) in enumerate(evaluations.items(), 1):
        axes = figure.add_subplot(1, len(evaluations), number)
        style(axes)
        heading(axes, f"{name.replace('_', ' ')}, {evaluation.proteins:,} proteins")
        for ending, (label, colour) in KINDS.items():
            if f"f{ending}" in evaluation.curves:
                recall_T, precision_T = evaluation.curves[f"rc{ending}"], evaluation.curves[f"pr{ending}"]
                best = int(np.argmax(evaluation.curves[f"f{ending}"]))
                value = evaluation.metrics[f"fmax{ending}"].value
                axes.plot(recall_T, precision_T, color=colour, label=f"{label}: Fmax {value:.3f}")
                axes.plot(recall_T[best], precision_T[best], "o", color=colour)
        axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1.02), ylim=(0, 1.02))
        legend(axes, over_curves=True)
    save(figure, path)
