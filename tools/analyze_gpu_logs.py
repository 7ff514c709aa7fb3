"""Say what a log of GPUs tells: throttling, idle gaps and their likely cause, leaks, and what to do.

Reads a log of 'python -m tools gpu_monitor', or of nvidia-smi (below), draws it and prints the diagnosis. Throttling
is told from throttle reasons and from clocks; gaps are put down to the loader, checkpoints or other GPUs by what the
machine did meanwhile, or by their pattern alone where the log has only GPUs.

A column that is missing, or called something else, is an error that names it, the nearest, and what is there.

Examples:
  python -m tools analyze_gpu_logs --log gpu_log.csv --output gpu_log.png
  python -m tools analyze_gpu_logs --log gpu_log.csv --json findings.json
  FIELDS=timestamp,index,name,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw
  FIELDS=$FIELDS,enforced.power.limit,clocks.sm,clocks.max.sm,clocks_event_reasons.active
  nvidia-smi -l 1 --format=csv --query-gpu=$FIELDS > smi.csv
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field
from rich.console import Console
from rich.text import Text

from common.arguments import ToolArguments, parse
from common.errors import ConfigError
from common.publishing import made_file, refuse_file
from monitoring.gpu_log.analysis import Analysis, GpuDiagnosis, analyse
from monitoring.gpu_log.plot import draw_analysis, summarise
from monitoring.gpu_log.reader import read_gpu_log

MADE_BY = "analyze_gpu_logs"
_UNWRAPPED_WIDTH = 10_000


class Arguments(ToolArguments):
    """Which log, and where to put what it tells."""

    log: Path = Field(description="The CSV file.")
    output: Path | None = Field(None, description="The picture, a PNG. Default: beside the log, named as it is.")
    json_: Annotated[Path | None, tyro.conf.arg(name="json")] = Field(
        None, description="Also write everything that is found to this file, as JSON."
    )
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Replace what this tool wrote before and nobody changed since."
    )


def main(argv: list[str]) -> int:
    """Read, diagnose, draw and print."""
    arguments = parse(Arguments, argv, "analyze_gpu_logs", __doc__)
    output = arguments.output or arguments.log.with_suffix(".png")
    made = (MADE_BY, arguments.overwrite)
    for path in filter(None, (output, arguments.json_)):
        if path.resolve() == arguments.log.resolve():
            raise ConfigError(f"{path} is the log itself; give another file to write to")
        refuse_file(path, *made)
    log = read_gpu_log(arguments.log)
    analysis = analyse(log)
    with made_file(output, *made) as building:
        draw_analysis(log, analysis, building)
    if arguments.json_ is not None:
        with made_file(arguments.json_, *made) as building:
            building.write_text(json.dumps(analysis.as_dict(), indent=1) + "\n", encoding="utf-8")
    _print(analysis)
    print(f"written: {output}" + (f" and {arguments.json_}" if arguments.json_ else ""))
    return 0


def _print(analysis: Analysis) -> None:
    # Into a file or pipe nothing is wrapped.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _UNWRAPPED_WIDTH)
    console.print(Text(f"{analysis.log}: {analysis.seconds:.0f} s, a sample every {analysis.interval_s:.2g} s"))
    for note in analysis.notes:
        console.print(Text(f"  {note}", style="dim"))
    for diagnosis in analysis.gpus:
        _print_gpu(console, diagnosis)


def _print_gpu(console: Console, diagnosis: GpuDiagnosis) -> None:
    console.print(Text(f"\n{summarise(diagnosis)}", style="bold"))
    for finding in diagnosis.findings:
        console.print(Text.assemble("  ", (finding.name, "yellow"), f": {finding.message}"))
        console.print(Text(f"    to do: {finding.advice}"))
    for note in diagnosis.notes:
        console.print(Text(f"  {note}", style="dim"))
