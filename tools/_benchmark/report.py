"""What was measured, as tables for a reader and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tools._benchmark.measuring import Row, StageResult


def tables(stages: Iterable[StageResult]) -> RenderableType:
    """A table for each stage: the median of each variant and, dimmed, its smallest and largest sample."""
    parts: list[RenderableType] = []
    for stage in stages:
        parts += [_table(stage), *(Text(f"  {note}", style="dim") for note in stage.notes), Text()]
    return Group(*parts)


def advice_text(bounding: list[str], advice: list[str]) -> RenderableType:
    """The lines under their headings."""
    lines = [Text("What is slow", style="bold"), *(Text(f"  {line}") for line in bounding), Text()]
    return Group(*lines, Text("Advice", style="bold"), *(Text(f"  {line}") for line in advice))


def stage_facts(stage: StageResult) -> dict[str, Any]:
    """One stage as plain values."""
    return {
        "title": stage.title,
        "notes": stage.notes,
        "variants": [
            {
                "name": row.name,
                "settings": row.settings,
                "measured": {
                    unit: {"median": median(values), "low": min(values), "high": max(values), "samples": values}
                    for unit, values in row.samples.items()
                },
            }
            for row in stage.rows
        ],
    }


def quantity(value: float) -> str:
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


def _cells(row: Row, unit: str) -> list[str]:
    values = row.samples.get(unit)
    if not values:
        return ["", ""]
    return [quantity(median(values)), f"{quantity(min(values))} to {quantity(max(values))}"]
