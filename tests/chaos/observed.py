"""train_ray.py with a history and injected faults: ``python -m tests.chaos.observed FOLDER --config FILE``.

FOLDER has these files:

- history.jsonl: the workers' history (tests/chaos/history.py);
- faults.json: the faults in their order, each with phase, step, rank and act;
- met-N: pid of the worker that reached fault N, and the time;
- go-N: ends the act ``wait`` of fault N, in which the worker waits in the phase.
"""

import ctypes
import hashlib
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray.train
import torch

from esmeray.dataset.batches.steps import TrainingSteps
from esmeray.run_folder.checkpoints import Manifest
from train_ray import main

WRITER = "checkpoint-writer"


class Observer:
    """Writes the history of one worker and inflicts its faults."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder, self.rank, self.world = folder, rank, world
        self.faults = json.loads((folder / "faults.json").read_text())
        self.step, self.attempt, self.model = 0, "", torch.nn.Module()

    def log(self, kind: str, **values: Any) -> None:
        context = {"attempt": self.attempt, "rank": self.rank, "world": self.world, "step": self.step}
        line = json.dumps({"kind": kind, **context, "time": time.monotonic(), **values}) + "\n"
        with (self.folder / "history.jsonl").open("ab", buffering=0) as file:
            file.write(line.encode())

    def started(self, position: Any, worker: Any, *others: Any) -> None:
        self.model, self.step = worker.engine.module, position.step
        self.attempt = worker.control.from_rank_0(os.urandom(4).hex())
        self.log("start", pid=os.getpid())

    def stepped(self, _: Any, results: Any, position: Any, batches: list[Any], sums: Any, *others: Any) -> None:
        self.step, weights = position.step, 0
        for parameter in self.model.parameters():
            weights = zlib.crc32(parameter.detach().numpy().tobytes(), weights)
        records = [batch.records.numpy().tobytes() for batch in batches if batch.records.numel()]
        hashes = [hashlib.sha256(content).hexdigest() for content in records]
        self.log("step", batches=hashes, loss=float(sums.own["loss"]).hex(), weights=weights)

    def enter(self, phase: str, thread: str = "") -> None:
        """Inflict the next fault if it belongs to this phase, rank and step."""
        number = len([*self.folder.glob("met-*")])
        fault = self.faults[number] if number < len(self.faults) else {"phase": None}
        is_here = fault["phase"] == phase and thread in threading.current_thread().name
        if not is_here or fault["rank"] % self.world != self.rank or self.step < fault["step"]:
            return
        partial = self.folder / f"partial-{os.getpid()}"
        partial.write_text(json.dumps([os.getpid(), time.monotonic()]))
        partial.rename(self.folder / f"met-{number}")
        ACTS[fault["act"]](self, self.folder / f"go-{number}")


def _wait(_: Observer, go: Path) -> None:
    deadline = time.monotonic() + 60
    while not go.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def _raise_from_outside(*_: Any) -> None:
    thread = ctypes.c_ulong(threading.get_ident())
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(RuntimeError))


def _set_clock(seconds: float) -> None:
    clock = time.time
    time.time = lambda: clock() + seconds


def _slow_disk(*_: Any) -> None:
    sync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(0.5)
        sync(descriptor)

    os.fsync = slow


ACTS: dict[str, Callable[[Observer, Path], Any]] = {
    "wait": _wait,
    "hold the GIL": lambda *_: ctypes.PyDLL(None).sleep(3600),
    "raise": _raise_from_outside,
    "be slow": lambda *_: time.sleep(3),
    "slow disk": _slow_disk,
    "clock forward": lambda *_: _set_clock(3600),
    "clock back": lambda *_: _set_clock(-3600),
}


def wrap(
    owner: Any,
    name: str,
    before: Callable[..., Any],
    after: Callable[..., Any] = lambda *_: None,
    put: Callable[..., None] = setattr,
) -> None:
    """Call ``before`` and ``after`` around each call of a method; ``put``: sets the attribute, e.g. a monkeypatch's."""
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        before()
        result = original(*arguments, **named)
        after(result, *arguments)
        return result

    put(owner, name, wrapped)


def observe(observer: Observer, put: Callable[..., None] = setattr) -> None:
    """Call the observer when this process enters a phase, starts training and has taken a step."""
    from esmeray.training.engine.engine import TrainingEngine
    from esmeray.training.loop import worker
    from esmeray.training.loop.observing import StepResults
    from esmeray.training.loop.stepping import Stepper

    for owner, name, phase, thread in (
        (TrainingSteps, "epoch", "loader", ""),
        (TrainingEngine, "__call__", "forward", ""),
        (Stepper, "_before_collective", "reduction", ""),
        (TrainingEngine, "step", "update", ""),
        (TrainingEngine, "full_precision_state", "export", ""),
        (TrainingEngine, "load_shards", "resize", ""),
        (torch, "save", "checkpoint", WRITER),
        (Manifest, "sealed", "publishing", WRITER),
    ):
        wrap(owner, name, partial(observer.enter, phase, thread), put=put)
    wrap(worker, "start", lambda: None, observer.started, put)
    wrap(StepResults, "add", lambda: None, observer.stepped, put)


def observed_loop(folder: Path, train: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    def loop(arguments: dict[str, Any]) -> None:
        context = ray.train.get_context()
        observe(Observer(folder, context.get_world_rank(), context.get_world_size()))
        train(arguments)

    return loop


if __name__ == "__main__":
    from esmeray.training.launch import trainers
    from tests.chaos.observed import observed_loop as importable  # not __main__: workers import it by its module

    trainers.ray_train_loop = importable(Path(sys.argv.pop(1)), trainers.ray_train_loop)
    sys.exit(main(sys.argv[1:]))
