"""The stages for a reader: a table, a picture, and the facts that the adviser takes.

In: stages by name. Out: a rich table, plain values for JSON, and a PNG, whose whiskers reach from the lowest to the
highest sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.ticker import NullFormatter
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from common.figure_style import BLUE, ORANGE, heading, new_figure, save, style
from common.timing import ratio, round_ratios
from monitoring.advice import Comparison, Facts
from tools.profile._store.stages import FILLED, TOKENS, fastest, reference_budget
from tools.profile._store.subject import LEAST_ROUNDS, Row, StageResult
from train_config.schema import BatchSection, DataSection, TrainingSection

Stages = Mapping[str, StageResult]


def table(stages: Sequence[StageResult]) -> RenderableType:
    """A row for each variant with the median, lowest and highest rate, and what else it measured; then the notes."""
    shown = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", TOKENS, "lowest to highest", "", "rounds"):
        shown.add_column(column, justify="right" if column else "left")
    for stage in stages:
        shown.add_row(Text(stage.title, style="bold"))
        for row in stage.rows:
            rates = row.samples[TOKENS]
            others = ", ".join(f"{median(row.samples[unit]):.3g} {unit}" for unit in row.samples if unit != TOKENS)
            cells = f"{median(rates):,.0f}", f"{min(rates):,.0f} to {max(rates):,.0f}", others, str(row.rounds)
            shown.add_row(f"  {escape(row.name)}", *cells)
    notes = [Text(f"{stage.name}: {note}", style="dim") for stage in stages for note in stage.notes]
    return Group(shown, *notes, Text())


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


def adviser_facts(stages: Stages) -> Facts:
    """Rate of each stage at its best, and the defaults of the config beside what is fastest.

    A packing window is compared by how full it makes a batch: a fuller batch is as much more work a step.
    """
    forward = stages["inference"].rows
    best = fastest(forward).settings
    same_budget = [row for row in forward if row.settings["batch.tokens"] == best["batch.tokens"]]
    same_precision = [row for row in forward if row.settings["training.precision"] == best["training.precision"]]
    compared = [
        *_compared(same_budget, "training.precision", TrainingSection().precision),
        *_compared(same_precision, "batch.tokens", reference_budget(forward)),
        *_compared(stages["pipeline"].rows, "data.num_workers", DataSection().num_workers),
        *_compared(stages["packing"].rows, "batch.packing_window", BatchSection().packing_window, FILLED),
    ]
    rates = {name: fastest(stage.rows).median(TOKENS) for name, stage in stages.items() if name != "pipeline"}
    return Facts(stage_rates=rates, compared=tuple(compared))


def _compared(rows: Sequence[Row], key: str, default: object, unit: str = TOKENS) -> list[Comparison]:
    """The default of a setting beside its best other value, round by round where both have rounds enough."""
    enough = [row for row in rows if row.rounds >= LEAST_ROUNDS]
    now = [row for row in enough if row.settings[key] == default]
    others = [row for row in enough if row.settings[key] != default]
    if not now or not others:
        return []
    other = fastest(others, unit)
    found = ratio(round_ratios(other.samples[unit], now[0].samples[unit]))
    return [Comparison(key, default, other.settings[key], *found)]


def draw(stages: Stages, title: str, path: Path) -> None:
    """Draw a bar for each variant."""
    bars = [(f"{name}: {row.name}", row) for name, stage in stages.items() for row in stage.rows]
    figure = new_figure(11, 1.2 + 0.28 * len(bars), title)
    axes = figure.subplots()
    heading(axes, "Tokens per second of each stage")
    style(axes)
    samples = [row.samples[TOKENS] for _, row in bars]
    values = [median(rates) for rates in samples]
    whiskers = [median(v) - min(v) for v in samples], [max(v) - median(v) for v in samples]
    colours = [ORANGE if label.startswith(("inference", "pipeline")) else BLUE for label, _ in bars]
    drawn = axes.barh(range(len(bars)), values, height=0.66, color=colours, xerr=whiskers)
    axes.bar_label(drawn, [f"{value:,.0f}" for value in values], padding=3, fontsize=8)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=7.5)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 3, max(values) * 8)
    axes.xaxis.set_minor_formatter(NullFormatter())
    save(figure, path)
