"""The driver of a throughput search: from an experiment to best.yaml, the same experiment with the fastest settings.

Ray Tune runs the trials, in parallel on a cluster with several devices, one by one on a CPU. Optuna chooses them
(:mod:`esmeray.tuning.search`).

<storage_path>/<tune.name>/
    config.yaml, tune.yaml   the experiment and the search, resolved
    hardware.txt             the machines that it was measured on
    trials.jsonl             Optuna's journal of all trials, see tuning.search
    ray_tune/                Ray Tune's own results and state
    best.yaml                see tuning.results
    trials.csv               all trials as a table
"""

import logging
import os
import sys
import time
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

from ray import tune as ray_tune
from ray.tune.execution import class_cache
from rich.console import Console

from esmeray.cluster import connection
from esmeray.cluster.placement import LOCAL, NodeResources, find, local_resources
from esmeray.cluster.signals import StopSignals
from esmeray.common.command_line import next_command, say
from esmeray.common.errors import ConfigError, EsmerayError, ResourceError
from esmeray.common.progress import conversion_bar
from esmeray.common.publishing import write_atomically
from esmeray.common.text import last_line
from esmeray.installation import python_path
from esmeray.run_folder.job import differences
from esmeray.tasks.plan import task_plan
from esmeray.train_config.loading import dump_config, load_settings
from esmeray.train_config.natures import with_absolute_paths
from esmeray.training.config import load_config, with_precision
from esmeray.training.launch.driver import resources_to_plan_with, until_signal
from esmeray.training.launch.elastic import fit
from esmeray.training.launch.planning import check_stage
from esmeray.tuning.records import KEYS, Job, SearchFolder, StoppedError, settings_text
from esmeray.tuning.results import (
    Results,
    make_table,
    nothing_fits,
    result_text,
    summary,
    to_set,
    write_best,
    write_table,
)
from esmeray.tuning.search import Search, read_trials
from esmeray.tuning.section import TuneConfig
from esmeray.tuning.space import SearchSpace, make_space, most_trials, space_lines
from esmeray.tuning.trainable import MeasuredTrial, placement

CHANGES_SPEED = ("data", "batch", "model", "training", "deepspeed", "ray.cpus_per_worker", "tune.keep_global_tokens")
"""Settings that a measurement depends on; the searched ones among them may still change."""


def tune(job: Job) -> int:
    """Search to the end. Returns the exit code: 0 if finished, 128 + signal if stopped.

    Raises EsmerayError if the search can't start, or no configuration fits.
    """
    job = replace(job, config=with_absolute_paths(job.config))  # absolute, since trials run in other working folders
    return until_signal(job.folder, lambda signals: _tune_locked(job, signals), "the search")


def dry_run_tune(job: Job) -> int:
    """Print the resolved search and the space; measure nothing."""
    job = _with_first_precision(
        replace(job, config=with_absolute_paths(job.config))
    )  # recorded configs have absolute paths too
    data_tokens = task_plan(job.config.data, job.config.model).estimate().data.tokens
    space = make_space(job, resources_to_plan_with(job.config.ray), data_tokens)
    print(dump_config(job.search))
    print("\n".join(space_lines(space, job.search)))
    return 0


def _tune_locked(job: Job, signals: StopSignals) -> int:
    job = _with_first_precision(job)
    folder = job.folder
    if find(job.config.ray) == LOCAL:
        make_space(job, [*local_resources()])  # checks as much as possible before anything is prepared
    task = task_plan(job.measured.data, job.measured.model)
    check_stage(task, job.measured.training, job.measured.deepspeed)
    with conversion_bar("preparing the data") as progress:
        store_path = task.prepare(folder.stores, progress)
    data_tokens = task.measure(store_path).data.tokens
    task.write_names(folder, store_path)
    job = replace(job, store_path=str(store_path))
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
        error = _run_trials(job, space, nodes, signals)
    return _conclude(job, Results(read_trials(folder.trials), space, job.search.memory_margin), signals, error)


