"""Programs and functions in processes of their own, and the peak memory of their work.

On a CPU it is the resident memory of the process, whose peak Linux records (``VmHWM``) and lets a process reset
(proc(5), ``clear_refs``), and the private memory of its loader processes. On CUDA it is what torch has allocated.
"""

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import psutil

from benchmarks.harness.stage import REPOSITORY

_MARK = "result of the work: "


class MemoryMeter:
    """Peak memory from now on. What the process holds by now, such as its libraries, is subtracted."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        cuda = _cuda()
        if cuda:
            cuda.empty_cache()
            cuda.reset_peak_memory_stats()
        self._before_bytes = _status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Return the peak on the device that computes."""
        cuda = _cuda()
        if cuda:
            return int(cuda.max_memory_allocated())
        own = _status_bytes("VmHWM") - self._before_bytes
        return own + sum(child.memory_full_info().uss for child in psutil.Process().children())


def _status_bytes(key: str) -> int:
    """Return a size of this process (proc(5), ``status``)."""
    kilobytes = Path("/proc/self/status").read_text(encoding="ascii").partition(f"{key}:")[2].split()[0]
    return 1024 * int(kilobytes)


def _cuda() -> Any:
    """Return ``torch.cuda`` if torch is loaded and finds a GPU."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch and torch.cuda.is_available() else None


@contextmanager
def started(command: Sequence[str], **pipes: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a program in the repository's root for the length of the block, then send it SIGTERM.

    It is killed only if it does not end: a killed launcher would leave its workers behind.
    """
    # In a session of its own: Ctrl-C in the terminal reaches the benchmark only, which then ends the program.
    process = subprocess.Popen(command, cwd=REPOSITORY, text=True, start_new_session=True, **pipes)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)  # no effect if it has ended
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


@contextmanager
def begun(function: str, /, **arguments: Any) -> Iterator[Callable[[], Any]]:
    """Start ``module:function`` in a fresh process; yield a callable that waits for its end and returns its result.

    Arguments and result travel as JSON, dataclasses as dictionaries. The callable raises RuntimeError, with the end of
    the output, if the function failed.
    """
    # A file and not a pipe: arguments such as thousands of proteins would fill it before the process reads.
    with tempfile.TemporaryFile("w+") as stdin:
        json.dump(arguments, stdin, default=asdict)
        stdin.seek(0)
        pipes: dict[str, Any] = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with started([sys.executable, "-m", __name__, function], **pipes) as process:
            yield lambda: _result(process)


def call(function: str, /, **arguments: Any) -> Any:
    """Return the result of a function in a fresh process; see :func:`begun`."""
    with begun(function, **arguments) as result:
        return result()


def _result(process: subprocess.Popen[str]) -> Any:
    output, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{process.args!r} ended with code {process.returncode}: {(output + errors)[-2000:]}")
    # After the mark: libraries may print on the way.
    return json.loads(output.rpartition(_MARK)[2])


def _main(function: str) -> None:
    result = resolve_name(function)(**json.load(sys.stdin))
    print(_MARK + json.dumps(result, default=asdict), flush=True)
    os._exit(0)  # gloo's threads sometimes abort at a normal exit ("terminate called")


if __name__ == "__main__":
    _main(sys.argv[1])
