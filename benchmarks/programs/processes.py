"""Runs programs in processes of their own, and measures the peak memory of a piece of work there.

On the CPU it is the resident memory of the process, whose peak Linux keeps (``VmHWM``) and lets a process reset
(proc(5), ``clear_refs``), and what its loader processes hold for themselves; on CUDA it is what torch has allocated.
torch is not imported here: a conversion is measured in a process without it.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
_END_TIMEOUT_S = 60.0
_LAST_CHARACTERS = 2000
_MARK = "peak of the work: "
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"


class Peak(NamedTuple):
    """Peak memory of the work: resident, less that at :meth:`MemoryMeter.libraries_loaded`; what torch had allocated on
    the GPU, None without one; resident with the libraries."""

    host_bytes: int
    device_bytes: int | None
    total_bytes: int

    @property
    def computing_bytes(self) -> int:
        """Memory of the device that computes."""
        return self.host_bytes if self.device_bytes is None else self.device_bytes


class MemoryMeter:
    """Measures from :meth:`work_begins` on."""

    def __init__(self) -> None:
        self._loaded_bytes = 0

    def libraries_loaded(self) -> None:
        """Start to count: memory that the process holds by now does not belong to the work."""
        self._loaded_bytes = _status_bytes("VmRSS")

    def work_begins(self) -> None:
        """Forget the peak so far, that of setting up."""
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        if cuda := _cuda():
            cuda.reset_peak_memory_stats()

    def model_built(self) -> None:
        """Give back what building left behind, leave the rest out, and begin."""
        gc.collect()
        if cuda := _cuda():
            cuda.empty_cache()
        ctypes.CDLL(None).malloc_trim(0)
        self.libraries_loaded()
        self.work_begins()

    def peak(self) -> Peak:
        """The peak since the work began."""
        total = _status_bytes("VmHWM")
        import psutil  # after the reading: its memory is not the work's

        total += sum(child.memory_full_info().uss for child in psutil.Process().children())
        cuda = _cuda()
        return Peak(total - self._loaded_bytes, cuda.max_memory_allocated() if cuda else None, total)


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {key}: memory can be measured on Linux only")


def _cuda() -> Any:
    """``torch.cuda`` where torch is loaded and finds a GPU."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch and torch.cuda.is_available() else None


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
