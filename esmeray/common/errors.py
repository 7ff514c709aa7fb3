"""The errors that a user can mend, each with its exit code, and how files are read so that they raise these.

A refusal is raised where the fact is known, says in one line what was wrong, where (file, record, line, key) and
what to do, and is caught once, at the command line (:mod:`esmeray.common.command_line`). Anything else that is raised
is a fault of the program and leaves with code 1.
"""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from esmeray.common.text import first_line, shortened

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class EsmerayError(Exception):
    """Base of every refusal, meant for the person at the terminal, with a line for each problem."""

    exit_code = 1
    retryable = False

    def __init__(self, *problems: str) -> None:
        # Libraries' messages have line breaks, and quote a file's text of any length: here, once for all refusals.
        self.problems = tuple(shortened(" ".join(problem.splitlines()), _LONGEST_PROBLEM) for problem in problems)
        super().__init__("; ".join(self.problems))

    def __reduce__(self) -> tuple[type["EsmerayError"], tuple[str, ...], dict[str, object]]:
        """Pickled with each problem: workers' errors travel to the driver."""
        return type(self), self.problems, self.__dict__


class ConfigError(EsmerayError):
    """Wrong usage, an unknown key, a wrong type or an impossible combination of settings (exit code 2)."""

    exit_code = 2


class DataError(EsmerayError):
    """Input or store that can't be read as it is (exit code 3)."""

    exit_code = 3


class UnknownRecordError(DataError, KeyError, IndexError):
    """An id or a number that a collection of records does not have, for callers who expect Python's own error, too."""

    __str__ = Exception.__str__  # KeyError's would show the quoted message


class ForkedError(ConfigError, RuntimeError):
    """Use of a store, a model or a client in a process that was forked after it was opened."""


FORKED = "opened before this process was forked: open it after the fork, or spawn the process"
"""Text of a :class:`ForkedError`, after the name of what was opened."""


def check_path(path: object, name: str) -> None:
    """Raise ConfigError for an argument of Python that can't be a path, such as None."""
    if not isinstance(path, (str, PathLike)):
        raise ConfigError(f"{name}: a path is needed, not {type(path).__name__}")


def expanded(path: str | PathLike[str]) -> Path:
    """The path with ~ and ~USER replaced by the home folder. Raises ConfigError if this machine knows no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: this machine knows no such user; write the path without ~") from error


@contextmanager
def naming_variables() -> Iterator[None]:
    """Errors of a new HTTP client, which reads proxies and CA files from the environment, as ConfigErrors.

    They name the variables and not their values, which may hold a password.
    """
    import httpx  # here: few need it

    try:
        yield
    except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
        names = ("ssl_cert_file",) if isinstance(error, OSError) else _PROXIES
        variables = " or ".join(name for name in os.environ if name.lower() in names)
        # httpx quotes what it takes for the port, which may be part of a password.
        reason = (
            "no URL; in no_proxy, addresses have no []" if isinstance(error, httpx.InvalidURL) else first_line(error)
        )
        raise ConfigError(f"{variables}: can't be used ({reason}); correct or unset it") from error


def refuse_special(path: Path | str) -> None:
    """Raise OSError for a FIFO, a socket or a device in place of a file: opening or reading it may never end.

    A pipe of the shell, ``<(COMMAND)`` or /dev/stdin, has no name in a folder and is accepted.
    """
    path = Path(path)
    if path.is_file() or path.is_dir() or not path.exists():  # what is missing, or a URI, is for whoever opens it
        return
    if not path.is_fifo() or path.resolve().exists():
        raise OSError(errno.EINVAL, "a named pipe, a socket or a device, not a file", str(path))


@contextmanager
def reading(path: Path | str, remedy: str | None = None) -> Iterator[None]:
    """Turn OSErrors of reading a file, including :func:`refuse_special`'s, into DataErrors."""
    try:
        refuse_special(path)
        yield
    except OSError as error:
        advice = "" if remedy is None else f"; {remedy}"
        raise DataError(f"{path}: can't be read: {error.strerror or error}{advice}") from error


# What parsers raise at bytes that they do not expect, deep nesting (RecursionError) and lengths beyond memory included.
_UNREADABLE = (ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
_LONGEST_PROBLEM = 1500
_LONGEST_REASON = 200
"""Characters: some parsers quote what they read."""


@contextmanager
def parsing(path: Path | str, remedy: str, *others: type[Exception]) -> Iterator[None]:
    """Whatever a parser raises at a file that is damaged, as a DataError of one line; ``others`` are a library's own.

    For no more than the parsing itself: a fault of the program in the block would be called damage, too.
    """
    unreadable: tuple[type[Exception], ...] = (*_UNREADABLE, *others)  # mypy takes no tuple that is made in the clause
    try:
        with reading(path, remedy):  # inside: what the system refuses is no damage
            yield
    except unreadable as error:
        raise DataError(f"{path}: damaged ({first_line(error)[:_LONGEST_REASON]}); {remedy}") from error


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The dictionary of a JSON file, which may be damaged, or made by others to do harm: it is read as data.

    Raises DataError, with the remedy, where it can't be read or is none.
    """
    with parsing(path, remedy):
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):  # else each reader would fail in its own way at the first key
            raise ValueError(f"a {type(content).__name__} where a dictionary belongs")
    return content


class ResourceError(EsmerayError):
    """Not enough workers, devices, memory or disk (exit code 4)."""

    exit_code = 4


class DiskFullError(ResourceError):
    """A disk, or a user's share of it, has no room left."""


class DivergenceError(EsmerayError):
    """Training produced NaN or infinite losses too many times in a row (exit code 5)."""

    exit_code = 5


class CheckpointError(EsmerayError):
    """A checkpoint is missing, damaged or belongs to another run (exit code 6)."""

    exit_code = 6
