"""Report utilisation, idle share, memory and throttling of a log of GPUs, and what to do about them.

Reads a log of nvidia-smi (below), or of 'esmeray profile monitor', draws it and prints a summary of each GPU.
Throttling is detected from throttle reasons and from clocks.

Examples:
  esmeray profile log --log gpu_log.csv --output gpu_log.png
  esmeray profile log --log gpu_log.csv --json findings.json
  FIELDS=timestamp,index,uuid,name,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw
  FIELDS=$FIELDS,enforced.power.limit,clocks.sm,clocks.max.sm,clocks_event_reasons.active
  nvidia-smi -l 1 --format=csv --query-gpu=$FIELDS > smi.csv
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field
from rich.text import Text

from common.arguments import ToolArguments, parse
from common.command_line import result_console
from common.errors import ConfigError
from common.publishing import made_file, refuse_file
from monitoring.gpu_log.analysis import GpuSummary, interval_s, summarise
from monitoring.gpu_log.columns import TIME
from monitoring.gpu_log.plot import draw_log
from monitoring.gpu_log.reader import GpuLog, read_gpu_log

MADE_BY = "analyze_gpu_logs"


class Arguments(ToolArguments):
    """The log, and where to write the results."""

    log: Path = Field(description="The CSV file.")
    output: Path | None = Field(None, description="The picture, a PNG. Default: beside the log, with its name.")
    json_: Annotated[Path | None, tyro.conf.arg(name="json")] = Field(
        None, description="Also write the summaries to this file, as JSON."
    )
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Replace what this tool wrote before and nobody changed since."
    )


def main(argv: list[str]) -> int:
    """Read, summarise, draw and print."""
    arguments = parse(Arguments, argv, "profile log", __doc__)
    output = arguments.output or arguments.log.with_suffix(".png")
    made = (MADE_BY, arguments.overwrite)
    for path in filter(None, (output, arguments.json_)):
        if path.resolve() == arguments.log.resolve():
            raise ConfigError(f"{path} is the log itself; give another file to write to")
        refuse_file(path, *made)
    log = read_gpu_log(arguments.log)
    summaries = summarise(log)
    with made_file(output, *made) as building:
        draw_log(log, summaries, building)
    if arguments.json_ is not None:
        found = {"log": str(log.path), "start": log.start, "gpus": [summary.as_dict() for summary in summaries]}
        with made_file(arguments.json_, *made) as building:
            building.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    _print(log, summaries)
    print(f"written: {output}" + (f" and {arguments.json_}" if arguments.json_ else ""))
    return 0


def _print(log: GpuLog, summaries: list[GpuSummary]) -> None:
    console = result_console()
    table = next(iter(log.gpus.values()))
    console.print(Text(f"{log.path}: {table[TIME].iloc[-1]:.0f} s, a sample every {interval_s(table):.2g} s"))
    for summary in summaries:
        console.print(Text(f"\n{summary}", style="bold"))
        for advice in summary.advice:
            console.print(Text.assemble("  ", (advice.topic, "yellow"), f": {advice.finding}"))
            for action in advice.actions:
                console.print(Text(f"    to do: {action.text}"))
        for note in summary.notes:
            console.print(Text(f"  {note}", style="dim"))
