"""``results.json`` and ``results.md``: the tables of one machine, with what is needed to judge or repeat them.

A run replaces the tables of its stages. Other tables keep their own date, command, versions and revision.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from benchmarks.harness.machine import Machine
from benchmarks.harness.stage import Row
from esmeray.common.errors import DataError

RESULTS_FILE = "results.json"


class Table(BaseModel):
    """The rows of a stage, how they were measured, and the seconds that it took (None: not recorded).

    Facts and samples are described by :class:`~benchmarks.harness.stage.Setting`.
    """

    stage: str
    summary: str
    date: str
    command: str
    revision: str
    versions: dict[str, str]
    smoke: bool
    seconds: float | None
    rows: list[Row]
    facts: Row
    samples: dict[str, dict[str, list[float]]]


class Results(BaseModel):
    """All tables of one machine."""

    format_version: Literal[2] = 2
    machine: Machine
    tables: list[Table] = []


def merged(results: Results, fresh: Table, order: Sequence[str]) -> Results:
    """Return the results with a stage's table replaced or added, in the order of the stages' names."""
    tables = [table for table in results.tables if table.stage != fresh.stage] + [fresh]
    # Tables of stages that were removed come last, until someone deletes them.
    tables.sort(key=lambda table: [*order, table.stage].index(table.stage))
    return results.model_copy(update={"tables": tables})


def read_results(folder: Path, machine: Machine) -> Results:
    """Return the folder's results, empty ones without a file; always with the machine as it is now.

    Raises DataError if the file is damaged or of another format.
    """
    path = folder / RESULTS_FILE
    if not path.is_file():
        return Results(machine=machine)
    try:
        results = Results.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(f"{path}: no results of this format; move it away and measure again") from error
    # The machine's system and Python may have been updated since.
    return results.model_copy(update={"machine": machine})


def markdown(results: Results) -> str:
    """Return the whole page."""
    machine = results.machine
    gpu = f", {machine.gpu} ({machine.gpu_memory_gib:g} GiB)" if machine.gpu else ""
    head = (
        f"# {machine.slug}\n\n{machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB{gpu}; {machine.system}, "
        f"Python {machine.python}. Written by `python -m benchmarks`; every sample is in `results.json`.\n\n"
        "A ratio is the median over the rounds, larger if ours is better; low and high are its interval, the smallest "
        "and the largest ratio of fewer than nine rounds."
    )
    return "\n\n".join([head, *map(_section, results.tables)]) + "\n"


def _section(table: Table) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in table.versions.items())
    seconds = f", {table.seconds:.0f} s" if table.seconds else ""
    origin = f"{table.date}, `{table.command}`, revision {table.revision or 'unknown'}{seconds}; {versions}."
    facts = "\n".join(f"- {name}: {shown(value)}" for name, value in table.facts.items())
    smoke = "**A smoke run: these values mean nothing.**" if table.smoke else ""
    parts = [f"## {table.stage}", smoke, table.summary, origin, grid(table.rows), facts]
    return "\n\n".join(part for part in parts if part)


def grid(rows: Sequence[Row]) -> str:
    """Return a Markdown table."""
    # Columns in the order of first appearance: rows of one table may have columns of their own.
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[shown(row.get(column)) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def row_text(row: Row) -> str:
    """Return a row in one line, for the terminal."""
    return ", ".join(f"{column} {shown(value)}" for column, value in row.items() if value is not None)


def quantity(value: float, unit: str) -> str:
    """Return a value with its unit."""
    return f"{shown(float(value))} {unit}"


def shown(value: float | int | str | None) -> str:
    """Return a value with four digits, or all digits before the point."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"
