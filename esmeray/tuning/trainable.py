"""A trial of Ray Tune: one step, which measures a configuration with workers that stay for the next trial.

The trial's own process uses no device and does not import torch. Its placement group has a bundle per worker.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ray import tune

from esmeray.cluster.placement import Workers
from esmeray.tuning.records import Job, Measurement, Settings

METRIC = "tokens_per_s"


def placement(workers: Mapping[int, Workers], trial_config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
    """Return the placement group of a trial: an empty bundle for its own process, then one for each worker."""
    placed = workers[trial_config["settings"]["workers"]]
    bundle: dict[str, int | float] = {"CPU": placed.cpus_each, "GPU": int(placed.use_gpu)}
    # The empty bundle comes first: Ray Tune runs the trial's own process in it.
    return tune.PlacementGroupFactory([{}, *[bundle] * placed.count])


class MeasuredTrial(tune.Trainable):
    """Measure ``settings``.

    Raises ResourceError if the workers don't start, which ends the search.
    """

    def setup(self, config: dict[str, Any], job: Job, workers: Mapping[int, Workers]) -> None:  # type: ignore[override]
        self._job, self._workers = job, workers
        self._group: Any = None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Accept the next trial with the same number of workers; Ray Tune has already set ``self.config``."""
        return True

    def step(self) -> dict[str, Any]:
        settings = Settings(**self.config["settings"])
        if self._group is None:
            self._group = self._job.make_group(self._workers[settings.workers], self._job)
        measurement: Measurement = self._group.measure(settings)
        if measurement.status != "ok":
            self.cleanup()  # the next trial starts new workers: some of these may be stuck in a step
        return {
            METRIC: measurement.speed(self._job.search.memory_margin),
            "measurement": json.dumps(asdict(measurement)),  # one value, since Ray Tune flattens nested results
            "done": True,
        }

    def cleanup(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
