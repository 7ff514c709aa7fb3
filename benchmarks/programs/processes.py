"""Runs programs in processes of their own, which inherit nobody's memory, threads or process group."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.programs.memory_meter import MemoryMeter, Peak

REPOSITORY = Path(__file__).resolve().parents[2]
_END_TIMEOUT_S = 60.0
_LAST_CHARACTERS = 2000
_MARK = "peak of the work: "


def run_program(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a command to its end in the repository's root; return its standard output.

    Raises RuntimeError, with the end of its output, where it failed.
    """
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=os.environ | dict(environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with _ended_with_us(process):
        output, errors = process.communicate()
    if process.returncode:
        said = (output + errors)[-_LAST_CHARACTERS:]
        raise RuntimeError(f"{' '.join(command)} ended with code {process.returncode}: {said}")
    return output


def peak_of(function: str, arguments: Mapping[str, Any]) -> Peak:
    """Run ``module:function(meter, **arguments)`` in a fresh process, which calls the :class:`MemoryMeter`.

    The arguments travel as JSON. Raises RuntimeError, with the end of its output, where it failed.
    """
    output = run_program([sys.executable, "-m", __name__, function, json.dumps(arguments)])
    line = next(line for line in reversed(output.splitlines()) if line.startswith(_MARK))
    return Peak(*json.loads(line.removeprefix(_MARK)))


@contextmanager
def _ended_with_us(process: subprocess.Popen[str]) -> Iterator[None]:
    """Ask a launcher to end where this process is stopped: killed, it would leave its workers behind."""
    try:
        yield
    except BaseException:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def _measure(function: str, arguments: str) -> None:
    module, _, name = function.partition(":")
    work: Callable[..., None] = getattr(importlib.import_module(module), name)
    meter = MemoryMeter()
    work(meter, **json.loads(arguments))
    print(_MARK + json.dumps(meter.peak()), flush=True)


if __name__ == "__main__":
    _measure(*sys.argv[1:3])
