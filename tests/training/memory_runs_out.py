"""train_ray.py with memory that runs out once, on worker 1, when the others already wait for it in a backward pass.

As a program: ``python -m tests.training.memory_runs_out --config FILE``, with the options of train_ray.py.
"""

import sys
from typing import Any

import ray.train
import torch

from esmeray.run_folder.paths import RunFolder
from esmeray.training.config import Config
from esmeray.training.engine.engine import TrainingEngine
from esmeray.training.launch import trainers
from esmeray.training.launch.trainers import ray_train_loop
from train_ray import main

FAILING_PASS = 15
"""Of worker 1, from 1."""


def loop_without_memory(arguments: dict[str, Any]) -> None:
    config = Config.model_validate(arguments["config"])
    ran_out_before = RunFolder(config.run.storage_path, config.run.name).memory_guard.exists()
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
    trainers.ray_train_loop = loop_without_memory
    sys.exit(main(sys.argv[1:]))
