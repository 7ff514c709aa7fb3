"""The arguments of every tool: what is wrong with them is one line, as every other refusal.

tyro shows a missing option, and what pydantic raises, in a box of eight lines.
"""

from __future__ import annotations

import difflib
import io
import os
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any, TypeVar

import tyro
from pydantic import BaseModel, ValidationError

from common.errors import ConfigError

Arguments = TypeVar("Arguments")
_UNWRAPPED = "100000"
_LONGEST = 300
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*(?![\w.-])")


class ToolArguments(BaseModel):
    """Base of a tool's arguments.

    Raises:
        ConfigError: a value is refused; names its option.
    """

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(_describe(problem) for problem in error.errors())) from None


def parse(kind: type[Arguments], argv: list[str], tool: str, description: str | None = None) -> Arguments:
    """The arguments of ``python -m tools TOOL``; prints its help and ends the process where that is asked for.

    Raises:
        ConfigError: an argument is missing, unknown or wrong; says which, and the usage.
    """

    def run(arguments: list[str]) -> Arguments:
        return tyro.cli(kind, args=arguments, prog=f"python -m tools {tool}", description=description)

    try:
        with redirect_stderr(io.StringIO()):
            return run(argv)
    except SystemExit as end:
        if not end.code:
            raise
    help_text = _printed(run, ["--help"])
    options = {"--help", *_OPTION.findall(help_text)}
    names = [word.partition("=")[0] for word in argv if word.startswith("--")]
    unknown = [name for name in names if name.replace("_", "-") not in options]
    problem = ", ".join(_unknown(name, options) for name in unknown) or _sentences(_printed(run, argv))
    usage = " ".join(help_text.partition("\n\n")[0].split())
    raise ConfigError(f"{problem}; {usage}")


def _unknown(name: str, options: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(options), n=1)
    return f"unknown option {name}" + (f" (did you mean {near[0]}?)" if near else "")


def _printed(run: Callable[[list[str]], Any], argv: list[str]) -> str:
    """Text that tyro prints where it ends the process, unwrapped."""
    text = io.StringIO()
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _UNWRAPPED
    try:
        with redirect_stdout(text), redirect_stderr(text), suppress(SystemExit):
            run(argv)
    finally:
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return text.getvalue()


def _sentences(box: str) -> str:
    """tyro's box on one line: its sentences, and the arguments that these name, without their help."""
    sentences: list[str] = []
    for line in box.splitlines()[1:]:
        inside = line[2:]  # behind what stands for the box's border
        text = inside.strip()
        if text.startswith(("For full helptext", "Argument helptext", "Perhaps you meant", "Arguments similar")):
            break
        if not text.strip("-"):
            continue
        if not inside.startswith(" "):
            sentences.append("missing:" if text.startswith("Missing from") else text[0].lower() + text[1:].rstrip("."))
        elif not inside.startswith(" " * 6) and len(sentences[-1]) < _LONGEST:
            sentences[-1] += (" " if sentences[-1].endswith(":") else ", ") + text
    return "; ".join(sentences)


def _describe(problem: Any) -> str:
    option = ".".join(str(part).rstrip("_").replace("_", "-") for part in problem["loc"][:1])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"--{option}: {message}" if option else message
    return f"--{option}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"
