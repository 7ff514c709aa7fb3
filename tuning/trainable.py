"""A trial of Ray Tune: one step, which measures a configuration with workers that stay for the next trial.

The trial's own process holds no device and imports no torch; its placement group has a bundle for each worker.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ray import tune

from esmeray.cluster.placement import Workers
from esmeray.common.errors import EsmerayError
from esmeray.training.engine.deepspeed_settings import check_precision
from esmeray.tuning.records import Job, read_trials, write_trial
from esmeray.tuning.settings import Measurement, Settings

METRIC = "tokens_per_s"


def placement(workers: Mapping[int, Workers], trial_config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
    """Return the placement group of a trial: an empty bundle for its own process, then one for each worker."""
    placed = workers[trial_config["settings"]["workers"]]
    bundle: dict[str, int | float] = {"CPU": placed.cpus_each, "GPU": int(placed.use_gpu)}
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
        trials = self._job.folder.trials
        # A search that was killed just after the end of this trial resumes it, and it is not to be measured again.
        measurement = next((trial.measurement for trial in read_trials(trials) if trial.id == self.trial_id), None)
        if measurement is None:
            settings = Settings(**self.config["settings"])
            measurement = self._measure(settings, self.config["to_beat"])
            write_trial(trials, self.trial_id, settings, measurement)
        speed = measurement.speed(self._job.search.memory_margin)
        return {METRIC: speed, "measurement": asdict(measurement), "done": True}

    def cleanup(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _measure(self, settings: Settings, to_beat: float | None) -> Measurement:
        job = self._job
        try:
            config = settings.applied(job.measured, job.search.keep_global_tokens)
            if not job.search.inference:
                check_precision(config.training, self._workers[settings.workers].device)
        except EsmerayError as error:
            return Measurement("refused", str(error))
        if self._group is None:
            self._group = self._started(self._workers[settings.workers])
        measurement: Measurement = self._group.measure(config, job.search, to_beat, job.folder.stop_requested)
        if not measurement.reusable:
            self.cleanup()
        return measurement

    def _started(self, workers: Workers) -> Any:
        job = self._job
        if job.make_group is not None:
            return job.make_group(workers)
        from esmeray.tuning.workers import (
            WorkerGroup,  # here: it loads torch, which a trial's own process does not need
        )

        return WorkerGroup(workers, job.store_path, job.config.data, job.config.model)
