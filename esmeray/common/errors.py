"""Errors that a user can fix, each with its exit code, their messages, and helpers that read files and raise them.

A message is one line: the problem, its location (file, record, line, key) and the remedy. The errors are caught once,
at the command line (:mod:`esmeray.common.command_line`). Any other exception is a bug and exits with code 1.
"""

import difflib
import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class EsmerayError(Exception):
    """Base class of all errors for the user, with one line per problem."""

    exit_code = 1
    retryable = False

    def __init__(self, *problems: str) -> None:
        # Messages of libraries have line breaks, and may quote long text from a file.
        self.problems = tuple(shortened(" ".join(problem.splitlines()), _MAX_PROBLEM_LENGTH) for problem in problems)
        super().__init__("; ".join(self.problems))

    def __reduce__(self) -> tuple[type["EsmerayError"], tuple[str, ...], dict[str, object]]:
        """Pickle every problem: workers' errors travel to the driver."""
        return type(self), self.problems, self.__dict__


class ConfigError(EsmerayError):
    """Wrong usage, an unknown key, a wrong type or an impossible combination of settings (exit code 2)."""

    exit_code = 2


class DataError(EsmerayError):
    """Unreadable or invalid input or store (exit code 3)."""

    exit_code = 3


class UnknownRecordError(DataError, KeyError, IndexError):
    """Unknown id or row number of a collection of records; also a KeyError and an IndexError."""

    __str__ = Exception.__str__  # KeyError's would show the quoted message


class ForkedError(ConfigError, RuntimeError):
    """Use of a store, a model or a client in a process that was forked after it was opened."""


FORKED = "opened before this process was forked; open it after the fork, or use the spawn start method"
"""Message of a :class:`ForkedError`, after the name of the store, model or client."""


def expanded(path: str | PathLike[str]) -> Path:
    """The path with ~ and ~USER replaced by the home folder. Raises ConfigError for no path or an unknown user."""
    try:
        return Path(path).expanduser()
    except TypeError as error:
        raise ConfigError(f"{path!r}: expected a path, found {type(path).__name__}") from error
    except RuntimeError as error:
        raise ConfigError(f"{path}: unknown user; write the path without ~") from error


@contextmanager
def naming_variables() -> Iterator[None]:
    """Turn errors of creating an HTTP client into ConfigErrors; it reads proxies and CA files from the environment.

    Messages name the variables without their values, which may contain a password.
    """
    import httpx  # here: few need it

    try:
        yield
    except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
        names = ("ssl_cert_file",) if isinstance(error, OSError) else _PROXIES
        variables = " or ".join(name for name in os.environ if name.lower() in names)
        # httpx quotes the supposed port, which may be part of a password.
        reason = (
            "not a URL; in no_proxy, write IPv6 addresses without []"
            if isinstance(error, httpx.InvalidURL)
            else first_line(error)
        )
        raise ConfigError(f"{variables}: can't be used ({reason}); correct or unset it") from error


def refuse_special(path: Path | str) -> None:
    """Raise OSError for a FIFO, a socket or a device that is given as a file: opening or reading it may block forever.

    A pipe of the shell, ``<(COMMAND)`` or /dev/stdin, has no name in a folder and is accepted.
    """
    path = Path(path)
    if path.is_file() or path.is_dir() or not path.exists():  # the caller reports missing files and opens URIs
        return
    if not path.is_fifo() or path.resolve().exists():
        raise OSError(errno.EINVAL, "a named pipe, socket or device, not a regular file", str(path))


@contextmanager
def reading(path: Path | str, remedy: str | None = None) -> Iterator[None]:
    """Turn OSErrors of reading a file, including :func:`refuse_special`'s, into DataErrors."""
    try:
        refuse_special(path)
        yield
    except OSError as error:
        advice = "" if remedy is None else f"; {remedy}"
        raise DataError(f"{path}: can't be read: {error.strerror or error}{advice}") from error


# Exceptions that parsers raise on unexpected bytes, deep nesting (RecursionError) and lengths beyond memory included.
_UNREADABLE = (ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
_MAX_PROBLEM_LENGTH = 1500
_MAX_REASON_LENGTH = 200
"""Maximum length in characters: some parsers quote their input."""


@contextmanager
def parsing(path: Path | str, remedy: str, *others: type[Exception]) -> Iterator[None]:
    """Turn a parser's errors into a one-line DataError; ``others`` are further exceptions of the parser's library.

    Put only the parsing in the block: a bug in it would be reported as a damaged file, too.
    """
    unreadable: tuple[type[Exception], ...] = (*_UNREADABLE, *others)  # mypy takes no tuple that is made in the clause
    try:
        with reading(path, remedy):  # inside: an OSError means unreadable, not damaged
            yield
    except unreadable as error:
        raise DataError(f"{path}: damaged ({first_line(error)[:_MAX_REASON_LENGTH]}); {remedy}") from error


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Return the dictionary of a JSON file, which may be damaged or untrusted.

    Raises DataError, with the remedy, if the file can't be read or holds no dictionary.
    """
    with parsing(path, remedy):
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):  # otherwise each caller would fail differently at the first key
            raise ValueError(f"expected a dictionary, found a {type(content).__name__}")
    return content


class ResourceError(EsmerayError):
    """Not enough workers, devices, memory or disk (exit code 4)."""

    exit_code = 4


class DiskFullError(ResourceError):
    """Disk full, or the user's quota exceeded."""


class DivergenceError(EsmerayError):
    """Training produced NaN or infinite losses too many times in a row (exit code 5)."""

    exit_code = 5


class CheckpointError(EsmerayError):
    """A checkpoint is missing, damaged or belongs to another run (exit code 6)."""

    exit_code = 6


UNUSABLE: dict[str, str] = {}
"""Reasons why additions of other packages can't be used, by name; esmeray/installation.py fills it."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Hint in brackets for an unknown name: the most similar known one, ignoring case; empty if none is similar.

    For an unusable addition of another package, or an option of it, the hint is the reason.
    """
    reasons = [UNUSABLE[part] for part in name.lstrip("-").split(".") if part in UNUSABLE]
    if reasons:
        return f" ({reasons[0]})"
    spelled = {word.lower(): word for word in sorted(known)}  # sorted: ties always give the same hint
    near = difflib.get_close_matches(name.lower(), spelled, n=1)
    return f" (did you mean {spelled[near[0]]}?)" if near else ""


def refusal(error: Mapping[str, Any]) -> str:
    """Message of one pydantic error, with the rejected value unless the message is Esmeray's own."""
    message: str = error["msg"].removeprefix("Value error, ")
    if error["type"] == "literal_error":
        message += did_you_mean(str(error["input"]), ())
    return (
        message if error["type"] == "value_error" else f"{message[0].lower()}{message[1:]}, got {error['input']!r:.200}"
    )


def shortened(text: str, longest: int) -> str:
    """Cut the middle of a text longer than ``longest`` characters: problem first, remedy last."""
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"


def first_line(error: BaseException) -> str:
    """First line of an error's message, or its type if the message is empty."""
    return _lines(error)[0]


def last_line(error: BaseException) -> str:
    """Last line of an error's message; Ray puts a traceback before it."""
    return _lines(error)[-1]


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
