"""Pictures of a throughput search: what was tried, what it gave, where memory ends, and which setting matters.

In: a :class:`Search`, the trials with what is needed to read them. Out: panels as PNG bytes for the report, and one
picture of them all. Failed trials are in every picture that has a place for them: they were paid for, too.

Against the budget, trials are told apart by precision (colour) and checkpointing (broken line and another marker),
since these decide how speed and memory grow with it. What was stopped early is hollow, and no line goes through it.
"""

from __future__ import annotations

import io
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation

from common.figure_style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MAGENTA,
    ORANGE,
    RED,
    heading,
    legend,
    new_figure,
    save,
    style,
)
from tuning.tune_parallel import draw_parallel
from tuning.tune_trials import (
    NAMES,
    STATUSES,
    Search,
    Trial,
    Value,
    budget_setting,
    measured,
    memory_text,
    pareto,
    speed,
    value_text,
    values_of,
)

_SPEED = EngFormatter(sep="")
_COLOURS = {"bf16": BLUE, "none": ORANGE, "fp16": GREEN}
_FAILURES = {"out_of_memory": "^", "crash": "X", "timeout": "s", "nan": "P", "refused": "|"}
"""Markers of what ended a trial without a figure."""
_PANEL_DPI = 144
_TITLE_CHARACTERS = 105
_HEADROOM = 1.15
"""Where an axis ends above its highest value, so that the star of the best stands clear of the edge."""
_FAILURE_ROW = 10.0
"""Points below an axis for each kind of failure."""


class _Kind(NamedTuple):
    """Trials that share a line."""

    precision: Value
    recomputes: bool

    @property
    def label(self) -> str:
        return value_text("amp_dtype", self.precision) + (", checkpointing" if self.recomputes else "")

    @property
    def colour(self) -> str:
        return _COLOURS.get(str(self.precision), GREY)

    @property
    def line(self) -> str:
        return "--" if self.recomputes else "-"

    @property
    def points(self) -> dict[str, Any]:
        return {
            "color": self.colour,
            "marker": "D" if self.recomputes else "o",
            "markersize": 4.2 + (not self.recomputes),
        }


def draw_search(search: Search, path: Path | str, title: str) -> None:
    """Draw all panels as one PNG, which is replaced only when the new one is complete."""
    figure = new_figure(13, 11.4, textwrap.fill(title, _TITLE_CHARACTERS))
    grid = figure.add_gridspec(3, 2, height_ratios=[1.05, 1.0, 0.85])
    draw_parallel(figure.add_subplot(grid[0, :]), search)
    draw_throughput(figure.add_subplot(grid[1, 0]), search)
    draw_memory(figure.add_subplot(grid[1, 1]), search)
    draw_importance(figure.add_subplot(grid[2, 0]), search)
    draw_pareto(figure.add_subplot(grid[2, 1]), search)
    save(figure, path)


def panel_pngs(search: Search) -> dict[str, bytes]:
    """Each panel as a PNG of its own: parallel, throughput, memory, importance, pareto."""
    panels: dict[str, tuple[Callable[[Axes, Search], None], float, float]] = {
        "parallel": (draw_parallel, 12.0, 4.4),
        "throughput": (draw_throughput, 7.2, 4.4),
        "memory": (draw_memory, 7.2, 4.4),
        "importance": (draw_importance, 7.2, 3.6),
        "pareto": (draw_pareto, 7.2, 3.6),
    }
    pictures = {}
    for name, (draw, width, height) in panels.items():
        figure = new_figure(width, height, "")
        draw(figure.add_subplot(), search)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_PANEL_DPI)
        pictures[name] = buffer.getvalue()
    return pictures


def draw_throughput(axes: Axes, search: Search) -> None:
    """Speed against budget, the fastest of each budget joined; trials that failed below, by what ended them."""
    heading(axes, "Tokens per second against the budget")
    style(axes)
    budget = budget_setting(search.trials, search.space)
    known = measured(search.trials)
    _curves(axes, known, budget, speed)
    _mark_best(axes, search, budget, speed)
    axes.set_ylim(0, _HEADROOM * (max(map(speed, known), default=0.0) or 1.0))
    rows = _failures(axes, search, budget)
    axes.yaxis.set_major_formatter(_SPEED)
    _budget_axis(axes, search, budget)
    _legend_below(axes, rows)


