"""Programs and functions in processes of their own, and the peak memory of a piece of work there.

On the CPU it is the resident memory of the process, whose peak Linux keeps (``VmHWM``) and lets a process reset
(proc(5), ``clear_refs``), and what its loader processes hold for themselves; on CUDA it is what torch has allocated.
torch is not imported here: a conversion is measured in a process without it.
"""

import ctypes
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from benchmarks.harness.stage import REPOSITORY

_MARK = "result of the work: "


class Peak(NamedTuple):
    """Peak memory of the work: on the device that computes; resident, with the libraries."""

    computing_bytes: int
    total_bytes: int


class MemoryMeter:
    """Peak memory from now on; what the process holds by now, its libraries, does not belong to the work.

    ``trim``: give back first what building left behind.
    """

    def __init__(self, trim: bool = False) -> None:
        cuda = _cuda()
        if trim:
            gc.collect()
            if cuda:
                cuda.empty_cache()
            ctypes.CDLL(None).malloc_trim(0)
        self._loaded_bytes = status_bytes("VmRSS")
        self.work_begins()

    def work_begins(self) -> None:
        """Forget the peak so far, that of setting up."""
        Path("/proc/self/clear_refs").write_text("5")
        # Asked again: a library that is loaded while the work is set up may have brought torch.
        cuda = _cuda()
        if cuda:
            cuda.reset_peak_memory_stats()

    def peak(self) -> Peak:
        """The peak since the work began."""
        total = status_bytes("VmHWM")
        import psutil  # after the reading: its memory is not the work's

        total += sum(child.memory_full_info().uss for child in psutil.Process().children())
        cuda = _cuda()
        return Peak(cuda.max_memory_allocated() if cuda else total - self._loaded_bytes, total)


def status_bytes(key: str) -> int:
    """A size of this process as Linux keeps it (proc(5), ``status``)."""
    line = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    if line is None:
        raise RuntimeError(f"/proc/self/status has no {key}: memory can be measured on Linux only")
    return int(line[1]) * 1024


def _cuda() -> Any:
    """``torch.cuda`` where torch is loaded and finds a GPU."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch and torch.cuda.is_available() else None


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str] | None = None, **pipes: Any
) -> Iterator[subprocess.Popen[str]]:
    """A program in the repository's root for the length of the block, after which it is asked to end.

    It is killed only where it does not: a launcher that is killed would leave its workers behind.
    """
    # In a session of its own: Ctrl-C in the terminal is for the benchmark, which then ends the program in order.
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=os.environ | dict(environment or {}), text=True, start_new_session=True, **pipes
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)  # nothing where it has ended
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


def run_program(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a command to its end; return its standard output.

    Raises RuntimeError, with the end of its output, where it failed.
    """
    with started(command, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        return _output(process)


@contextmanager
def begun(function: str, /, **arguments: Any) -> Iterator[Callable[[], Any]]:
    """``module:function`` at work in a fresh process; yields a callable that waits for its end and gives its result.

    Arguments and result travel as JSON, dataclasses as dictionaries. The callable raises RuntimeError, with the end of
    the output, where the function failed.
    """
    # A file and no pipe: arguments such as thousands of proteins would fill it before the process reads.
    with tempfile.TemporaryFile("w+") as stdin:
        json.dump(arguments, stdin, default=asdict)
        stdin.seek(0)
        pipes: dict[str, Any] = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with started([sys.executable, "-m", __name__, function], **pipes) as process:
            # Behind the mark: whatever libraries print on the way is not the result.
            yield lambda: json.loads(_output(process).rpartition(_MARK)[2])


def call(function: str, /, **arguments: Any) -> Any:
    """The result of a function in a fresh process; see :func:`begun`."""
    with begun(function, **arguments) as result:
        return result()


def peak_of(function: str, /, **arguments: Any) -> Peak:
    """The peak memory of a function in a fresh process, without what its module loads."""
    return Peak(*call(f"{__name__}:metered", function=function, arguments=arguments))


def metered(function: str, arguments: dict[str, Any]) -> Peak:
    """The peak memory of a function in this process."""
    work = resolve_name(function)
    meter = MemoryMeter()  # after the import: libraries are no part of the work
    work(**arguments)
    return meter.peak()


def _output(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{process.args!r} ended with code {process.returncode}: {(output + errors)[-2000:]}")
    return output


def _main(function: str) -> None:
    result = resolve_name(function)(**json.load(sys.stdin))
    print(_MARK + json.dumps(result, default=asdict), flush=True)
    os._exit(0)  # on the way out gloo's threads now and then abort ("terminate called")


if __name__ == "__main__":
    _main(sys.argv[1])
