"""Output and end of every command: one line per problem, and an exit code that scripts can act on.

In: a ``main(argv) -> int``. Out: one of these exit codes:

- the one that ``main`` returned
- the exit code of the :class:`~esmeray.common.errors.EsmerayError` that it raised
- 128 + the number of the signal that ended it
- 1 for any other exception, which is a bug and keeps its traceback

A command finishes its work even if its output can't be written.
"""

import errno
import io
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from esmeray.common.errors import ConfigError, EsmerayError, ResourceError

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + the number of SIGINT, as shells report it."""
CLUSTER_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals, next to Ctrl-C's SIGINT, that ask a command to end. They come from Kubernetes and Slurm, a terminal that
closes, batch systems before a time limit (Slurm's ``--signal=USR1@120``, SGE, LSF), or the kernel at its CPU limit."""
_DISK = {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE}
"""Error numbers of disk failures, which are reported without a traceback."""
_UNWRAPPED_WIDTH = 10_000
LIBRARIES = ("DeepSpeed", "huggingface_hub", "transformers")
"""Loggers that write to the terminal by default."""


class _Output(io.FileIO):
    """A standard stream that never raises: ``failure`` holds the first error until the work is done."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = self.failure or error
            return len(data)


class _LogFile(logging.FileHandler):
    """A log file whose write errors don't end the command: the first one is a warning, and later lines are dropped."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        warn(f"{self.baseFilename}: writing failed, so the log file ends here: {sys.exc_info()[1]}")
        self.setLevel(logging.CRITICAL + 1)


def end_process(main: Callable[[list[str]], int]) -> NoReturn:
    """Run this process's command line and exit with its code.

    If stdout can't be written, the error is reported after the work, with the exit code of ResourceError. A closed pipe
    (``... | head``) is no error.
    """
    if sys.getfilesystemencoding() == "ascii":
        # An ASCII locale can't encode all file names. UTF-8 mode can, here and in child processes.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    output = _open_streams()
    received = []

    def end(signum: int, frame: FrameType | None) -> None:
        # Handle the first signal only: the kernel repeats SIGXCPU every second, and some tools signal a process and
        # then its group. Ctrl-C still interrupts the clean-up. Ray's waits (2.60) pass on KeyboardInterrupt only.
        signal.signal(signum, signal.SIG_IGN)
        received.append(signum)
        raise KeyboardInterrupt

    for signum in CLUSTER_SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:  # below nohup SIGHUP stays ignored
            signal.signal(signum, end)
    try:
        code: Any = run(main)
    except SystemExit as error:  # --help
        code = error.code
    if received:
        code = 128 + received[0]
    sys.stdout.flush()
    if output.failure is not None and output.failure.errno != errno.EPIPE:
        print(f"error: stdout can't be written: {output.failure.strerror}", file=sys.stderr)
        code = code or ResourceError.exit_code
    sys.exit(code)


def _open_streams() -> _Output:
    """Reopen closed standard streams, and guard stdout and stderr against write errors; return stdout's file."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest free descriptor is the closed one. Otherwise the next opened file would get it, and with it
            # the output of libraries.
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 - as long as the process
    files = []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        files.append(_Output(stream.fileno(), "w", closefd=False))
        # backslashreplace: a file name that can't be encoded must not fail. write_through is set by python -u.
        text = io.TextIOWrapper(
            io.BufferedWriter(files[-1]),
            stream.encoding,
            errors="backslashreplace",
            line_buffering=stream.line_buffering or stream.write_through,
        )
        setattr(sys, name, text)
    return files[0]


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Keep the signals of clusters from processes that are started in the block.

    These signals often go to a whole process group or job. This process handles them after the block, and ends its
    children in order. Ctrl-C is not blocked; the code that starts a process has to shield it from Ctrl-C.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, CLUSTER_SIGNALS)  # children inherit the mask
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(main: Callable[[list[str]], int], argv: list[str] | None = None) -> int:
    """Call ``main`` (default: with this process's arguments); errors become one line and an exit code."""
    try:
        return main(sys.argv[1:] if argv is None else argv)
    except EsmerayError as error:
        for problem in error.problems:
            print(f"error: {problem.strip()}", file=sys.stderr)
        return error.exit_code
    except UnicodeEncodeError as error:  # a file name; files themselves are written as UTF-8
        name = ascii(error.object[max(0, error.start - 60) : error.end])
        print(
            f"error: {name}: the rest of the name can't be encoded as {error.encoding}; rename the file",
            file=sys.stderr,
        )
        return ConfigError.exit_code
    except OSError as error:
        if error.errno not in _DISK:
            raise
        print(f"error: {error.filename or 'a file'}: can't be read or written: {error.strerror}", file=sys.stderr)
        return ResourceError.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def say(text: str) -> None:
    print(text, flush=True)


def next_command(*words: object) -> str:
    """Last line of a command's output: the command to run next, quoted for the shell."""
    return f"next: esmeray {shlex.join(map(str, words))}"


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def program_of(command: str) -> str:
    """How the user starts this command, e.g. ``esmeray train`` or ``python train_ray.py``."""
    name = Path(sys.argv[0]).name
    if name in ("train_ray.py", "serve_ray.py"):
        return f"python {name}"
    if name == "esmeray":
        return f"esmeray {command}"
    return f"python -m {'benchmarks' if Path(sys.argv[0]).parent.name == 'benchmarks' else 'esmeray.tools'} {command}"


@contextmanager
def logged_to(path: Path, line: str) -> Iterator[None]:
    """Append log records of level INFO or above to a file instead of the terminal; ``line`` is their format.

    This covers Python's warnings and :data:`LIBRARIES`, which install their own handlers on import. Import them before
    the block.
    """
    handler = _LogFile(path, delay=True)  # no file if nothing is logged
    handler.setFormatter(logging.Formatter(line))
    root = logging.getLogger()
    level = root.level
    own_handlers = {library: library.handlers for library in map(logging.getLogger, LIBRARIES)}
    for library in own_handlers:
        library.handlers = []
        library.propagate = True  # to the root, which has the file
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        root.setLevel(level)
        for library, handlers in own_handlers.items():
            library.handlers = handlers
        with suppress(OSError):
            handler.close()


def result_console() -> Console:
    """Console for the results of a command; lines are not wrapped in a file or pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _UNWRAPPED_WIDTH)
