"""Programs and functions in processes of their own, and the peak memory of their work.

On a CPU it is the resident memory of the process, and the private memory of its loader processes. On CUDA it is what
torch has reserved.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import psutil

from benchmarks.harness.stage import REPOSITORY

_MARK = "result of the work: "


def peak_memory() -> Callable[[], int]:
    """Return a function that gives the peak memory from now on, in bytes.

    On a CPU, what the process holds by now, such as its libraries, is subtracted.
    """
    from esmeray.model.device import choose_device  # here: they load torch, and run_measured needs a small process
    from esmeray.monitoring.sampling.memory_meter import MemoryMeter

    device = choose_device()
    meter = MemoryMeter(device)
    meter.free()
    before_bytes = 0 if device.type == "cuda" else meter.peak_bytes()

    def peak_bytes() -> int:
        children = psutil.Process().children() if device.type == "cpu" else ()
        return meter.peak_bytes() - before_bytes + sum(child.memory_full_info().uss for child in children)

    return peak_bytes


def call(function: str, /, **arguments: Any) -> Any:
    """Return the result of ``module:function`` in a fresh process.

    Arguments and result travel as JSON, dataclasses as dictionaries. Raises RuntimeError, with the end of the output,
    if the function failed.
    """
    command = [sys.executable, "-m", __name__, function]
    text = json.dumps(arguments, default=asdict)
    done = subprocess.run(command, cwd=REPOSITORY, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command!r} ended with code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    # After the mark: libraries may print on the way.
    return json.loads(done.stdout.rpartition(_MARK)[2])


def programs(commands: Mapping[str, str], folder: Path) -> dict[str, Callable[[], tuple[float, float]]]:
    """Return functions that run Python modules with arguments, ``{0}`` for the folder, as :func:`run_measured` does."""
    # Split before the folder is inserted, which may contain a blank.
    words = {name: [word.format(folder) for word in command.split()] for name, command in commands.items()}
    return {name: partial(call, f"{__name__}:run_measured", words=own) for name, own in words.items()}


def run_measured(words: list[str]) -> tuple[float, float]:
    """Return seconds and peak resident MB of a Python module with its arguments.

    In a small process of its own: Linux also counts what a process held before it became another program.
    """
    start_s = time.perf_counter()
    subprocess.run([sys.executable, "-m", *words], stdout=sys.stderr, check=True)
    return time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6


def _main(function: str) -> None:
    result = resolve_name(function)(**json.load(sys.stdin))
    print(_MARK + json.dumps(result, default=asdict), flush=True)
    os._exit(0)  # gloo's threads sometimes abort at a normal exit ("terminate called")


if __name__ == "__main__":
    _main(sys.argv[1])
