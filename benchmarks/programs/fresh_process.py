"""Peak memory of a piece of work, in a process of its own that has done nothing else.

In: ``module:function`` and its arguments as JSON. Out: the :class:`Peak` of its memory. The child imports the module
and calls the function with a :class:`Meter`, which the function tells when its libraries are loaded and when the work
begins; both are the same for all contenders of a case.

On Linux the peak is VmHWM of /proc/self/status, set back when the work begins (Linux' proc(5): clear_refs).
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_REPOSITORY = Path(__file__).resolve().parents[2]
_SET_PEAK_BACK = "5"
_MARK = "peak of the work: "


class Peak(NamedTuple):
    """What the work took.

    Attributes:
        host_bytes: largest resident memory during the work, less that of the process with its libraries loaded.
        device_bytes: largest memory that torch had allocated on the GPU; 0 where there is none.
        total_bytes: largest resident memory during the work, libraries and all.
    """

    host_bytes: int
    device_bytes: int
    total_bytes: int


class Meter:
    """Passed to the function that is measured."""

    def __init__(self) -> None:
        self._loaded_bytes = 0

    def libraries_loaded(self) -> None:
        """Everything is imported: what is taken from here on belongs to the work."""
        self._loaded_bytes = _status_bytes("VmRSS")

    def work_begins(self) -> None:
        """What is needed is there (weights, say): peaks before this, of setting up, don't count."""
        Path("/proc/self/clear_refs").write_text(_SET_PEAK_BACK)
        if _uses_cuda():
            import torch

            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> Peak:
        """The peak since the work began."""
        total = _status_bytes("VmHWM")
        device = 0
        if _uses_cuda():
            import torch

            device = torch.cuda.max_memory_allocated()
        return Peak(total - self._loaded_bytes, device, total)


def peak_of(function: str, arguments: dict[str, Any]) -> Peak:
    """Run ``module:function(meter, **arguments)`` in a fresh process.

    Raises:
        RuntimeError: it failed; its last words are in the message.
    """
    command = [sys.executable, "-m", "benchmarks.programs.fresh_process", function, json.dumps(arguments)]
    child = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, check=False)
    lines = [line for line in child.stdout.splitlines() if line.startswith(_MARK)]
    if child.returncode or not lines:
        raise RuntimeError(f"{function} failed in its process ({child.returncode}): {child.stderr[-2000:]}")
    return Peak(*json.loads(lines[-1].removeprefix(_MARK)))


def _run_child(function: str, arguments: str) -> None:
    module, _, name = function.partition(":")
    work: Callable[..., None] = getattr(importlib.import_module(module), name)
    meter = Meter()
    work(meter, **json.loads(arguments))
    print(_MARK + json.dumps(meter.peak()), flush=True)


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}: memory can be measured on Linux only")


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    return bool(torch and torch.cuda.is_available())


if __name__ == "__main__":
    # Under its real name, so that the function's module and this one share their classes.
    importlib.import_module("benchmarks.programs.fresh_process")._run_child(*sys.argv[1:3])
