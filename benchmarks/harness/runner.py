"""Runs stages one after the other and keeps what is finished.

The files of the results are written anew after every case, so that Ctrl-C or a stage that breaks costs nothing that was
measured before. A stage that breaks doesn't stop those after it.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.harness.machine import Machine, revision, versions
from benchmarks.harness.plot import draw_results
from benchmarks.harness.protocol import measure_case
from benchmarks.harness.results import (
    NO_WARM_UP,
    RESULTS_FILE,
    WARM_UP_PROTOCOL,
    CaseResult,
    Origin,
    case_result,
    merged,
    read_results,
)
from benchmarks.harness.stage import Device, Setting, Stage, WrongWorkError
from benchmarks.harness.table import interval_text, markdown, quantity, ratio_text
from common.errors import EsmerayError
from common.progress import status_line
from common.publishing import write_atomically


@dataclass(frozen=True)
class Run:
    """One call of ``python -m benchmarks``: ``command`` as it was typed, names of all stages in their ``order``.

    ``fasta`` are proteins to work on; None for those at hand (:mod:`benchmarks.harness.proteins`).
    """

    machine: Machine
    output: Path
    quick: bool
    command: str
    order: Sequence[str]
    fasta: Path | None = None


def run_stages(stages: Sequence[Stage], run: Run) -> list[str]:
    """Measure stages and write their results; return the names of those that broke, why is on stderr.

    Raises DataError where the results that are there can't be read.
    """
    read_results(run.output, run.machine)  # refuse before an hour of measuring, not after it
    run.output.mkdir(parents=True, exist_ok=True)
    broken = []
    with status_line() as show:
        for number, stage in enumerate(stages, 1):
            try:
                _run_stage(stage, run, _prefixed(show, f"{number}/{len(stages)} {stage.name}"))
            except Exception as error:  # noqa: BLE001 - one stage that broke must not cost the others their turn
                broken.append(stage.name)
                expected = isinstance(error, (WrongWorkError, EsmerayError))
                print(f"{stage.name}: {error if expected else traceback.format_exc()}", file=sys.stderr)
    return broken


def _prefixed(show: Callable[[str], None], prefix: str) -> Callable[[str], None]:
    return lambda text: show(f"{prefix} · {text}")


def _run_stage(stage: Stage, run: Run, show: Callable[[str], None]) -> None:
    show("preparing")
    device: Device = "cuda" if run.machine.gpu else "cpu"
    # Beside the results, hence on the disk of the repository: the system's temporary folder may be memory.
    with tempfile.TemporaryDirectory(dir=run.output, prefix="work-") as folder:
        setting = Setting(device=device, quick=run.quick, folder=Path(folder), fasta=run.fasta, note=show)
        try:
            with closing(stage.cases(setting)) as cases:  # type: ignore[type-var]
                for case in cases:
                    origin = _origin(stage, run)
                    measured = measure_case(case, run.quick, _prefixed(show, case.name))
                    _keep(case_result(stage, case, measured, device, origin), run)
        finally:
            draw_results(read_results(run.output, run.machine), run.output / "results.png")


def _origin(stage: Stage, run: Run) -> Origin:
    return Origin(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=run.command,
        revision=revision(),
        versions=versions(stage.distributions),
        warm_up=NO_WARM_UP if run.quick else WARM_UP_PROTOCOL,
    )


def _keep(case: CaseResult, run: Run) -> None:
    """Write the results with this case among them, and print it."""
    results = merged(read_results(run.output, run.machine), case, run.order)
    write_atomically(run.output / RESULTS_FILE, results.model_dump_json(indent=1) + "\n")
    write_atomically(run.output / "results.md", markdown(results))
    print("\n".join(_lines(case)), flush=True)


def _lines(case: CaseResult) -> list[str]:
    lines = [f"{case.stage}: {case.case}"]
    lines += [f"  {contender.name:<44} {quantity(contender.median, case.unit)}" for contender in case.contenders]
    for comparison in case.comparisons:
        floor = "" if comparison.floor is None else f", floor {ratio_text(comparison.floor)}: {comparison.verdict}"
        ratio = f"{ratio_text(comparison.ratio)}× ({interval_text(comparison)})"
        lines.append(f"  {comparison.title}, beside {comparison.peer}: {ratio}{floor}")
    return lines
