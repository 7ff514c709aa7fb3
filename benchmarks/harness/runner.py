"""Runs stages one after the other and keeps what is finished.

The files of the results are written anew after every case and every row, so that Ctrl-C or a stage that breaks costs
nothing that was measured before. A stage that breaks doesn't stop those after it.
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
from benchmarks.harness.protocol import measure_case
from benchmarks.harness.results import (
    NO_WARM_UP,
    RESULTS_FILE,
    WARM_UP_PROTOCOL,
    CaseResult,
    Origin,
    Table,
    case_result,
    merged,
    read_results,
)
from benchmarks.harness.stage import Case, Device, Setting, Stage, WrongWorkError
from benchmarks.harness.table import interval_text, markdown, quantity, ratio_text, row_text
from common.errors import EsmerayError
from common.progress import status_line
from common.publishing import write_atomically


@dataclass(frozen=True)
class Run:
    """One call of ``python -m benchmarks``: ``command`` as it was typed, names of all stages in their ``order``.

    ``fasta`` are proteins to work on; None for those at hand (:mod:`benchmarks.harness.proteins`).
    ``minutes``: no stage and no case of one starts later than this.
    """

    machine: Machine
    output: Path
    quick: bool
    command: str
    order: Sequence[str]
    fasta: Path | None = None
    minutes: float = float("inf")


def run_stages(stages: Sequence[Stage], run: Run) -> list[str]:
    """Measure stages and write their results; return the names of those that broke, why is on stderr.

    Raises DataError where the results that are there can't be read.
    """
    read_results(run.output, run.machine)  # refuse before an hour of measuring, not after it
    run.output.mkdir(parents=True, exist_ok=True)
    broken = []
    deadline_s = time.perf_counter() + 60 * run.minutes
    with status_line() as show:
        for number, stage in enumerate(stages, 1):
            if time.perf_counter() > deadline_s:
                print(f"{stage.name}: left out, {run.minutes:g} minutes are over", file=sys.stderr)
                continue
            try:
                _run_stage(stage, run, deadline_s, _prefixed(show, f"{number}/{len(stages)} {stage.name}"))
            except Exception as error:  # noqa: BLE001 - one stage that broke must not cost the others their turn
                broken.append(stage.name)
                expected = isinstance(error, (WrongWorkError, EsmerayError))
                print(f"{stage.name}: {error if expected else traceback.format_exc()}", file=sys.stderr)
    return broken


def _prefixed(show: Callable[[str], None], prefix: str) -> Callable[[str], None]:
    return lambda text: show(f"{prefix} · {text}")


def _run_stage(stage: Stage, run: Run, deadline_s: float, show: Callable[[str], None]) -> None:
    show("preparing")
    began_s, rows = time.perf_counter(), []
    device: Device = "cuda" if run.machine.gpu else "cpu"
    # Beside the results, hence on the disk of the repository: the system's temporary folder may be memory.
    with tempfile.TemporaryDirectory(dir=run.output, prefix="work-") as folder:
        setting = Setting(device=device, quick=run.quick, folder=Path(folder), fasta=run.fasta, note=show)
        try:
            with closing(stage.cases(setting)) as cases:  # type: ignore[type-var]
                for case in cases:
                    origin = _origin(stage, run)
                    if isinstance(case, Case):
                        measured = measure_case(case, run.quick, _prefixed(show, case.name))
                        _save(case_result(stage, case, measured, device, origin), run)
                    else:
                        rows.append(case)
                        seconds = time.perf_counter() - began_s
                        table = Table(
                            **dict(origin), stage=stage.name, summary=stage.summary, seconds=seconds, rows=rows
                        )
                        _save(table, run)
                    if time.perf_counter() > deadline_s:
                        print(f"{stage.name}: cut short, the minutes are over", file=sys.stderr)
                        break
        finally:
            _draw(run)
    wrong = [row for row in rows if any(str(value).startswith("WRONG") for value in row.values())]
    if wrong:
        raise WrongWorkError("; ".join(map(row_text, wrong)))


def _draw(run: Run) -> None:
    results = read_results(run.output, run.machine)
    if results.cases:
        from benchmarks.harness.plot import draw_results  # here: a machine that takes tables alone has no matplotlib

        draw_results(results, run.output / "results.png")


def _origin(stage: Stage, run: Run) -> Origin:
    return Origin(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=run.command,
        revision=revision(),
        versions=versions(stage.distributions),
        warm_up=NO_WARM_UP if run.quick else WARM_UP_PROTOCOL,
    )


def _save(fresh: CaseResult | Table, run: Run) -> None:
    """Write the results with this case or table among them, and print it, of a table the last row."""
    results = merged(read_results(run.output, run.machine), fresh, run.order)
    write_atomically(run.output / RESULTS_FILE, results.model_dump_json(indent=1) + "\n")
    write_atomically(run.output / "results.md", markdown(results))
    lines = [f"{fresh.stage}: {row_text(fresh.rows[-1])}"] if isinstance(fresh, Table) else _lines(fresh)
    print("\n".join(lines), flush=True)


def _lines(case: CaseResult) -> list[str]:
    lines = [f"{case.stage}: {case.case}"]
    lines += [f"  {contender.name:<44} {quantity(contender.median, case.unit)}" for contender in case.contenders]
    for comparison in case.comparisons:
        floor = "" if comparison.floor is None else f", floor {ratio_text(comparison.floor)}: {comparison.verdict}"
        ratio = f"{ratio_text(comparison.ratio)}× ({interval_text(comparison)})"
        lines.append(f"  {comparison.title}, beside {comparison.peer}: {ratio}{floor}")
    return lines
