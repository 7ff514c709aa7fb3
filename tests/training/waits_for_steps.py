"""train_ray.py whose workers log a history and wait before each step until a file allows it, or until they must end.

As a program: ``python -m tests.training.waits_for_steps --config FILE``, with the options of train_ray.py.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from esmeray.monitoring.watch import alerts
from esmeray.run_folder.paths import RunFolder
from esmeray.training.launch import elastic, trainers
from esmeray.training.launch.trainers import ray_train_loop
from train_ray import main

MEMORY_PERCENT = "ESMERAY_TEST_MEMORY_PERCENT"
"""Environment variable with the share of memory from which an alert is raised."""


def allowed_steps(run: RunFolder) -> Path:
    """File with the number of steps that the workers may take; without the file they take none."""
    return run.path / "steps.allowed"


def loop_that_waits(arguments: dict[str, Any]) -> None:
    # Imported in the worker, which needs these modules anyway: a driver runs without DeepSpeed.
    import ray.train

    from esmeray.training.loop.observing import Observers
    from tests.chaos.observed import Observer, observe

    honest = Observers.end_requested

    def end_requested(self: Observers) -> bool:
        allowed = allowed_steps(self.run)
        while not self.run.end_requested() and (not allowed.exists() or self.step >= int(allowed.read_text() or 0)):
            time.sleep(0.05)
        return honest(self)

    Observers.end_requested = end_requested
    folder, launched = Path(arguments["config"]["run"]["storage_path"]), ray.train.get_context()
    observe(Observer(folder, launched.get_world_rank(), launched.get_world_size()))
    ray_train_loop(arguments)


if __name__ == "__main__":
    trainers.ray_train_loop = loop_that_waits
    elastic.LOOK_S = 0.2
    alerts.MEMORY_PERCENT = float(os.environ.get(MEMORY_PERCENT, alerts.MEMORY_PERCENT))
    sys.exit(main(sys.argv[1:]))
