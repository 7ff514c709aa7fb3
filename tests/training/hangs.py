"""train_ray.py with a worker 1 that is stopped once, by SIGSTOP in a step, and with copies of the state in a folder.

As a program: ``python -m tests.training.hangs --config FILE``, with the options of train_ray.py.
"""

import os
import signal
import sys
from typing import Any

import ray.train

import training.launch.trainers
from run_folder.paths import RunFolder
from train_config.schema import Config
from train_ray import main
from training.engine import memory_state
from training.engine.engine import TrainingEngine
from training.launch.trainers import ray_train_loop

HANGS_IN_STEP = 8
"""Of worker 1, from 1."""


def loop_that_hangs(arguments: dict[str, Any]) -> None:
    config = Config.model_validate(arguments["config"])
    run = RunFolder(config.run.storage_path, config.run.name)
    # No run beside this one removes the copies while the workers are started again.
    memory_state.SHARED_MEMORY = run.path / "memory"
    memory_state.SHARED_MEMORY.mkdir(exist_ok=True)
    if ray.train.get_context().get_world_rank() == 1 and not [*run.logs.glob("stacks-*"), *run.logs.glob("hung-*")]:
        _hang()
    ray_train_loop(arguments)


def _hang() -> None:
    honest, calls = TrainingEngine.step, []

    def step(self: TrainingEngine, learning_rate: float) -> Any:
        calls.append(1)
        if len(calls) == HANGS_IN_STEP:
            os.kill(os.getpid(), signal.SIGSTOP)
        return honest(self, learning_rate)

    TrainingEngine.step = step


if __name__ == "__main__":
    training.launch.trainers.ray_train_loop = loop_that_hangs
    sys.exit(main(sys.argv[1:]))
