"""Run stages one after the other, and write the results after every row.

Ctrl-C or a stage that breaks loses nothing that was measured before, and later stages still run.
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

from benchmarks.harness.machine import Machine, revision, versions
from benchmarks.harness.results import RESULTS_FILE, Table, markdown, merged, read_results, row_text
from benchmarks.harness.stage import Row, Setting, Stage, WrongWorkError
from esmeray.common.errors import EsmerayError
from esmeray.common.progress import status_line
from esmeray.common.publishing import write_atomically


@dataclass(frozen=True)
class Run:
    """One call of ``python -m benchmarks``.

    Attributes:
        command: as it was typed.
        order: names of all stages.
        fasta, vectors: see :class:`~benchmarks.harness.stage.Setting`.
        minutes: no stage and no row starts later than this.
    """

    machine: Machine
    output: Path
    quick: bool
    command: str
    order: Sequence[str]
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
    results = merged(read_results(run.output, run.machine), table, run.order)
    # Each file is complete at any time, also if Ctrl-C comes between two of them.
    write_atomically(run.output / RESULTS_FILE, results.model_dump_json(indent=1) + "\n")
    write_atomically(run.output / "results.md", markdown(results))
    print(f"{table.stage}: {row_text(table.rows[-1])}", flush=True)
