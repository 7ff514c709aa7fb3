"""Log this machine's GPUs to a CSV file, whatever uses them.

Writes a row for each GPU and sample, as nvidia-smi does: load, memory, temperature, power, clocks and throttle reasons.
Ctrl-C ends it. An existing log is appended to. 'esmeray profile log' summarises and draws a log.

Examples:
  esmeray profile monitor
  esmeray profile monitor --output run.csv --interval 0.5 --duration 600
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import Field, PositiveFloat

from common.arguments import ToolArguments, parse
from common.text import counted
from monitoring.gpu_log.recording import record_gpus


class Arguments(ToolArguments):
    """GPUs to log, and for how long."""

    output: Path = Field(Path("gpu_log.csv"), description="The CSV file; appended to if it is there.")
    interval: float = Field(
        1.0, ge=0.05, description="Seconds between samples; GPUs measure no faster than every 0.05."
    )
    duration: PositiveFloat | None = Field(None, description="Seconds after which to end. Default: at Ctrl-C.")
    gpu: list[int] = Field([], description="Numbers of the GPUs to log, as nvidia-smi shows them. Default: all.")


def main(argv: list[str]) -> int:
    """Sample until Ctrl-C or the end of the duration."""
    arguments = parse(Arguments, argv, "profile monitor", __doc__)
    samples = record_gpus(arguments.output, arguments.interval, arguments.duration, arguments.gpu, _warn)
    print(f"{counted(samples, 'sample{s}')}: {arguments.output}")
    return 0


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)
