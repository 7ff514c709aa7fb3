"""Run the trials of a search with Ray Tune: in parallel on a cluster with several devices, one by one on a CPU.

A trial is one step, which measures a configuration with workers that stay for the next trial. The trial's own process
uses no device and does not import torch. Its placement group has a bundle per worker.
"""

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ray import tune
from ray.tune.execution import class_cache

from esmeray.cluster import connection
from esmeray.cluster.placement import NodeResources, Workers
from esmeray.cluster.signals import StopSignals
from esmeray.common.command_line import say
from esmeray.common.errors import ConfigError, EsmerayError, ResourceError, last_line
from esmeray.common.publishing import write_atomically
from esmeray.installation import python_path
from esmeray.train_config.loading import dump_config
from esmeray.training.config import with_precision
from esmeray.training.launch.elastic import fit
from esmeray.tuning.records import Job, Measurement, SearchFolder, Settings, StoppedError, settings_text
from esmeray.tuning.results import Results, result_text
from esmeray.tuning.search import MEASUREMENT, METRIC, Search, read_trials
from esmeray.tuning.space import SearchSpace, make_space, most_trials, space_lines


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
            MEASUREMENT: json.dumps(asdict(measurement)),  # one value, since Ray Tune flattens nested results
            "done": True,
        }

    def cleanup(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class Progress(tune.Callback):
    """Report each trial's result, and end the search on request or if no trial can start."""

    def __init__(self, job: Job, space: SearchSpace) -> None:
        self._job, self._space = job, space
        self._idle_since = time.monotonic()

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Raise the error that ends the search; Ray Tune then leaves its state as it is, to be restored."""
        if self._job.folder.stop_request.exists():
            raise StoppedError
        now = time.monotonic()
        if not trials or any(trial.status == trial.RUNNING for trial in trials):
            self._idle_since = now
        # Ray Tune would wait forever for resources that others hold.
        elif now - self._idle_since > connection.START_TIMEOUT_S:
            raise ResourceError("no trial could start; is the cluster busy?")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Report the trial, which the searcher has just recorded."""
        search = self._job.search
        results = Results(read_trials(self._job.folder.trials), self._space, search.memory_margin)
        newest = results.trials[-1]
        mark = " (the fastest so far)" if results.best is newest else ""
        settings = settings_text(newest.settings, self._space.varied)
        count = f"{newest.number}/{most_trials(search.search, len(self._space))}"
        say(f"{count}: {settings}: {result_text(newest.measurement, search.memory_margin)}{mark}")


def search_on_cluster(job: Job, data_tokens: int, signals: StopSignals) -> tuple[SearchSpace, Exception | None]:
    """Run the trials of a search until its end or a signal. Return the space, and the error that ended it early, if
    any.

    ``data_tokens``: tokens of all training sequences.
    """
    folder = job.folder
    trials = read_trials(folder.trials)
    with connection.connected(job.config.ray, folder.path) as dashboard:
        _check_hardware(folder)
        nodes = connection.cluster_resources()
        precision = connection.default_precision(any(node.gpus for node in nodes))
        job = replace(job, config=with_precision(job.config, precision))
        space = make_space(job, nodes, data_tokens)
        folder.clear_requests()
        # Written only after all checks have passed: the next search is compared with these files.
        write_atomically(folder.config, dump_config(job.config))
        write_atomically(folder.tune, dump_config(job.search))
        say(f"search {job.search.name}: {folder.path}" + (f", dashboard http://{dashboard}" if dashboard else ""))
        say("\n".join(space_lines(space, job.search)))
        if trials:
            say(f"resuming after {len(trials)} trials")
        return space, _run_trials(job, space, nodes, signals)


def _run_trials(job: Job, space: SearchSpace, nodes: list[NodeResources], signals: StopSignals) -> Exception | None:
    _prepare_ray_tune()
    folder = job.folder
    sized = tune.with_resources(MeasuredTrial, partial(placement, space.workers))
    # Without GPUs a machine is one device: concurrent trials would share its cores and memory and slow each other down.
    devices = sum(node.gpus for node in nodes) or len(nodes)
    # Never restored from Ray Tune's own state (Tuner.restore), which Ray Tune 2.60 writes some seconds late and would
    # repeat the trials measured since. The searcher's study is written after each trial.
    tuner = tune.Tuner(
        tune.with_parameters(sized, job=job, workers=space.workers),
        tune_config=tune.TuneConfig(
            search_alg=Search(space, job.search, folder.trials),
            num_samples=-1,  # the searcher decides when to stop
            max_concurrent_trials=max(1, devices // min(space.workers)),
            reuse_actors=True,  # workers take ten seconds to start
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name=folder.ray_tune.name,
            storage_path=str(folder.path),
            callbacks=[Progress(job, space)],
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            failure_config=tune.FailureConfig(fail_fast="raise"),  # failures in a trial are results
            verbose=0,
        ),
    )
    signals.hand_over(folder.stop_request.touch, "stopping after the trials measured so far")
    error = fit(tuner.fit, signals)
    if signals.received or error is None:
        return error
    return _refusal_behind(error) or ResourceError(f"the search failed: {last_line(error)}")


def _prepare_ray_tune() -> None:
    # A trial's process imports this code, and Ray Tune (2.60) allows no other way to set its environment.
    os.environ["PYTHONPATH"] = python_path()
    class_cache.ENV_VARS_TO_PROPAGATE.add("PYTHONPATH")
    # Ray Tune imports wandb (0.31) to count users of its callback, which creates two temporary folders that a killed
    # search leaves behind. Searches don't log to W&B. With None in sys.modules the import fails as if it were not
    # installed.
    sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new output prints tables even with verbose=0
    warnings.filterwarnings("ignore", "fail_fast='raise' detected")  # StoppedError leaves nothing behind
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # it counts trials that a signal ends as failures


def _refusal_behind(error: BaseException) -> EsmerayError | None:
    """Return the EsmerayError behind an error of Ray Tune, if there is one."""
    # A worker's error is the ``cause`` of a RayTaskError, which Ray Tune wraps in its own errors.
    inner = getattr(error, "cause", None) or error
    if isinstance(inner, EsmerayError):
        return inner
    return None if error.__cause__ is None else _refusal_behind(error.__cause__)


def _check_hardware(folder: SearchFolder) -> None:
    """Record the machines of a new search. Raises ConfigError when resuming a search on other machines."""
    here = connection.hardware()
    before = folder.hardware.read_text().strip() if folder.hardware.exists() else here
    if folder.trials.exists() and before != here:
        raise ConfigError(f"{folder.path} was measured on {before}, but this is {here}: choose another --tune.name")
    write_atomically(folder.hardware, f"{here}\n")
