"""What a search found, as its workers measure it and as ``train_ray.py`` trains with it, both at once, in turns.

In: a configuration, its experiment, and the command that trains with best.yaml. Out: :class:`FoundInTraining`, two
programs that run until it is left. While the search's workers measure, once more and in their own way (warm-up,
windows that agree), all processes of the training are stopped; while it trains for some seconds
(:mod:`benchmarks.slices`) those of the search are. So both meet the same machine, which a figure that was noted minutes
ago did not.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.background_program import BackgroundProgram
from benchmarks.slices import SlicedProgram, Turns
from benchmarks.stage import WrongWorkError
from train_config.tune_schema import MeasurementSection
from tuning.settings import Settings

MEASURING, TRAINING = "measuring", "training"
MEASURING_PROGRAM = "benchmarks.measuring_process"
LIMIT_S = 300.0
"""For a start, or one measurement."""
_POLL_S = 0.05


@dataclass(frozen=True)
class Measuring:
    """What the search's workers are to measure.

    Attributes:
        config: the experiment's file.
        store: what it trains on.
        settings: what was found.
        measurement: how the search measures.
    """

    config: Path
    store: Path
    settings: Settings
    measurement: MeasurementSection


@dataclass(frozen=True)
class Training:
    """What trains with it.

    Attributes:
        command: the program and its arguments.
        metrics: the metrics.jsonl that it writes, a line a step.
        warmup_steps: before the first turn.
        slice_s: seconds of a turn.
    """

    command: list[str]
    metrics: Path
    warmup_steps: int
    slice_s: float


class FoundInTraining:
    """Both programs, at work."""

    def __init__(self, measuring: BackgroundProgram, answers: Path, training: SlicedProgram, slice_s: float) -> None:
        self._measuring, self._answers, self._training, self._slice_s = measuring, answers, training, slice_s
        self._asked = 0
        self._turns = Turns({MEASURING: measuring.family, TRAINING: training.family})

    def measured(self) -> float:
        """Tokens per second as the search's workers measure it now.

        Raises:
            WrongWorkError: it could be measured before, and can't now.
        """
        self._turns.give(MEASURING)
        self._measuring.send("once more")
        self._asked += 1
        _wait(lambda: len(self._lines()) == self._asked, self._measuring.require_alive)
        measurement = json.loads(self._lines()[-1])
        if measurement["tokens_per_s"] is None:
            raise WrongWorkError(f"it was measured before, and now: {measurement['reason']}")
        return float(measurement["tokens_per_s"])

    def trained(self) -> float:
        """Tokens per second of the next seconds of training."""
        self._turns.give(TRAINING)
        return self._training.speed(self._slice_s)

    def _lines(self) -> list[str]:
        text = self._answers.read_text(encoding="utf-8")
        return text[: text.rfind("\n") + 1].splitlines()


class EachInTraining:
    """What several searches found, one after the other, in some turns each.

    Args:
        start: of the search of this number both programs, in a context manager.
        turns: of each.
    """

    def __init__(self, start: Callable[[int], AbstractContextManager[FoundInTraining]], turns: int) -> None:
        self._start, self._turns = start, turns
        self._number, self._running = -1, ExitStack()

    def measured(self, turn: int) -> float:
        """See :meth:`FoundInTraining.measured`; of the search whose turn this is, counted over all."""
        return self._of(turn).measured()

    def trained(self, turn: int) -> float:
        """See :meth:`FoundInTraining.trained`; of the search whose turn this is, counted over all."""
        return self._of(turn).trained()

    def _of(self, turn: int) -> FoundInTraining:
        if self._number != turn // self._turns:
            self._running.close()
            self._number = turn // self._turns
            self._both = self._running.enter_context(self._start(self._number))
        return self._both

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()


@contextmanager
def found_in_training(folder: Path, measuring: Measuring, training: Training) -> Iterator[FoundInTraining]:
    """Start both, wait until they are at work; end them.

    Args:
        folder: an empty one for what they say.
        measuring, training: the programs.
    """
    answers = folder / "answers.jsonl"
    asked: list[Any] = [measuring.config, measuring.store, json.dumps(asdict(measuring.settings))]
    asked += [measuring.measurement.model_dump_json(), answers]
    with ExitStack() as stack:
        program = [sys.executable, "-m", MEASURING_PROGRAM, *map(str, asked)]
        pool = BackgroundProgram(program, folder / "measuring.log", takes_input=True)
        stack.callback(pool.end)
        trainer = BackgroundProgram(training.command, folder / "training.log")
        stack.callback(trainer.end)
        stack.callback(pool.ask_to_end)  # before the other's end is waited for
        sliced = SlicedProgram(trainer.family, training.metrics, trainer.require_alive)
        _wait(answers.exists, pool.require_alive)
        _wait(lambda: _count(sliced) >= training.warmup_steps, trainer.require_alive)
        yield FoundInTraining(pool, answers, sliced, training.slice_s)


def _count(program: SlicedProgram) -> int:
    """Steps so far."""
    program.new_steps()
    return len(program.losses)


def _wait(condition: Callable[[], bool], check: Callable[[], None]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        check()
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing to measure within {LIMIT_S:.0f} s")
        time.sleep(_POLL_S)
