"""``results.png``: one bar for each comparison on a log axis, with its floor and the spread of its rounds."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.harness.results import ComparisonResult, Results
from benchmarks.harness.table import ratio_text
from esmeray.common.figure_style import GREEN, GREY, INK, RED, picture, style

_COLOURS = {"reached": GREEN, "missed": RED, "no floor": GREY}


def draw_results(results: Results, path: Path) -> None:
    """Draw the picture; an empty one where nothing was compared."""
    rows = [(case, comparison) for case in results.cases for comparison in case.comparisons]
    smoke = " (smoke run: means nothing)" if results.smoke else ""
    title = f"{results.machine.slug}: how many times better than the peer{smoke}"
    with picture(path, 10, 1.7 + 0.42 * len(rows), title) as figure:
        axes = figure.add_subplot()
        style(axes)
        axes.set_xscale("log")  # twice as fast and half as fast are as far from 1
        for row, (_, comparison) in enumerate(rows):
            _bar(axes, row, comparison)
        labels = [f"{case.stage}: {comparison.title}\nbeside {comparison.peer}" for case, comparison in rows]
        axes.set_yticks(range(len(rows)), labels)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.axvline(1, color=GREY, linewidth=0.8, zorder=0)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("ratio, ours to peer; whisker: its interval; black: floor; green: reached, red: missed")


def _bar(axes: Axes, row: int, comparison: ComparisonResult) -> None:
    colour = _COLOURS[comparison.verdict.partition(",")[0]]  # "within noise" is shown by the whisker
    error = [[comparison.ratio - comparison.low], [comparison.high - comparison.ratio]]
    axes.barh(row, comparison.ratio - 0.05, left=0.05, height=0.62, color=colour)
    axes.errorbar(comparison.ratio, row, xerr=error, color=INK, capsize=3, linewidth=1, fmt="none")
    if comparison.floor is not None:
        axes.plot([comparison.floor] * 2, [row - 0.4, row + 0.4], color=INK, linewidth=2.2)
    text = f"{ratio_text(comparison.ratio)}×"
    axes.annotate(text, (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=9)
