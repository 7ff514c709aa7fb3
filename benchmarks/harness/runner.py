"""Runs stages one after the other and keeps what is finished.

The files of the results are written anew after every case and every row, so that Ctrl-C or a stage that breaks costs
nothing that was measured before. A stage that breaks doesn't stop those after it.
"""

import gc
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness.machine import Machine, revision, versions
from benchmarks.harness.results import (
    NO_WARM_UP,
    RESULTS_FILE,
    WARM_UP_PROTOCOL,
    CaseResult,
    ContenderResult,
    Origin,
    Table,
    compared,
    merged,
    read_results,
)
from benchmarks.harness.stage import Case, Contender, Device, Facts, Setting, Stage, WrongWorkError
from benchmarks.harness.table import case_text, markdown, row_text
from esmeray.common import timing
from esmeray.common.errors import EsmerayError
from esmeray.common.progress import status_line
from esmeray.common.publishing import write_atomically


@dataclass(frozen=True)
class Run:
    """One call of ``python -m benchmarks``: ``command`` as it was typed, names of all stages in their ``order``.

    ``fasta`` are proteins to work on; None for those at hand (:mod:`benchmarks.harness.proteins`).
    ``vectors``: of the stage index, as :class:`Setting` has them. ``minutes``: no stage and no case of one starts later
    than this.
    """

    machine: Machine
    output: Path
    quick: bool
    command: str
    order: Sequence[str]
    fasta: Path | None = None
    vectors: tuple[int, ...] = Setting.vectors
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
                _run_stage(stage, run, deadline_s, partial(_note, show, f"{number}/{len(stages)} {stage.name}"))
            except Exception as error:  # noqa: BLE001 - one stage that broke must not cost the others their turn
                broken.append(stage.name)
                expected = isinstance(error, (WrongWorkError, EsmerayError))
                print(f"{stage.name}: {error if expected else traceback.format_exc()}", file=sys.stderr)
    return broken


def _run_stage(stage: Stage, run: Run, deadline_s: float, show: Callable[[str], None]) -> None:
    show("preparing")
    began_s = time.perf_counter()
    rows = []
    device: Device = "cuda" if run.machine.gpu else "cpu"
    # Beside the results, hence on the disk of the repository: the system's temporary folder may be memory.
    with tempfile.TemporaryDirectory(dir=run.output, prefix="work-") as folder:
        setting = Setting(device, run.quick, Path(folder), run.fasta, run.vectors, show)
        try:
            # Closed also where a case broke: what stands after a ``yield`` ends servers and removes files.
            with closing(stage.cases(setting)) as cases:  # type: ignore[type-var]
                for case in cases:
                    origin = Origin(
                        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
                        command=run.command,
                        revision=revision(),
                        versions=versions(stage.distributions),
                        warm_up=NO_WARM_UP if run.quick else WARM_UP_PROTOCOL,
                        stage=stage.name,
                    )
                    if isinstance(case, Case):
                        _save(measure_case(stage, case, setting, origin), run)
                    else:
                        rows.append(case)
                        seconds = time.perf_counter() - began_s
                        _save(Table(**dict(origin), summary=stage.summary, seconds=seconds, rows=rows), run)
                    # Between cases: a measurement that is under way would be lost.
                    if time.perf_counter() > deadline_s:
                        print(f"{stage.name}: cut short, the minutes are over", file=sys.stderr)
                        break
        finally:
            _draw(run)
    # After all rows: one wrong value does not keep the others from being seen.
    wrong = [row for row in rows if any(str(value).startswith("WRONG") for value in row.values())]
    if wrong:
        raise WrongWorkError("; ".join(map(row_text, wrong)))


def measure_case(stage: Stage, case: Case, setting: Setting, origin: Origin) -> CaseResult:
    """Check, warm up and measure all contenders of a case (:mod:`esmeray.common.timing`); if quick, once without a
    warm-up.

    Raises WrongWorkError where the contenders do not compute the same.
    """
    show = partial(_note, setting.note, case.name)
    facts: Facts = {}
    if case.check is not None:
        show("checking that all compute the same")
        facts |= case.check()
    settled = {}
    for contender in case.contenders:
        if contender.kind == "rate" and not setting.quick:
            show(f"{contender.name}: warming up")
            settled[contender.name] = timing.warm_up(sampler(contender, contender.short or contender.run))
    # All together, in turns: whatever disturbs the machine for a while disturbs each.
    samplers = {contender.name: sampler(contender, contender.run) for contender in case.contenders}
    samples = timing.measure(samplers, 1 if setting.quick else case.rounds, show)
    return CaseResult(
        **dict(origin),
        case=case.name,
        device=setting.device,
        unit=case.unit,
        better=case.better,
        contenders=[
            ContenderResult(name=name, samples=values, median=median(values), warm_up_settled=settled.get(name))
            for name, values in samples.items()
        ],
        comparisons=compared(stage.comparisons, case, samples, setting.device),
        facts=facts | case.facts,
    )


def sampler(contender: Contender, run: Callable[[], float]) -> Callable[[], float]:
    """Return a callable that takes one sample: the work done per second, or the value that ``run`` returns."""

    def sample() -> float:
        if contender.before is not None:
            contender.before()
        gc.collect()  # what a contender left behind is not to be collected in the time of the next
        result, elapsed_s = timing.timed(run)
        return result / elapsed_s if contender.kind == "rate" else result

    return sample


def _note(show: Callable[[str], None], prefix: str, text: str) -> None:
    show(f"{prefix} · {text}")


def _draw(run: Run) -> None:
    results = read_results(run.output, run.machine)
    if results.cases:
        from benchmarks.harness.plot import (
            draw_results,  # here: a machine that takes tables alone has no matplotlib
        )

        draw_results(results, run.output / "results.png")


def _save(fresh: CaseResult | Table, run: Run) -> None:
    """Write the results with this case or table among them, and print it, of a table the last row."""
    # Read again each time: another run may have written other stages since.
    results = merged(read_results(run.output, run.machine), fresh, run.order)
    # Every file is whole at any time: Ctrl-C may come between two of them.
    write_atomically(run.output / RESULTS_FILE, results.model_dump_json(indent=1) + "\n")
    write_atomically(run.output / "results.md", markdown(results))
    text = row_text(fresh.rows[-1]) if isinstance(fresh, Table) else case_text(fresh)
    print(f"{fresh.stage}: {text}", flush=True)
