"""The stages as one PNG: rates of all stages, budgets, loader processes, and how full batches are.

In: the stages by name. Out: a PNG, as bytes. Whiskers reach from the lowest to the highest sample.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from statistics import median

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, NullFormatter, NullLocator

from common.figure_style import BLUE, GREEN, GREY, INK, ORANGE
from tools._benchmark.advice import FILLED, TOKENS, WAITING
from tools._benchmark.measuring import Row, StageResult

_COLOURS = {"fp32": GREY, "bf16": BLUE}
_ENGINEERING = EngFormatter(sep="")
_ROUNDED = EngFormatter(places=1, sep="")


def png(stages: dict[str, StageResult], title: str, tokens_per_record: float) -> bytes:
    """Four panels; of stages that were not measured an empty one."""
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11.5, 7.6), layout="constrained", facecolor="white")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold", color=INK)
        rates, budgets, waiting, filled = figure.subplots(2, 2).ravel()
        _draw_rates(rates, stages, tokens_per_record)
        _draw_budgets(budgets, _rows(stages, "inference"))
        _draw_waiting(waiting, _rows(stages, "pipeline"))
        _draw_filled(filled, _rows(stages, "packing"))
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _rows(stages: dict[str, StageResult], name: str) -> list[Row]:
    return stages[name].rows if name in stages else []


def _draw_rates(axes: Axes, stages: dict[str, StageResult], tokens_per_record: float) -> None:
    _heading(axes, "Tokens per second of each stage")
    bars = []
    for name in ("reading", "packing", "tokenizing", "loading", "inference", "pipeline"):
        for row in _rows(stages, name):
            unit, factor = (TOKENS, 1.0) if TOKENS in row.samples else ("records/s", tokens_per_record)
            bars.append((f"{name}: {row.name}", factor * row.median(unit), name))
    bars = _thinned(bars)
    colours = {"inference": ORANGE, "pipeline": ORANGE}
    for place, (_, value, name) in enumerate(bars):
        axes.barh(place, value, height=0.66, color=colours.get(name, BLUE))
        axes.annotate(_ROUNDED(value), (value, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars], fontsize=7.5)
    axes.invert_yaxis()
    axes.set_xscale("log")
    if bars:
        axes.set_xlim(min(value for _, value, _ in bars) / 3, max(value for _, value, _ in bars) * 4)
    axes.xaxis.set_major_formatter(_ENGINEERING)
    axes.xaxis.set_minor_formatter(NullFormatter())


def _thinned(bars: list[tuple[str, float, str]]) -> list[tuple[str, float, str]]:
    """Of budgets, the fastest one alone, since they have panels of their own."""
    kept = []
    for name in dict.fromkeys(name for _, _, name in bars):
        of_stage = [bar for bar in bars if bar[2] == name]
        kept += [max(of_stage, key=lambda bar: bar[1])] if name in {"packing", "inference"} else of_stage
    return kept


def _draw_budgets(axes: Axes, rows: Sequence[Row]) -> None:
    _heading(axes, "Inference by token budget (tokens/s)")
    for precision, colour in _COLOURS.items():
        chosen = [row for row in rows if row.settings["precision"] == precision]
        _line(axes, chosen, "batch.tokens", TOKENS, precision, colour)
    _budget_axis(axes, rows)
    axes.yaxis.set_major_formatter(_ENGINEERING)
    axes.set_ylim(bottom=0)


def _draw_filled(axes: Axes, rows: Sequence[Row]) -> None:
    _heading(axes, "How full batches are (%)")
    windows = sorted({int(row.settings["batch.packing_window"]) for row in rows})
    for window, colour in zip(windows, (BLUE, GREEN), strict=False):
        chosen = [row for row in rows if row.settings["batch.packing_window"] == window]
        _line(axes, chosen, "batch.tokens", FILLED, f"packing_window {window:,}", colour)
    _budget_axis(axes, rows)
    axes.set_ylim(top=100.2, bottom=min([95.0, *(row.median(FILLED) - 1 for row in rows)]))


def _draw_waiting(axes: Axes, rows: Sequence[Row]) -> None:
    _heading(axes, "Whole pipeline: share of time that the model waits for data (%)")
    for row in rows:
        number, values = int(row.settings["data.num_workers"]), row.samples[WAITING]
        middle = median(values)
        error = [[middle - min(values)], [max(values) - middle]]
        axes.bar(number, middle, width=0.6, color=BLUE)
        axes.errorbar(number, middle, yerr=error, color=INK, capsize=3, linewidth=1, fmt="none")
        label = f"{middle:.2g} %\n{_ROUNDED(row.median(TOKENS))} tokens/s"
        axes.annotate(label, (number, max(values)), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks([int(row.settings["data.num_workers"]) for row in rows])
    axes.set_xlabel("data.num_workers")
    largest = max((max(row.samples[WAITING]) for row in rows), default=1.0)
    axes.set_ylim(0, max(1.4 * largest, 0.1))


def _line(axes: Axes, rows: Sequence[Row], setting: str, unit: str, label: str, colour: str) -> None:
    if not rows:
        return
    places = [int(row.settings[setting]) for row in rows]
    middles = [row.median(unit) for row in rows]
    axes.errorbar(
        places,
        middles,
        yerr=[_distances(rows, unit, min), _distances(rows, unit, max)],
        color=colour,
        marker="o",
        markersize=4,
        capsize=3,
        linewidth=1.8,
        label=label,
    )


def _distances(rows: Sequence[Row], unit: str, end: Callable[[Sequence[float]], float]) -> list[float]:
    return [abs(row.median(unit) - end(row.samples[unit])) for row in rows]


def _budget_axis(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({int(row.settings["batch.tokens"]) for row in rows}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("batch.tokens")
    if rows:
        axes.legend(frameon=False, loc="lower right")


def _heading(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10, color=INK)
    axes.grid(axis="both", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
