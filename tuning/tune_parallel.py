"""Parallel coordinates of a throughput search: a line for each trial, from its settings to its speed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import EngFormatter, MaxNLocator, NullLocator

from common.figure_style import BLUE, GREY, INK, MAGENTA, heading
from tuning.tune_trials import NAMES, Search, Trial, Value, speed, value_text, values_of, varied

_SPEED = EngFormatter(sep="")
_SPEEDS = LinearSegmentedColormap.from_list("speeds", ["#cfd8e3", "#86b3de", BLUE, "#123a70"])
_SPREAD = 0.22
"""How far trials of the same value are set apart, of the distance between two values of a column."""


def draw_parallel(axes: Axes, search: Search) -> None:
    """A line for each trial through the values of its settings to its speed; the best stands out."""
    heading(axes, "Each line a trial, from its settings to its speed: the stronger, the faster; dotted where it failed")
    names = varied(search.trials, search.space)
    places = {name: values_of(name, search.trials, search.space) for name in names}
    top = _round_top(max(map(speed, search.trials), default=0.0))
    scale = Normalize(0.0, top)
    best = search.best
    tried = [trial for trial in search.trials if not trial.is_ruled_out]
    for trial in sorted(tried, key=lambda trial: (trial is best, speed(trial))):
        heights = [_height(places[name], trial.settings.get(name), trial.number) for name in names]
        axes.add_patch(_through([*heights, speed(trial) / top], trial, best, _SPEEDS(scale(speed(trial)))))
    for column, name in enumerate(names):
        _value_axis(axes, column, [value_text(name, value) for value in places[name]])
    _speed_axis(axes, len(names), top)
    axes.set_xlim(-0.35, len(names) + 0.45)
    axes.set_ylim(-0.06, 1.08)
    axes.set_xticks(range(len(names) + 1), [*(NAMES[name] for name in names), "tokens/s"], fontsize=10, color=INK)
    axes.tick_params(length=0)
    axes.yaxis.set_major_locator(NullLocator())
    axes.spines[:].set_visible(False)


def _height(values: Sequence[Value], value: Value, number: int) -> float:
    """Where a line crosses the axis of a setting, 0 to 1, a little to a side by the trial's number."""
    if value not in values:
        return 0.5
    step = 1.0 / len(values)
    return step * (values.index(value) + 0.5 + _fraction(number) * 2 * _SPREAD)


def _through(heights: Sequence[float], trial: Trial, best: Trial | None, colour: tuple) -> PathPatch:
    """A smooth line through these heights at 0, 1, 2 ..."""
    points, codes = [(0.0, heights[0])], [Outline.MOVETO]
    for column, (left, right) in enumerate(pairwise(heights)):
        points += [(column + 0.45, left), (column + 0.55, right), (column + 1.0, right)]
        codes += [Outline.CURVE4] * 3
    is_best = best is not None and trial.number == best.number
    failed = trial.tokens_per_s is None
    return PathPatch(
        Outline(points, codes),
        fill=False,
        edgecolor=MAGENTA if is_best else GREY if failed else colour,
        linewidth=3.0 if is_best else 1.3,
        alpha=1.0 if is_best else 0.4 if failed else 0.75,
        linestyle=":" if failed else "-",
        clip_on=False,
    )


def _value_axis(axes: Axes, column: int, labels: Sequence[str]) -> None:
    axes.add_line(Line2D([column] * 2, [0, 1], color=INK, linewidth=1.0))
    for index, label in enumerate(labels):
        ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.0}
        # Left of the first column is nothing; of another are the lines that come to the value, so it stands above them.
        height = (index + 0.5 + (_SPREAD if column else 0.0)) / len(labels) + (0.015 if column else 0.0)
        place: dict[str, Any] = {"ha": "right", "va": "bottom" if column else "center"}
        axes.text(column - 0.03, height, label, **place, fontsize=9, color=INK, bbox=ground)


def _speed_axis(axes: Axes, column: int, top: float) -> None:
    axes.add_line(Line2D([column] * 2, [0, 1], color=INK, linewidth=1.0))
    for value in MaxNLocator(5).tick_values(0, top):
        height = value / top
        axes.text(column + 0.04, height, _SPEED(value), ha="left", va="center", fontsize=9, color=INK)


def _round_top(speed: float) -> float:
    """The next round figure above a speed."""
    return float(MaxNLocator(5).tick_values(0, speed or 1.0)[-1])


def _fraction(number: int) -> float:
    """-0.5 to 0.5, evenly spread over successive numbers."""
    return (number * 0.618034) % 1.0 - 0.5