def draw_memory(axes: Axes, search: Search) -> None:
    """Peak memory against budget, with the device's end and what the margin leaves."""
    heading(axes, "Peak memory against the budget")
    style(axes)
    budget = budget_setting(search.trials, search.space)
    known = [trial for trial in search.trials if trial.peak_bytes is not None]
    highest = max(map(_gib, known), default=0.0)
    _curves(axes, [trial for trial in known if trial.status in ("ok", "pruned")], budget, _gib)
    ended = [trial for trial in known if trial.status == "out_of_memory"]
    if ended:
        looks: dict[str, Any] = {"color": RED, "markersize": 7, "linestyle": "none"}
        places = [_budget(trial, budget) for trial in ended]
        axes.plot(places, list(map(_gib, ended)), "^", label=STATUSES["out_of_memory"], **looks)
    highest = max(highest, _limits(axes, search, known))
    _mark_best(axes, search, budget, _gib)
    axes.set_ylim(0, _HEADROOM * (highest or 1.0))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} GiB"))
    _budget_axis(axes, search, budget)
    _legend_below(axes)


def draw_importance(axes: Axes, search: Search) -> None:
    """How much of the differences in speed each setting explains."""
    heading(axes, "What decides the speed" + (f" ({search.importance_method})" if search.importance_method else ""))
    style(axes)
    axes.grid(visible=False)
    shares = sorted(search.importance.items(), key=lambda item: item[1])
    if not shares:
        _nothing(axes, "too few trials, or nothing varied")
        return
    bars = axes.barh([NAMES.get(name, name) for name, _ in shares], [share for _, share in shares], color=BLUE)
    axes.bar_label(bars, [f" {share:.0%}" for _, share in shares], color=INK, fontsize=9)
    axes.set_xlim(0, max(share for _, share in shares) * 1.15 or 1.0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.tick_params(axis="y", length=0)


def draw_pareto(axes: Axes, search: Search) -> None:
    """Speed against memory: the steps are the fastest for the memory that they take."""
    heading(axes, "Speed for memory")
    style(axes)
    known = [trial for trial in measured(search.trials) if trial.peak_bytes is not None]
    if not known:
        _nothing(axes, "no memory was measured")
        return
    front = pareto(known)[::-1]
    gib, speeds = list(map(_gib, front)), list(map(speed, front))
    axes.step(gib, speeds, where="post", color=GREEN, zorder=1)
    for trials, colour, size in (([trial for trial in known if trial not in front], GREY, 4), (front, GREEN, 6)):
        for some, hollow in _told_apart(trials):
            face: dict[str, Any] = {"markerfacecolor": "white" if hollow else colour}
            axes.plot(list(map(_gib, some)), list(map(speed, some)), "o", color=colour, markersize=size, **face)
    line = "-" if len(front) > 1 else "none"
    axes.plot([], [], "o", linestyle=line, color=GREEN, markersize=6, label="none is better in both")
    _explain_hollow(axes, known)
    total, right = next((trial.total_bytes for trial in known if trial.total_bytes), None), 1.08 * max(map(_gib, known))
    if total:
        allowed = total / 2**30 * (1.0 - search.margin)
        if allowed < 1.5 * right:
            right = max(right, 1.05 * allowed)
            axes.axvspan(allowed, right, color=RED, alpha=0.08, linewidth=0)
    axes.set_xlim(0, right or 1.0)
    best = search.best
    if best is not None and best.peak_bytes is not None:
        axes.plot(_gib(best), speed(best), "*", color=MAGENTA, markersize=15, linestyle="none", label="best")
    axes.set_ylim(0, _HEADROOM * (max(map(speed, known)) or 1.0))
    axes.yaxis.set_major_formatter(_SPEED)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} GiB"))
    legend(axes, over_curves=True)


def _by_kind(trials: Sequence[Trial]) -> Iterator[tuple[_Kind, list[Trial]]]:
    kinds: dict[_Kind, list[Trial]] = {}
    for trial in trials:
        kind = _Kind(trial.settings.get("amp_dtype"), bool(trial.settings.get("gradient_checkpointing")))
        kinds.setdefault(kind, []).append(trial)
    return iter(sorted(kinds.items(), key=lambda item: (str(item[0].precision), item[0].recomputes)))


def _told_apart(trials: Sequence[Trial]) -> Iterator[tuple[list[Trial], bool]]:
    """Trials measured to the end, then those that were stopped early, which are drawn hollow."""
    yield [trial for trial in trials if trial.status == "ok"], False
    yield [trial for trial in trials if trial.status != "ok"], True


def _curves(axes: Axes, trials: Sequence[Trial], budget: str, value: Callable[[Trial], float]) -> None:
    """Points of each kind, and a line through the highest of each budget, measured to the end."""
    for kind, alike in _by_kind(trials):
        for some, hollow in _told_apart(alike):
            looks = {**kind.points, "linestyle": "none", "alpha": 0.6} | (
                {"markerfacecolor": "white"} if hollow else {}
            )
            axes.plot([_budget(trial, budget) for trial in some], list(map(value, some)), **looks)
        ended = [trial for trial in alike if trial.status == "ok"]
        highest = _extremes(ended, budget, value)
        line = kind.line if len(highest) > 1 else "none"
        axes.plot(*zip(*highest, strict=True) if highest else ([], []), color=kind.colour, linestyle=line)
        face = kind.colour if ended else "white"
        axes.plot([], [], **kind.points, markerfacecolor=face, linestyle=line, label=kind.label)
    _explain_hollow(axes, trials)


