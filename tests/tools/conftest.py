"""The tools' command line, run in this process."""

import shlex
from collections.abc import Callable
from typing import NamedTuple

import pytest

from esmeray.common.command_line import run
from esmeray.tools.__main__ import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def next_words(output: str) -> list[str]:
    """The words after ``esmeray`` of the command that the last line of an output is about."""
    intended, program, *words = shlex.split(output.splitlines()[-1])
    assert (intended, program) == ("next:", "esmeray")
    return words


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """``command("data", "inspect", path)``, or one string: what ``esmeray data inspect path`` returns and prints."""

    def call(*arguments: object) -> Outcome:
        words = [str(argument) for argument in arguments]
        try:
            code = run(main, words[0].split() if len(words) == 1 else words)
        except SystemExit as end:  # how --help ends
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call
