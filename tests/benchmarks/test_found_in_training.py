"""What a search found, measured and trained with in turns: each alone on the machine, none left behind."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import found_in_training as module
from benchmarks.found_in_training import EachInTraining, Measuring, Training, found_in_training
from benchmarks.stage import WrongWorkError
from tests.benchmarks import counting_program
from train_config.tune_schema import MeasurementSection
from tuning.settings import Settings

SETTINGS = Settings(1024, None, 0, 4, "none", True, False, 2, 1)


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both programs, made of ones that only count."""
    monkeypatch.setattr(module, "MEASURING_PROGRAM", "tests.benchmarks.answering_program")
    run = tmp_path / "run"
    command = [sys.executable, "-S", counting_program.__file__, str(run), "0.01", "0", ""]
    measuring = Measuring(tmp_path / "config.yaml", tmp_path / "store", SETTINGS, MeasurementSection())
    return found_in_training(tmp_path, measuring, Training(command, run / "metrics.jsonl", 2, 0.1))


def programs() -> set[psutil.Process]:
    """Those of the tests' programs that are there."""
    names = ("answering_program", "counting_program")
    children = psutil.Process().children(recursive=True)
    return {child for child in children if any(name in " ".join(child.cmdline()) for name in names)}


def stopped() -> set[str]:
    """Names of the programs of which a process is stopped."""
    lines = [" ".join(p.cmdline()) for p in programs() if p.status() == psutil.STATUS_STOPPED]
    return {name for name in ("answering", "counting") for line in lines if name in line}


def test_one_measures_while_the_other_is_stopped_and_no_process_is_left(both, tmp_path: Path):
    with both as running:
        assert running.measured() == 100.0
        assert stopped() == {"counting"}
        assert running.trained() > 0
        assert stopped() == {"answering"}
        assert running.measured() == 200.0
        with pytest.raises(WrongWorkError, match="now: it crashed"):
            running.measured()
    assert not programs()
    answer = json.loads((tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert Settings(**json.loads(answer["settings"])) == SETTINGS


def test_training_that_does_not_start_is_told_with_its_last_words(both, tmp_path: Path):
    command = [sys.executable, "-c", "print('no such file'); 1 / 0"]
    measuring = Measuring(tmp_path / "config.yaml", tmp_path / "store", SETTINGS, MeasurementSection())
    broken = found_in_training(tmp_path, measuring, Training(command, tmp_path / "metrics.jsonl", 2, 0.1))
    with pytest.raises(RuntimeError, match=r"code 1 (.|\n)*no such file"), broken:
        pass
    assert not programs()


def test_one_search_after_the_other_has_its_turns():
    running: list[int] = []

    class Both:
        def __init__(self, number: int) -> None:
            self._number = number

        def measured(self) -> float:
            return 10.0 + self._number

        def trained(self) -> float:
            return 20.0 + self._number

    @contextmanager
    def start(number: int) -> Any:
        running.append(number)
        yield Both(number)
        running.remove(number)

    with EachInTraining(start, turns=2) as each:
        assert [each.measured(0), each.trained(0), each.trained(1), each.measured(1)] == [10, 20, 20, 10]
        assert running == [0]
        assert [each.measured(2), each.trained(2)] == [11, 21]
        assert running == [1]
    assert running == []