def _with_first_precision(job: Job) -> Job:
    """Return the job with the precision of the search that it resumes, if it sets none.

    Raises ConfigError for a different experiment, whose measurements would be mixed with the existing ones.
    """
    folder = job.folder
    if not (folder.trials.exists() and folder.config.exists() and folder.tune.exists()):
        return job
    begun = load_config(folder.config, is_stored=True)
    job = replace(job, config=with_precision(job.config, begun.training.precision))
    before = begun.model_dump() | {"tune": load_settings(TuneConfig, folder.tune, is_stored=True).model_dump()}
    now = job.config.model_dump() | {"tune": job.search.model_dump()}
    for change in differences(before, now):
        # Searched settings may differ, since each trial records its own.
        if change.within(CHANGES_SPEED) and change.key not in KEYS.values():
            raise ConfigError(
                f"{change}, but {folder.path} already has trials: change the setting back, or choose another "
                "--tune.name"
            )
    return job


def _check_hardware(folder: SearchFolder) -> None:
    """Record the machines of a new search. Raises ConfigError when resuming a search on other machines."""
    here = connection.hardware()
    before = folder.hardware.read_text().strip() if folder.hardware.exists() else here
    if folder.trials.exists() and before != here:
        raise ConfigError(f"{folder.path} was measured on {before}, but this is {here}: choose another --tune.name")
    write_atomically(folder.hardware, f"{here}\n")


def _run_trials(job: Job, space: SearchSpace, nodes: list[NodeResources], signals: StopSignals) -> Exception | None:
    """Run the trials until the end of the search or a signal. Returns the error that ended it early, if any."""
    _prepare_ray_tune()
    folder = job.folder
    sized = ray_tune.with_resources(MeasuredTrial, partial(placement, space.workers))
    # Without GPUs a machine is one device: concurrent trials would share its cores and memory and slow each other down.
    devices = sum(node.gpus for node in nodes) or len(nodes)
    # Never restored from Ray Tune's own state (Tuner.restore), which Ray Tune 2.60 writes some seconds late and would
    # repeat the trials measured since. The searcher's study is written after each trial.
    tuner = ray_tune.Tuner(
        ray_tune.with_parameters(sized, job=job, workers=space.workers),
        tune_config=ray_tune.TuneConfig(
            search_alg=Search(space, job.search, folder.trials),
            num_samples=-1,  # the searcher decides when to stop
            max_concurrent_trials=max(1, devices // min(space.workers)),
            reuse_actors=True,  # workers take ten seconds to start
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=ray_tune.RunConfig(
            name=folder.ray_tune.name,
            storage_path=str(folder.path),
            callbacks=[_Progress(job, space)],
            checkpoint_config=ray_tune.CheckpointConfig(checkpoint_at_end=False),
            failure_config=ray_tune.FailureConfig(fail_fast="raise"),  # failures in a trial are results
            verbose=0,
        ),
    )
    signals.hand_over(folder.request_stop, "stopping after the trials measured so far")
    error = fit(tuner.fit, signals)
    if signals.received or error is None:
        return error
    return _refusal_behind(error) or ResourceError(f"the search failed: {last_line(error)}")


class _Progress(ray_tune.Callback):
    """Report each trial's result, and end the search on request or if no trial can start."""

    def __init__(self, job: Job, space: SearchSpace) -> None:
        self._job, self._space = job, space
        self._idle_since = time.monotonic()

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Raise the error that ends the search; Ray Tune then leaves its state as it is, to be restored."""
        if self._job.folder.stop_requested():
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


def _conclude(job: Job, results: Results, signals: StopSignals, error: Exception | None) -> int:
    folder, best = job.folder, results.best
    # Written after a signal too: a user who stops a search wants its measurements.
    if best is not None:
        write_best(best, results, job)
    if results.trials:
        write_table(results, folder.table)
    if signals.received:
        fastest = f", fastest so far: {folder.best}" if best is not None else ""
        say(f"stopped after {len(results.trials)} trials{fastest}; the same command resumes it")
        return signals.exit_code
    if error is not None:
        raise error
    if best is None:
        raise nothing_fits(results)
    Console().print(make_table(results))
    say("\n".join(summary(best, results)))
    say("\n".join(to_set(best, results, job.config.batch.global_tokens, job.search)))
    say(f"  fastest  {folder.best}\n  trials   {folder.table}")
    say(next_command("train", "--config", folder.best))
    return 0
