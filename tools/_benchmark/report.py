"""What was measured, for a reader: tables, a picture, and the facts that the adviser takes.

In: stages by name. Out: rich tables, plain values for JSON, a PNG with a panel each for the rates of all stages,
budgets, loader processes and how full batches are; whiskers reach from the lowest to the highest sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from common.figure_style import BLUE, GREEN, GREY, INK, ORANGE, heading, legend, new_figure, save, style
from common.timing import ratio, round_ratios
from monitoring.advice import Comparison, Facts
from tools._benchmark.stages import FILLED, TOKENS, WAITING, fastest, reference_budget
from tools._benchmark.subject import LEAST_ROUNDS, Row, StageResult
from train_config.schema import BatchSection, DataSection, TrainingSection

Stages = Mapping[str, StageResult]
_AMP_NAMES = {"bf16": "bf16", "fp32": "none"}
"""Precisions as training.amp_dtype names them."""

_THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")


def tables(stages: Iterable[StageResult]) -> RenderableType:
    """A table for each stage: the median of each variant and, dimmed, its smallest and largest sample."""
    parts: list[RenderableType] = []
    for stage in stages:
        parts += [_table(stage), *(Text(f"  {note}", style="dim") for note in stage.notes), Text()]
    return Group(*parts)


def stage_facts(stage: StageResult) -> dict[str, Any]:
    """One stage as plain values."""
    variants = [
        {
            "name": row.name,
            "settings": row.settings,
            "measured": {
                unit: {"median": median(values), "low": min(values), "high": max(values), "samples": values}
                for unit, values in row.samples.items()
            },
        }
        for row in stage.rows
    ]
    return {"title": stage.title, "notes": stage.notes, "variants": variants}


def adviser_facts(stages: Stages, tokens_per_record: float) -> Facts:
    """Rate of each stage at its best, and the defaults of the config beside what is fastest.

    Precisions, budgets and loader processes are compared round by round, where there are rounds enough; windows by how
    full they make a batch.
    """
    forward, windows, workers = (stages[name].rows for name in ("inference", "packing", "pipeline"))
    best = fastest(forward)
    budget, precision = best.settings["batch.tokens"], best.settings["precision"]
    rates = {
        name: max(_tokens_per_s(row, tokens_per_record) for row in stage.rows)
        for name, stage in stages.items()
        if stage.rows and name != "pipeline"
    }
    default = next(name for name, key in _AMP_NAMES.items() if key == TrainingSection().amp_dtype)
    compared = [
        *_speeds(_chosen(forward, "batch.tokens", budget), "precision", default, "training.amp_dtype", _AMP_NAMES),
        *_speeds(_chosen(forward, "precision", precision), "batch.tokens", reference_budget(forward)),
        *_speeds(workers, "data.num_workers", DataSection().num_workers),
        *_fill(_chosen(windows, "batch.tokens", budget)),
    ]
    return Facts(stage_rates=rates, compared=tuple(compared))


def _tokens_per_s(row: Row, tokens_per_record: float) -> float:
    return row.median(TOKENS) if TOKENS in row.samples else tokens_per_record * row.median("records/s")


def _chosen(rows: Iterable[Row], setting: str, value: object) -> list[Row]:
    return [row for row in rows if row.settings[setting] == value]


def _speeds(
    rows: Sequence[Row], setting: str, default: object, key: str = "", names: Mapping[Any, Any] | None = None
) -> list[Comparison]:
    """The default of a setting beside the fastest other value, where both have rounds enough."""
    enough = [row for row in rows if row.rounds >= LEAST_ROUNDS]
    now, others = _chosen(enough, setting, default), [row for row in enough if row.settings[setting] != default]
    if not now or not others:
        return []
    other = fastest(others)
    found = ratio(round_ratios(other.samples[TOKENS], now[0].samples[TOKENS]))
    named = names or {}
    value = other.settings[setting]
    return [Comparison(key or setting, named.get(default, default), named.get(value, value), *found)]


def _fill(rows: Sequence[Row]) -> list[Comparison]:
    """The default window beside the one that fills batches best: a fuller batch is as much more work a step."""
    filled = {int(row.settings["batch.packing_window"]): row.median(FILLED) for row in rows}
    now, best = BatchSection().packing_window, max(filled, key=lambda window: filled[window], default=0)
    if now not in filled:
        return []
    gain = filled[best] / filled[now]
    return [Comparison("batch.packing_window", now, best, gain, gain, gain)]


def _quantity(value: float) -> str:
    """Three digits, thousands set off."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(stage: StageResult) -> Table:
    units = list(dict.fromkeys(unit for row in stage.rows for unit in row.samples))
    table = Table(title=escape(stage.title), title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for unit in units:
        table.add_column(escape(unit), justify="right")
        table.add_column("lowest to highest", justify="right", style="dim")
    table.add_column("rounds", justify="right", style="dim")
    for row in stage.rows:
        table.add_row(escape(row.name), *(cell for unit in units for cell in _cells(row, unit)), str(row.rounds))
    return table


def _cells(row: Row, unit: str) -> tuple[str, str]:
    values = row.samples.get(unit)
    return (_quantity(median(values)), f"{_quantity(min(values))} to {_quantity(max(values))}") if values else ("", "")


def draw(stages: Stages, title: str, tokens_per_record: float, path: Path) -> None:
    """Draw the four panels."""
    figure = new_figure(11.5, 7.6, title)
    rates, budgets, waiting, filled = figure.subplots(2, 2).ravel()
    _draw_rates(rates, stages, tokens_per_record)
    forward, windows = stages["inference"].rows, stages["packing"].rows
    heading(budgets, "Inference by token budget (tokens/s)")
    for precision, colour in (("fp32", GREY), ("bf16", BLUE)):
        _line(budgets, _chosen(forward, "precision", precision), TOKENS, precision, colour)
    budgets.yaxis.set_major_formatter(_THOUSANDS)
    budgets.set_ylim(bottom=0)
    heading(filled, "How full batches are (%)")
    sizes = sorted({int(row.settings["batch.packing_window"]) for row in windows})
    for window, colour in zip(sizes, (BLUE, GREEN), strict=False):
        _line(filled, _chosen(windows, "batch.packing_window", window), FILLED, f"packing_window {window:,}", colour)
    filled.set_ylim(top=100.2, bottom=min([95.0, *(row.median(FILLED) - 1 for row in windows)]))
    _draw_waiting(waiting, stages["pipeline"].rows)
    save(figure, path)


def _draw_rates(axes: Axes, stages: Stages, tokens_per_record: float) -> None:
    """One bar for each variant; of budgets the fastest alone, since they have panels of their own."""
    heading(axes, "Tokens per second of each stage")
    bars = []
    for name in ("reading", "packing", "tokenizing", "loading", "inference", "pipeline"):
        found = [(f"{name}: {row.name}", _tokens_per_s(row, tokens_per_record)) for row in stages[name].rows]
        bars += [max(found, key=lambda bar: bar[1])] if name in {"packing", "inference"} and found else found
    for place, (label, value) in enumerate(bars):
        axes.barh(place, value, height=0.66, color=ORANGE if label.startswith(("inference", "pipeline")) else BLUE)
        axes.annotate(f"{value:,.0f}", (value, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
    style(axes)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=7.5)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(min(value for _, value in bars) / 3, max(value for _, value in bars) * 8)
    axes.xaxis.set_minor_formatter(NullFormatter())


def _draw_waiting(axes: Axes, rows: Sequence[Row]) -> None:
    heading(axes, "Whole pipeline: time that the model waits for data (%)")
    style(axes)
    for row in rows:
        number, values = int(row.settings["data.num_workers"]), row.samples[WAITING]
        axes.bar(number, median(values), width=0.6, color=BLUE)
        axes.errorbar(number, median(values), yerr=_whiskers([row], WAITING), color=INK, capsize=3, linewidth=1)
        label = f"{median(values):.2g} %\n{row.median(TOKENS):,.0f} tokens/s"
        axes.annotate(label, (number, max(values)), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks([int(row.settings["data.num_workers"]) for row in rows])
    axes.set_xlabel("data.num_workers")
    axes.set_ylim(0, max(1.4 * max((max(row.samples[WAITING]) for row in rows), default=1.0), 0.1))


def _line(axes: Axes, rows: Sequence[Row], unit: str, label: str, colour: str) -> None:
    """The rows by token budget."""
    style(axes)
    places = [int(row.settings["batch.tokens"]) for row in rows]
    middles = [row.median(unit) for row in rows]
    axes.errorbar(places, middles, yerr=_whiskers(rows, unit), color=colour, marker="o", capsize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(places)
    axes.xaxis.set_major_formatter(_THOUSANDS)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("batch.tokens")
    legend(axes)


def _whiskers(rows: Sequence[Row], unit: str) -> list[list[float]]:
    samples = [row.samples[unit] for row in rows]
    return [[median(v) - min(v) for v in samples], [max(v) - median(v) for v in samples]]