def _explain_hollow(axes: Axes, trials: Sequence[Trial]) -> None:
    """A line of the legend where some of these were stopped early."""
    if any(trial.status == "pruned" for trial in trials):
        looks: dict[str, Any] = {"color": GREY, "markerfacecolor": "white", "linestyle": "none", "markersize": 5}
        axes.plot([], [], "o", **looks, label=f"hollow: {STATUSES['pruned']}")


def _extremes(trials: Sequence[Trial], budget: str, value: Callable[[Trial], float]) -> list[tuple[float, float]]:
    """Of each budget the highest value."""
    highest: dict[float, float] = {}
    for trial in trials:
        place = _budget(trial, budget)
        highest[place] = max(value(trial), highest.get(place, 0.0))
    return sorted(highest.items())


def _budget(trial: Trial, name: str) -> float:
    return float(trial.settings.get(name) or 1)


def _gib(trial: Trial) -> float:
    return (trial.peak_bytes or 0) / 2**30


def _failures(axes: Axes, search: Search, budget: str) -> int:
    """A row below the axis for each kind of failure, and how many at a budget where it is several; counts the rows."""
    rows = 0
    for status, marker in _FAILURES.items():
        places = Counter(_budget(trial, budget) for trial in search.trials if trial.status == status)
        if not places:
            continue
        rows += 1
        # In points: a height in tokens per second would be read as a speed.
        down = ScaledTranslation(0, -_FAILURE_ROW * (rows - 0.3) / 72, axes.figure.dpi_scale_trans)
        below: dict[str, Any] = {"transform": axes.get_xaxis_transform() + down, "clip_on": False, "color": RED}
        label = f"{STATUSES[status]} ({places.total()})"
        axes.plot(list(places), [0.0] * len(places), marker, markersize=6, label=label, linestyle="none", **below)
        for place, count in places.items():
            if count > 1:
                axes.text(place, 0.0, f"    {count}×", fontsize=7, va="center_baseline", ha="left", **below)
    axes.tick_params(axis="x", pad=3.5 + _FAILURE_ROW * rows)
    return rows


def _mark_best(axes: Axes, search: Search, budget: str, value: Callable[[Trial], float]) -> None:
    best = search.best
    if best is not None and (value is speed or best.peak_bytes is not None):
        looks: dict[str, Any] = {"color": MAGENTA, "markersize": 15, "linestyle": "none", "zorder": 5}
        axes.plot(_budget(best, budget), value(best), "*", label="best", **looks)


def _limits(axes: Axes, search: Search, known: Sequence[Trial]) -> float:
    """The device's memory and what may be used of it, unless it is so large that it would flatten the curves.

    Returns:
        GiB of the highest line; 0 without any.
    """
    total = next((trial.total_bytes for trial in known if trial.total_bytes), None)
    if total is None:
        return 0.0
    if total > 6 * max(trial.peak_bytes or 0 for trial in known):
        axes.text(0.02, 0.98, f"of {memory_text(total)}", transform=axes.transAxes, color=GREY, fontsize=9, va="top")
        return 0.0
    axes.axhline(total / 2**30, color=RED, linewidth=1.4, label=f"all memory, {memory_text(total)}")
    allowed = total / 2**30 * (1.0 - search.margin)
    axes.axhline(allowed, color=RED, linewidth=1.2, linestyle=":", label=f"less the margin of {search.margin:.0%}")
    return total / 2**30


def _budget_axis(axes: Axes, search: Search, budget: str) -> None:
    places = [float(value) for value in values_of(budget, search.trials, search.space) if value]
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("tokens a batch" if budget == "tokens" else NAMES[budget], color=INK, fontsize=9)
    if places:
        axes.set_xlim(min(places) / 1.35, max(places) * 1.35)


def _legend_below(axes: Axes, rows: int = 0) -> None:
    """The legend under the axis and these rows of failures."""
    if axes.get_legend_handles_labels()[0]:
        drop: dict[str, Any] = {"bbox_to_anchor": (0.5, -0.15 - 0.045 * rows)}
        below: dict[str, Any] = {"loc": "upper center", "ncols": 4, "frameon": False, **drop}
        axes.legend(**below, fontsize=8, labelcolor=INK, handlelength=2.6, columnspacing=1.2, markerscale=0.8)


def _nothing(axes: Axes, why: str) -> None:
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color=GREY)
