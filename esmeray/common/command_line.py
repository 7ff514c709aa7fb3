"""Output and end of every command: a line for each thing to mend, and an exit code that scripts can act on.

In: a ``main(argv) -> int``. Out: its exit code; that of the :class:`~esmeray.common.errors.EsmerayError` that it
raised; or 128 + the number of the signal that ended it. Anything else that is raised is a fault of the program, keeps
its traceback and leaves with code 1. No command fails because its output can't be written: its work comes first.
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
"""Signals, next to Ctrl-C's SIGINT, that ask a command to end: from Kubernetes and Slurm; a terminal that closes; batch
systems before a time limit (``--signal=USR1@120`` of Slurm, SGE, LSF); the kernel at a limit of CPU time."""
_DISK = {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE}
"""Errors of a disk, which are no faults of the program wherever they are met."""
_UNWRAPPED_WIDTH = 10_000
LIBRARIES = ("DeepSpeed", "huggingface_hub", "transformers")
"""Loggers that write to the terminal, whoever uses the library."""


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
    """A log file that ends no command: the first error is a warning, and the lines after it are lost."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        warn(f"{self.baseFilename}: can't be written any more: {sys.exc_info()[1]}")
        self.setLevel(logging.CRITICAL + 1)


def end_process(main: Callable[[list[str]], int]) -> NoReturn:
    """Run this process's command line and exit with its code.

    What could not be written to stdout is reported after the work, with the exit code of ResourceError. A reader that
    has seen enough (``... | head``) is no error.
    """
    if sys.getfilesystemencoding() == "ascii":
        # Other people's file names can't be encoded in an ASCII locale. UTF-8 mode, also of child processes, reads and
        # prints them.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    output = _open_streams()
    received = []

    def end(signum: int, frame: FrameType | None) -> None:
        # Once: the kernel repeats SIGXCPU every second, and some tools signal a process and then its group. Ctrl-C
        # still breaks off the clean-up. Ray's waits (2.60) pass on nothing else that a handler raises.
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
    """Open stdin, stdout and stderr if they are closed, and guard stdout and stderr; returns stdout's file."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest free descriptor is the closed one. The next file to be opened would get it otherwise, and with
            # it what libraries print.
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 - as long as the process
    files = []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        files.append(_Output(stream.fileno(), "w", closefd=False))
        # A file name that the encoding lacks is no reason to fail either. write_through: of python -u.
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

    A whole process group or job gets them, but this process answers them, after the block, and ends its children in
    order. Ctrl-C is answered at once; whoever starts a process keeps it from that otherwise.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, CLUSTER_SIGNALS)  # children inherit the mask
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(main: Callable[[list[str]], int], argv: list[str] | None = None) -> int:
    """Call ``main`` (default: with this process's arguments); what it raises becomes a line and an exit code."""
    try:
        return main(sys.argv[1:] if argv is None else argv)
    except EsmerayError as error:
        for problem in error.problems:
            print(f"error: {problem.strip()}", file=sys.stderr)
        return error.exit_code
    except UnicodeEncodeError as error:  # a file name; files themselves are written as UTF-8
        name = ascii(error.object[max(0, error.start - 60) : error.end])
        print(f"error: {name}: the end can't be encoded as {error.encoding}; rename the file", file=sys.stderr)
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
    """The line at the end of a command that has the command to type next, quoted as a shell needs it."""
    return f"next: esmeray {shlex.join(map(str, words))}"


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def program_of(command: str) -> str:
    """The words that start a command, as this process was started."""
    name = Path(sys.argv[0]).name
    if name in ("train_ray.py", "serve_ray.py"):
        return f"python {name}"
    if name == "esmeray":
        return f"esmeray {command}"
    return f"python -m {'benchmarks' if Path(sys.argv[0]).parent.name == 'benchmarks' else 'esmeray.tools'} {command}"


@contextmanager
def logged_to(path: Path, line: str) -> Iterator[None]:
    """Append all that is logged in the block, at INFO or above, to a file, in lines of this format, and to no terminal.

    So with Python's warnings, and with libraries whose loggers write to the terminal by handlers of their own, which
    they have made when they were imported: whoever enters the block has imported them.
    """
    handler = _LogFile(path, delay=True)  # no file where nothing is logged
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
    """A console for the results of a command; into a file or pipe nothing is wrapped."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _UNWRAPPED_WIDTH)
