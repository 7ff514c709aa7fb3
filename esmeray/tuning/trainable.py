"""A trial of Ray Tune: one step, which measures a configuration with workers that stay for the next trial.

The trial's own process holds no device and imports no torch; its placement group has a bundle for each worker.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ray import tune

from esmeray.cluster.placement import Workers
from esmeray.tuning.records import Job, Measurement, Settings, write_trial

METRIC = "tokens_per_s"


def placement(workers: Mapping[int, Workers], trial_config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
    """Return the placement group of a trial: an empty bundle for its own process, then one for each worker."""
    placed = workers[trial_config["settings"]["workers"]]
    bundle: dict[str, int | float] = {"CPU": placed.cpus_each, "GPU": int(placed.use_gpu)}
    # The empty one is first: Ray Tune runs the trial's own process in it.
    return tune.PlacementGroupFactory([{}, *[bundle] * placed.count])


class MeasuredTrial(tune.Trainable):
    """Measures ``settings``; ``to_beat`` is the speed of the fastest so far, in tokens per second, or None.

    Raises ResourceError where the workers don't start, which ends the search.
    """

    def setup(self, config: dict[str, Any], job: Job, workers: Mapping[int, Workers]) -> None:  # type: ignore[override]
        self._job, self._workers = job, workers
        self._group: Any = None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take the next trial, of as many workers; Ray Tune has set ``self.config``."""
        return True

    def step(self) -> dict[str, Any]:
        settings = Settings(**self.config["settings"])
        measurement = self._measure(settings, self.config["to_beat"])
        # Before Ray Tune has the result: a search that is killed now is resumed from the files.
        write_trial(self._job.folder.trials, self.trial_id, settings, measurement)
        return {
            METRIC: measurement.speed(self._job.search.memory_margin),
            "measurement": asdict(measurement),
            "done": True,
        }

    def cleanup(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _measure(self, settings: Settings, to_beat: float | None) -> Measurement:
        if self._group is None:
            self._group = self._started(self._workers[settings.workers])
        measurement: Measurement = self._group.measure(settings, to_beat)
        if not measurement.reusable:
            self.cleanup()  # the next trial starts workers anew: some of these may wait in a step for ever
        return measurement

    def _started(self, workers: Workers) -> Any:
        if self._job.make_group is not None:
            return self._job.make_group(workers, self._job)
        from esmeray.tuning.workers import WorkerGroup  # here: it loads torch, which the trial's own process lacks

        return WorkerGroup(workers, self._job)
