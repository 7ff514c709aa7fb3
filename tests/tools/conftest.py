"""The tools' command line, run in this process."""

import shlex
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


def small_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profile few proteins in few batches and rounds, with small products and a short training."""
    from esmeray.inference.profile import measuring
    from esmeray.monitoring.sampling.peaks import product_flops_per_s
    from esmeray.tools.profile import _training, devices

    monkeypatch.setattr(measuring, "product_flops_per_s", lambda *given: product_flops_per_s(*given[:2], 512))
    monkeypatch.setattr(measuring, "TRACED_BATCHES", 3)
    monkeypatch.setattr(measuring, "WARMUP_RUNS", 1)
    monkeypatch.setattr(measuring, "RUNS", 2)
    monkeypatch.setattr(devices, "PROTEINS", 4)
    monkeypatch.setattr(devices, "ROUNDS", 2)
    monkeypatch.setattr(_training, "MeasurementSection", lambda: _training._TRACED)
    monkeypatch.setattr(_training, "TRACED_STEPS", 1)


def without_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profile without Python functions, which take most of the time, and write no trace."""
    from torch.profiler import profile

    from esmeray.inference.profile import measuring
    from esmeray.tools.profile import _training

    for module in (measuring, _training):
        monkeypatch.setattr(module, "profiler_of", lambda on_cuda, **options: profile(record_shapes=True, **options))
        monkeypatch.setattr(module, "write_trace", lambda *_: None)


class Command:
    """``command("data", "inspect", path)``, or one string: what ``esmeray data inspect path`` returns and prints."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Outcome:
        words = [str(argument) for argument in arguments]
        try:
            code = run(main, words[0].split() if len(words) == 1 else words)
        except SystemExit as end:  # how --help ends
            code = int(end.code or 0)
        captured = self._capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    def done(self, *arguments: object) -> Outcome:
        """The same, which succeeds."""
        outcome = self(*arguments)
        assert outcome.code == 0, outcome.err
        return outcome

    def refused(self, code: int, text: str, *arguments: object) -> Outcome:
        """The same, which ends with this code and one line that has the text."""
        outcome = self(*arguments)
        assert (outcome.code, outcome.err.count("\n")) == (code, 1) and text in outcome.err, outcome
        return outcome


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)
