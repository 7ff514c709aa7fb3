"""``results.png``: one bar for each comparison on a log axis, with its floor and the spread of its rounds.

In: the results. Out: a PNG.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.harness.results import CaseResult, ComparisonResult, Results
from benchmarks.harness.table import ratio_text
from common.figure_style import INK, new_figure, save

_INCHES_PER_BAR = 0.42
_COLOURS = {"reached": "#2a7f62", "missed": "#c8553d", "no floor": "#7a8793"}


def draw_results(results: Results, path: Path) -> None:
    """Draw the picture; an empty one where nothing was compared."""
    rows = [(case, comparison) for case in results.cases for comparison in case.comparisons]
    smoke = " (smoke run: means nothing)" if results.smoke else ""
    title = f"{results.machine.slug}: how many times better than the peer{smoke}"
    figure = new_figure(10, 1.7 + _INCHES_PER_BAR * max(len(rows), 1), title)
    axes = figure.add_subplot()
    if rows:
        _draw(axes, rows)
        figure.legend(handles=_legend(), loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


def _draw(axes: Axes, rows: list[tuple[CaseResult, ComparisonResult]]) -> None:
    places = _places(rows)
    smallest = min(min(c.low, c.floor or c.low) for _, c in rows)
    largest = max(max(c.high, c.floor or c.high) for _, c in rows)
    left, right = min(smallest * 0.6, 0.5), largest * 1.5
    for place, (_, comparison) in zip(places, rows, strict=True):
        _bar(axes, place, comparison, left)
    axes.set_xscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(max(places) + 0.6, min(places) - 0.6)
    axes.set_yticks(places, [_label(case, comparison) for case, comparison in rows])
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.axvline(1, color="#aaaaaa", linewidth=0.8, zorder=0)
    axes.xaxis.set_major_locator(LogLocator(base=10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("ratio, ours to peer (log scale); bar: median of the rounds; whisker: its interval")


def _places(rows: list[tuple[CaseResult, ComparisonResult]]) -> list[float]:
    """Where each bar stands, with a gap between stages."""
    places, place = [], 0.0
    for number, (case, _) in enumerate(rows):
        if number:
            place += 1.0 if rows[number - 1][0].stage == case.stage else 1.4
        places.append(place)
    return places


def _bar(axes: Axes, place: float, comparison: ComparisonResult, left: float) -> None:
    colour = _COLOURS[comparison.verdict.partition(",")[0]]
    axes.barh(place, comparison.ratio - left, left=left, height=0.62, color=colour, alpha=0.9)
    error = [[comparison.ratio - comparison.low], [comparison.high - comparison.ratio]]
    axes.errorbar(comparison.ratio, place, xerr=error, color="#333333", capsize=3, linewidth=1, fmt="none")
    if comparison.floor is not None:
        axes.plot([comparison.floor] * 2, [place - 0.4, place + 0.4], color=INK, linewidth=2.2)
    floor = "" if comparison.floor is None else f"  (floor {ratio_text(comparison.floor)})"
    text = f"{ratio_text(comparison.ratio)}×{floor}"
    axes.annotate(text, (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=9)


def _label(case: CaseResult, comparison: ComparisonResult) -> str:
    return f"{case.stage}: {comparison.title}\nbeside {comparison.peer}"


def _legend() -> list[Patch | Line2D]:
    return [
        Patch(color=_COLOURS["reached"], label="floor reached"),
        Patch(color=_COLOURS["missed"], label="floor missed"),
        Patch(color=_COLOURS["no floor"], label="no floor set"),
        Line2D([0], [0], color=INK, linewidth=2.2, label="floor"),
    ]
