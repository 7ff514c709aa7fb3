"""``growth.png`` and ``growth.json``: one panel for each thing that grows, on log axes.

In: the results. Out: bytes of both files, of the cases of the stage ``growth``. A whisker reaches from the smallest to
the largest sample; a dashed line through the last point shows what proportional growth would be.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.growth import BY_BUDGET, BY_LENGTH, BY_PROCESSES, BY_SIZE, CONVERTING, OPENING, OWN, PLANNING, RESIDENT
from benchmarks.results import CaseResult, Results

_COLOURS = ("#7a8793", "#2a6fbb", "#e08214")
_SHORT = EngFormatter(sep="")
_WRITTEN_OUT = 200_000
"""Below this places are written out: 1,024 is no 1.024k."""

_SUFFIXES = {"": 1.0, "M": 1e6, "B": 1e9}


class Panel(NamedTuple):
    """One picture of curves.

    Attributes:
        title: above it.
        x: what grows.
        curves: names of cases by their label.
        proportional: whether y growing like x is what one expects, which a dashed line shows.
        log: whether the axes are logarithmic.
    """

    title: str
    x: str
    curves: dict[str, str]
    proportional: bool = False
    log: bool = True


PANELS = (
    Panel("Forward, ESM-2 8M", "tokens of each sequence", {p: f"{BY_LENGTH}, {p}" for p in ("fp32", "bf16")}),
    Panel("Forward, ESM-2 8M", "token budget of a batch", {p: f"{BY_BUDGET}, {p}" for p in ("fp32", "bf16")}),
    Panel("Forward", "parameters of the model", {p: f"{BY_SIZE}, {p}" for p in ("fp32", "bf16")}),
    Panel("Loading", "loader processes", {"masked LM": BY_PROCESSES}, log=False),
    Panel(
        "Peak memory, libraries left out",
        "records of the store",
        {"training: resident, with the store's pages": RESIDENT, "training: its own": OWN, "converting": CONVERTING},
    ),
    Panel(
        "Time until the first batch",
        "records of the store",
        {"planning an epoch": PLANNING, "opening, from the page cache": OPENING},
        proportional=True,
    ),
)


class Point(NamedTuple):
    """A contender of a case as a point of its curve, in the case's unit."""

    x: float
    median: float
    low: float
    high: float


def points_of(case: CaseResult) -> list[Point]:
    """The curve of a case."""
    return [Point(number_of(c.name), c.median, min(c.samples), max(c.samples)) for c in case.contenders]


def number_of(name: str) -> float:
    """What a contender's name starts with: ``10,000 records`` gives 10,000, ``35M parameters`` 35 million."""
    found = re.match(r"([\d,.]+)([MB]?)\b", name)
    if found is None:
        raise ValueError(f"{name!r} starts with no number")
    return float(found[1].replace(",", "")) * _SUFFIXES[found[2]]


def points_json(results: Results) -> bytes:
    """The curves as plain values, with what they were measured on."""
    curves = {
        case.case: {
            "unit": case.unit,
            "points": [point._asdict() for point in points_of(case)],
            "facts": case.facts,
            "date": case.date,
            "revision": case.revision,
        }
        for case in _cases(results).values()
    }
    return (json.dumps({"machine": results.machine.model_dump(), "curves": curves}, indent=1) + "\n").encode()


def png(results: Results) -> bytes:
    """All panels; those of cases that were not measured stay empty."""
    cases = _cases(results)
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(13, 7.4), layout="constrained")
        smoke = " (smoke run: means nothing)" if results.smoke else ""
        title = f"{results.machine.slug}: how cost grows{smoke}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold")
        for axes, panel in zip(figure.subplots(2, 3).ravel(), PANELS, strict=True):
            curves = {label: cases[name] for label, name in panel.curves.items() if name in cases}
            _draw(axes, panel, curves)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _cases(results: Results) -> dict[str, CaseResult]:
    return {case.case: case for case in results.cases if case.stage == "growth"}


def _draw(axes: Axes, panel: Panel, curves: dict[str, CaseResult]) -> None:
    unit = next((case.unit for case in curves.values()), "")
    axes.set_title(f"{panel.title} ({unit})" if unit else panel.title, loc="left", fontsize=10)
    axes.set_xlabel(panel.x)
    axes.grid(color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    drawn = {label: points_of(case) for label, case in curves.items()}
    for number, (label, points) in enumerate(drawn.items()):
        _curve(axes, points, label, _COLOURS[number] if len(drawn) > 1 else _COLOURS[1])
    if panel.proportional and drawn:
        _proportional(axes, next(iter(drawn.values())))
    _scale(axes, panel.log, [point for points in drawn.values() for point in points])
    if len(drawn) > 1 or (drawn and panel.proportional):
        axes.legend(frameon=False, fontsize=8)


def _curve(axes: Axes, points: Sequence[Point], label: str, colour: str) -> None:
    error = [[point.median - point.low for point in points], [point.high - point.median for point in points]]
    axes.errorbar(
        [point.x for point in points],
        [point.median for point in points],
        yerr=error,
        label=label,
        color=colour,
        marker="o",
        markersize=4,
        capsize=3,
        linewidth=1.6,
    )


def _proportional(axes: Axes, points: Sequence[Point]) -> None:
    last = points[-1]
    ends = [points[0].x, last.x]
    label = "proportional"
    axes.plot(ends, [last.median * x / last.x for x in ends], "--", color="#999999", linewidth=1, label=label)


def _scale(axes: Axes, log: bool, points: Sequence[Point]) -> None:
    places = sorted({point.x for point in points})
    if log and points:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        low, high = min(point.low for point in points), max(point.high for point in points)
        axes.set_ylim(low / 1.6, high * 1.6)
    else:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(_place))
    axes.yaxis.set_major_formatter(_SHORT)


def _place(value: float, _: int | None = None) -> str:
    return f"{value:,.0f}" if value < _WRITTEN_OUT else _SHORT(value)
