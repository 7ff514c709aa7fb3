"""Run stages one after the other, and write their tables after every row: ``results.json`` and ``results.md``.

Ctrl-C or a stage that breaks loses nothing that was measured before, and later stages still run. A run replaces the
tables of its stages. Other tables keep their own date, command, versions and revision.
"""

import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from benchmarks.harness.machine import Machine, revision, versions
from benchmarks.harness.stage import Row, Setting, Stage, WrongWorkError
from esmeray.common.errors import DataError, EsmerayError
from esmeray.common.progress import status_line
from esmeray.common.publishing import write_atomically

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


@dataclass(frozen=True)
class Run:
    """One call of ``python -m benchmarks``.

    Attributes:
        command: as it was typed.
        fasta, vectors: see :class:`~benchmarks.harness.stage.Setting`.
        minutes: no stage and no row starts later than this.
    """

    machine: Machine
    output: Path
    quick: bool
    command: str
    fasta: Path | None = None
    vectors: tuple[int, ...] = Setting.vectors
    minutes: float = float("inf")


def run_stages(stages: Sequence[Stage], run: Run) -> int:
    """Measure stages and write their results; return 1 if one broke, with the reason on stderr.

    Raises DataError if earlier results can't be read.
    """
    read_results(run.output, run.machine)  # fails before an hour of measuring, not after it
    run.output.mkdir(parents=True, exist_ok=True)
    broken = []
    deadline_s = time.perf_counter() + 60 * run.minutes
    with status_line() as show:
        for number, stage in enumerate(stages, 1):
            if time.perf_counter() > deadline_s:
                print(f"{stage.name}: left out, {run.minutes:g} minutes are over", file=sys.stderr)
                continue
            prefix = f"{number}/{len(stages)} {stage.name} · "
            try:
                _run_stage(stage, run, deadline_s, lambda text, prefix=prefix: show(prefix + text))  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - a stage that broke must not stop the others
                broken.append(stage.name)
                expected = isinstance(error, (WrongWorkError, EsmerayError))
                print(f"{stage.name}: {error if expected else traceback.format_exc()}", file=sys.stderr)
    print(f"results: {run.output}/results.md and results.json")
    if broken:
        print(f"{len(broken)} of {len(stages)} stages broke: {', '.join(broken)}", file=sys.stderr)
    return int(bool(broken))


def _run_stage(stage: Stage, run: Run, deadline_s: float, note: Callable[[str], None]) -> None:
    note("preparing")
    began_s = time.perf_counter()
    rows: list[Row] = []
    # Next to the results, hence on a disk: the system's temporary folder may be memory.
    with tempfile.TemporaryDirectory(dir=run.output, prefix="work-") as folder:
        device = "cuda" if run.machine.gpu else "cpu"
        setting = Setting(device, run.quick, Path(folder), run.fasta, run.vectors, note)  # type: ignore[arg-type]
        # Closed if a row fails, so that the stage's ``with`` blocks end its servers.
        with closing(stage.rows(setting)) as generator:  # type: ignore[type-var]
            for row in generator:
                rows.append(row)
                table = Table(
                    stage=stage.name,
                    summary=stage.summary,
                    date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
                    command=run.command,
                    revision=revision(),
                    versions=versions(stage.distributions),
                    smoke=run.quick,
                    seconds=time.perf_counter() - began_s,
                    rows=rows,
                    facts=setting.facts,
                    samples=setting.samples,
                )
                _save(table, run)
                # Only between rows: a measurement in progress would be lost.
                if time.perf_counter() > deadline_s:
                    print(f"{stage.name}: cut short, the minutes are over", file=sys.stderr)
                    break
    # After all rows, so that one wrong value doesn't hide the others.
    wrong = [row for row in rows if any(str(value).startswith("WRONG") for value in row.values())]
    if wrong:
        raise WrongWorkError("; ".join(map(row_text, wrong)))


def _save(table: Table, run: Run) -> None:
    """Write the results with this table, and print its last row."""
    # Read again each time: another run may have written other stages since.
    results = read_results(run.output, run.machine)
    tables = {old.stage: old for old in results.tables} | {table.stage: table}
    results.tables = [*tables.values()]
    # Each file is complete at any time, also if Ctrl-C comes between two of them.
    write_atomically(run.output / RESULTS_FILE, results.model_dump_json(indent=1) + "\n")
    write_atomically(run.output / "results.md", markdown(results))
    print(f"{table.stage}: {row_text(table.rows[-1])}", flush=True)


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


def shown(value: float | int | str | None) -> str:
    """Return a value with four digits, or all digits before the point."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"
