"""train_ray.py whose workers wait before each step until a file allows so many, or until they are asked to end.

Once, worker 1 is out of memory when the others already wait for it in a backward pass.

As a program: ``python -m tests.training.waits_for_steps --config FILE``, with the options of train_ray.py.
"""

import sys
import time
from pathlib import Path
from typing import Any

import ray.train
import torch

from esmeray.run_folder.paths import RunFolder
from esmeray.training.config import Config
from esmeray.training.engine.engine import TrainingEngine
from esmeray.training.launch import trainers
from esmeray.training.launch.trainers import ray_train_loop
from esmeray.training.loop.observing import Observers
from train_ray import main

FAILING_PASS = 3
"""Of worker 1, from 1: in the second of its steps, each of which has two."""


def allowed_steps(run: RunFolder) -> Path:
    """The file that holds how many steps may be taken; without it none."""
    return run.path / "steps.allowed"


def loop_that_waits(arguments: dict[str, Any]) -> None:
    honest = Observers.end_requested

    def end_requested(self: Observers) -> bool:
        allowed = allowed_steps(self.run)
        while not self.run.end_requested() and (not allowed.exists() or self.step >= int(allowed.read_text() or 0)):
            time.sleep(0.05)
        return honest(self)

    Observers.end_requested = end_requested
    section = Config.model_validate(arguments["config"]).run
    ran_out_before = RunFolder(section.storage_path, section.name).memory_guard.exists()
    if ray.train.get_context().get_world_rank() == 1 and not ran_out_before:
        _run_out()
    ray_train_loop(arguments)


def _run_out() -> None:
    honest, calls = TrainingEngine.backward, []

    def backward(self: TrainingEngine, *arguments: Any) -> None:
        honest(self, *arguments)
        calls.append(1)
        if len(calls) == FAILING_PASS:
            raise torch.OutOfMemoryError("injected: out of memory")

    TrainingEngine.backward = backward


if __name__ == "__main__":
    trainers.ray_train_loop = loop_that_waits
    sys.exit(main(sys.argv[1:]))
