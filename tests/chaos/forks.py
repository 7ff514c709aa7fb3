"""Commands in forks of this process, which has imported their modules: a start takes milliseconds."""

import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from esmeray.common import command_line
from esmeray.tools import __main__ as esmeray

LIMIT_S, MEMORY_BYTES = 120, 6 * 2**30
"""Limits per command in seconds and bytes. No file here has a megabyte, so a command that reaches a limit is wrong."""
Call = Callable[[], Any]


def command(words: str) -> Call:
    return lambda: esmeray.main(words.split())


def ended(call: Call, place: Path, limit_s: int, *files: Path) -> int:
    """Run a call in a fork, in ``place``, and return its exit code; ``files``: files for stdout and stderr."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        in_fork(call, place, limit_s, *files)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(ProcessLookupError):  # processes that a killed command started
        os.killpg(pid, signal.SIGKILL)
    return code


def in_fork(call: Call, place: Path, limit_s: int, *files: Path) -> None:
    """Run a call in ``place`` like a command, and end this process."""
    code = 1
    try:
        signal.alarm(limit_s)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        for number, path in enumerate(files, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # pytest has replaced the original streams
        os.chdir(place)
        made = command_line.run(lambda _: call(), [])
        code = made if isinstance(made, int) else 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
