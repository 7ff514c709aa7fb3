"""Output and end of every command: a line for each thing to mend, and an exit code that scripts can act on.

In: a ``main(argv) -> int``. Out: its exit code; that of the :class:`~esmeray.common.errors.EsmerayError` that it
raised; or 130 after Ctrl-C. Anything else that is raised is a fault of the program, keeps its traceback and leaves with
code 1.
"""

import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from esmeray.common.errors import EsmerayError

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after SIGINT and SIGTERM (128 + the signal's number), as shells report them."""
_UNWRAPPED_WIDTH = 10_000
LIBRARIES = ("DeepSpeed", "huggingface_hub", "transformers")
"""Loggers that write to the terminal, whoever uses the library."""


def run(main: Callable[[list[str]], int], argv: list[str] | None = None) -> int:
    """Call ``main`` (default: with this process's arguments); what it raises becomes a line and an exit code."""
    try:
        return main(sys.argv[1:] if argv is None else argv)
    except EsmerayError as error:
        for problem in error.problems:
            print(f"error: {problem.strip()}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`... | head`) has seen enough. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


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
    handler = logging.FileHandler(path, delay=True)  # no file where nothing is logged
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
        handler.close()


def result_console() -> Console:
    """A console for the results of a command; into a file or pipe nothing is wrapped."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _UNWRAPPED_WIDTH)
