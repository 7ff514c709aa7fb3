"""Command-line arguments: tyro parses them, and a mistake is one line with the option, what is wrong and the usage."""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stdout, suppress
from typing import Any, TypeVar

import tyro
from pydantic import BaseModel, ValidationError
from tyro import _errors as failures  # private in tyro 1.0.17: the only way to a failure other than a printed box

from common.command_line import program_of
from common.errors import ConfigError
from common.text import did_you_mean, refusal

Arguments = TypeVar("Arguments")


class ToolArguments(BaseModel):
    """Base of a tool's arguments; raises ConfigError with the option of a value that is refused."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(_describe(problem) for problem in error.errors())) from None


class _RefusedError(Exception):
    """Carries tyro's report of a mistake past its printing."""


def parse(kind: type[Arguments], argv: list[str], tool: str, description: str | None = None, **options: Any) -> Any:
    """The arguments of a tool, an instance of ``kind``; prints its help and ends the process where that is asked for.

    The description, the opening of the help, is by default the docstring of ``kind``; options are those of
    :func:`tyro.cli`. Raises ConfigError for an argument that is missing, unknown or wrong.
    """
    program = program_of(tool)

    def refuse(event: failures.ParseErrorEvent) -> None:
        raise _RefusedError(event)

    try:
        with failures.on_parse_error(refuse):
            return tyro.cli(kind, args=argv, prog=program, description=description, **options)
    except _RefusedError as refused:
        help_text = _help_text(kind, program, options)
        usage = " ".join(help_text.partition("\n\n")[0].split())
        problem = _unknown(argv, help_text) or _problem(refused.args[0])
        raise ConfigError(f"{problem}; {usage}") from None


def _help_text(kind: type[Any], program: str, options: dict[str, Any]) -> str:
    """The help, unwrapped."""
    text = io.StringIO()
    options = {name: value for name, value in options.items() if name not in ("add_help", "return_unknown_args")}
    columns = os.environ.get("COLUMNS", "")
    os.environ["COLUMNS"] = "100000"
    with redirect_stdout(text), suppress(SystemExit):
        tyro.cli(kind, args=["--help"], prog=program, **options)
    os.environ["COLUMNS"] = columns  # an empty one counts as none
    return text.getvalue()


def _unknown(argv: list[str], help_text: str) -> str:
    """The options that the help does not have, each with the one that may be meant."""
    known = {"--help", *re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", help_text)}
    alike = {name.replace("_", "-") for name in known}
    names = [word.partition("=")[0] for word in argv if word.startswith("--")]
    unknown = [name for name in names if name.replace("_", "-") not in alike]
    return ", ".join(f"unknown option {name}{did_you_mean(name, known)}" for name in unknown)


def _problem(event: failures.ParseErrorEvent) -> str:
    """One sentence for tyro's report of a mistake."""
    if isinstance(event, failures.UnrecognizedArgs):
        return f"unexpected argument {' '.join(event.tokens)}"
    if isinstance(event, failures.MissingArgs):
        missing = (one.arg for one in event.missing_arguments)
        return f"missing: {', '.join(_name(one, f' {one.lowered.metavar}') for one in missing)}"
    argument: Any = getattr(event, "argument", None)
    name = _name(argument) if argument else ""
    if isinstance(event, failures.BadValue):
        return f"{name}: a value is missing"
    if isinstance(event, failures.InvalidChoice):
        return f"{name}: expected one of {', '.join(event.choices)}, got {event.value!r}"
    return f"{name}: {getattr(event, 'message', 'is wrong')}"


def _name(argument: Any, placeholder: str = "") -> str:
    lowered = argument.lowered
    return str(lowered.metavar) if argument.is_positional() else f"{lowered.name_or_flags[-1]}{placeholder}"


def _describe(problem: Any) -> str:
    option = ".".join(str(part).rstrip("_").replace("_", "-") for part in problem["loc"][:1])
    return f"--{option}: {refusal(problem)}" if option else refusal(problem)
