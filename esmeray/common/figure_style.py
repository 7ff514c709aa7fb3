"""Style of the project's figures: colours, axes, legends, and atomic writing of a PNG."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from esmeray.common.publishing import atomic_file

BLUE, ORANGE, GREEN, RED = "#2a6fbb", "#e08214", "#1b9e77", "#c0392b"
MAGENTA, GREY = "#d62f6b", "#8a8f98"
INK = "#2b2f36"
GRID = "#e6e8eb"


@contextmanager
def picture(path: Path | str, width: float, height: float, title: str) -> Iterator[Figure]:
    """An empty figure, inches wide and high, with a heading; written as PNG when the block ends.

    The file is replaced only when the new one is complete; its folder is created if needed. pyplot's global
    state is not touched.
    """
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)  # without pyplot, which keeps every figure and may choose a backend that needs a display
    # Names of files and runs are shown as they are: two dollar signs are no formula.
    figure.suptitle(title, fontsize=14, fontweight="bold", color=INK, x=0.01, ha="left", parse_math=False)
    yield figure
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:  # users look at a run's curves while they are redrawn
        figure.savefig(temporary, format="png")


def heading(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, color=INK)


def style(axes: Axes, title: str = "") -> None:
    """Style axes with light horizontal grid lines, and add a heading if one is given."""
    if title:
        heading(axes, title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)


def style_steps(axes: Axes) -> None:
    """:func:`style` with integer ticks on the x axis."""
    style(axes)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def legend(axes: Axes, over_curves: bool = False) -> None:
    """Add a legend if anything has a label; over curves it gets a white background."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=over_curves, fontsize=9, labelcolor=INK).get_frame().set(
            facecolor="white", edgecolor="none", alpha=0.85
        )
