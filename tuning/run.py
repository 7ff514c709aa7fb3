"""The driver of a throughput search: from an experiment to best.yaml, the same experiment with the fastest settings.

Ray Tune asks :mod:`tuning.search` for one configuration after the other, and each of its trials asks the
one :class:`~tuning.pool.MeasuringPool`, which lives in an actor beside them: trials come and go and take no
core, while the pool's workers, which hold the devices, stay. What every trial did is in trials.jsonl before the next
begins; the same command resumes it from there.

<storage_path>/<tune.name>/
    config.yaml, tune.yaml   the experiment and the search, resolved
    hardware.txt             the machines on which it was measured
    trials.jsonl             see training.trial_journal
    best.yaml, pareto.csv    see training.tune_results
    tune_report.html, .png   see training.tune_report
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray import tune as ray_tune
from ray.exceptions import GetTimeoutError, RayError
from rich.console import Console
from rich.status import Status

from common.errors import ConfigError, EsmerayError, ResourceError
from common.progress import conversion_bar
from common.publishing import write_atomically
from run_folder.paths import RunFolder
from train_config.loading import dump_config, load_config, load_tune_config
from train_config.schema import Config
from train_config.tune_schema import MeasurementSection, TuneConfig
from training.checkpoints.resuming import differences, within
from training.launch import cluster
from training.launch.driver import (
    Fit,
    resources_to_plan_with,
    say,
    until_signal,
    warn,
    with_absolute_paths,
)
from training.launch.placement import LOCAL, find, local_resources
from training.launch.signals import StopSignals
from training.tasks.registry import task_plan
from tuning.journal import TrialJournal, was_measured
from tuning.limits import KEYS
from tuning.pool import MeasuringPool
from tuning.results import describe, nothing_fits, print_table, write_best, write_pareto
from tuning.search import CONFIRM, METRIC, MOST_BROKEN_OFF, ThroughputSearch
from tuning.settings import Measurement, Settings
from tuning.space import SearchSpace, make_space
from tuning.trial_records import seen_trials, trial_records
from tuning.tune_trials import NAMES, best_trial, settings_text, speed, value_text

MakePool = Callable[..., Any]

CHANGES_SPEED = ("data", "batch", "model", "training", "deepspeed", "ray.cpus_per_worker", "keep_global_tokens")
"""Settings under which a measurement holds."""

CHANGES_NO_SPEED = (
    *KEYS.values(),
    "data.ingest",
    "data.stage_dir",
    "training.epochs",
    "training.max_steps",
    "training.learning_rate",
    "training.min_learning_rate_share",
    "training.warmup_steps",
    "training.evaluate_every_steps",
    "training.evaluation_batches",
    "training.gpu_log_interval",
    "training.memory_guard",
)
"""Of these, what is searched or leaves a step's time as it is."""

NEXT_TO_NOTHING = {"memory": 1.0}
"""What a trial reserves: a byte, as Ray Tune (2.60) takes no empty request. The cores belong to the pool's workers."""

PREVIEWED = 6
"""Configurations that a dry run names."""


class SearchFolder(RunFolder):
    """Paths of a search, which lies among the runs."""

    def __init__(self, storage_path: str | Path, name: str) -> None:
        super().__init__(storage_path, name)
        self.tune = self.path / "tune.yaml"
        self.hardware = self.path / "hardware.txt"
        self.trials = self.path / "trials.jsonl"
        self.best = self.path / "best.yaml"
        self.pareto = self.path / "pareto.csv"
        self.report = self.path / "tune_report.html"
        self.ray_tune = self.path / "ray_tune"


def tune(config: Config, search: TuneConfig, make_pool: MakePool = MeasuringPool) -> int:
    """Search to the end.

    Args:
        config: the experiment.
        search: what is varied and how.
        make_pool: what measures; called in an actor with config, store and ``keep_global_tokens``.

    Returns:
        The process's exit code: 0 finished, 128 + signal when stopped.

    Raises:
        EsmerayError: it can't start, or no configuration fits.
    """
    folder = SearchFolder(config.run.storage_path, search.name)
    config = with_absolute_paths(config, folder)
    return until_signal(folder, lambda signals: _tune_locked(config, search, folder, signals, make_pool), "the search")


def dry_run_tune(config: Config, search: TuneConfig) -> int:
    """Print the resolved search, the space and what would be tried first; measure nothing."""
    folder = SearchFolder(config.run.storage_path, search.name)
    for remark in _check_same(with_absolute_paths(config, folder), search, folder):
        warn(remark)
    space = make_space(config, search, resources_to_plan_with(config.ray))
    print(dump_config(search))
    print("\n".join(_space_lines(space, search)))
    print("first, if all fit:")
    for settings in _preview(space, search):
        print(f"  {settings_text(asdict(settings), space.varied) or 'the experiment as it is'}")
    return 0


def _tune_locked(
    config: Config, search: TuneConfig, folder: SearchFolder, signals: StopSignals, make_pool: MakePool
) -> int:
    for remark in _check_same(config, search, folder):
        warn(remark)
    journal = TrialJournal(folder.trials)
    # Whatever a trial writes belongs to the search, and a classifier's tokenizer lies in the folder of its run.
    measured = config.model_copy(update={"run": config.run.model_copy(update={"name": search.name})})
    if find(config.ray) == LOCAL:
        make_space(config, search, [*local_resources()])  # refuses what can be refused before Ray starts
    task = task_plan(measured)
    with conversion_bar("preparing the data") as progress:
        store_path = task.prepare(folder.stores, progress)
    with cluster.connected(config.ray) as dashboard:
        signals.reinstall()
        _check_hardware(folder, journal)
        space = make_space(config, search, cluster.cluster_resources())
        write_atomically(folder.config, dump_config(config))
        write_atomically(folder.tune, dump_config(search))
        task.write_names(folder, store_path)
        say(f"search {search.name}: {folder.path}" + (f", dashboard http://{dashboard}" if dashboard else ""))
        say("\n".join(_space_lines(space, search)))
        if journal.trials:
            say(f"resumes from {len(journal.trials)} trials")
        pool = _PoolActor(measured, search, store_path, make_pool)
        if not journal.trials:
            pool.start(space.default.workers)
        error = _run(pool, space, search, folder, journal, signals)
    return _conclude(config, search, folder, space, journal, signals, error)


def _run(
    pool: _PoolActor,
    space: SearchSpace,
    search: TuneConfig,
    folder: SearchFolder,
    journal: TrialJournal,
    signals: StopSignals,
) -> Exception | None:
    """Ray Tune from the first trial to the last, or to a signal; what broke it, if anything did."""
    answered = {trial.settings for trial in journal.trials}

    def learned(settings: Settings, measurement: Measurement, phase: str) -> None:
        if settings in answered and not was_measured(measurement):
            return  # concluded again from what is known already
        journal.add(settings, measurement, phase)
        progress.show(journal)

    searcher = ThroughputSearch(space, search, journal.measured(), learned)
    progress = _Progress(space, search, searcher)

    ray_tune_logger = logging.getLogger("ray.tune")

    def meanwhile() -> None:
        progress.refresh()
        if searcher.stopped:
            ray_tune_logger.setLevel(logging.CRITICAL)  # to Ray Tune the trial that ends here has failed
            pool.kill()

    signals.hand_over(searcher.stop, "stopping after what was measured so far")
    with ExitStack() as stack:
        stack.callback(ray_tune_logger.setLevel, ray_tune_logger.level)
        stack.enter_context(progress.console_status())
        stack.callback(pool.kill)
        stack.callback(shutil.rmtree, folder.ray_tune, ignore_errors=True)
        fit = Fit(_make_tuner(pool, space, search, searcher, folder))
        fit.wait(signals, meanwhile)
    if searcher.broken_off >= MOST_BROKEN_OFF:
        return ResourceError(
            f"{searcher.broken_off} trials in a row ended without a result (Ray's logs say why): look at the cluster; "
            "the same command resumes it"
        )
    return fit.error


def _make_tuner(
    pool: _PoolActor, space: SearchSpace, search: TuneConfig, searcher: ThroughputSearch, folder: SearchFolder
) -> Any:
    # The journal holds what Ray Tune's loggers would write, and a line a trial is shown.
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new one prints tables also with verbose=0 (ray 2.60)
    return ray_tune.Tuner(
        ray_tune.with_resources(pool.trainable(search), NEXT_TO_NOTHING),
        tune_config=ray_tune.TuneConfig(
            search_alg=searcher,
            num_samples=len(space) + search.search.repeats,
            max_concurrent_trials=1,  # trials never share a device
            reuse_actors=True,
        ),
        run_config=ray_tune.RunConfig(name=folder.ray_tune.name, storage_path=str(folder.path), verbose=0),
    )


class _PoolActor:
    """The driver's end of the actor in which the pool lives.

    Raises:
        ResourceError: it does not start.
    """

    def __init__(self, config: Config, search: TuneConfig, store_path: Path, make_pool: MakePool) -> None:
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "runtime_env": cluster.worker_environment()}
        host: Any = ray.remote(_PoolHost).options(**options)
        plain = config.model_dump(mode="json")
        self._actor: Any = host.remote(make_pool, plain, str(store_path), search.keep_global_tokens)
        self._alive = True
        try:
            ray.get(self._actor.is_ready.remote(), timeout=cluster.START_TIMEOUT_S)
        except (RayError, GetTimeoutError) as error:
            self.kill()
            raise ResourceError(f"the pool that measures did not start: {_last_line(error)}") from error

    def start(self, workers: int) -> None:
        """Start workers while Ray Tune starts its first trial; that trial tells what goes wrong."""
        self._actor.start.remote(workers)

    def trainable(self, search: TuneConfig) -> Callable[[dict[str, Any]], None]:
        """What a trial of Ray Tune runs: it asks the pool, and reports the windows and the result.

        A closure, as it is sent by value then: Ray gives trials no environment in which they could import this module.
        """
        actor, metric = self._actor, METRIC
        measurement, margin = search.measurement.model_dump(), search.search.prune_margin

        def measure(trial: dict[str, Any]) -> None:
            import json

            import ray
            from ray import tune

            best = trial["best_tokens_per_s"]
            windows = measurement | {"max_windows": trial["max_windows"]}
            result = ray.get(actor.measure.remote(trial["settings"], windows, best, margin))
            for window in result["windows"][:-1]:
                tune.report({metric: window})
            tune.report({metric: result[metric] or 0.0, "measurement": json.dumps(result)})

        return measure

    def kill(self) -> None:
        """End the pool with its workers, whatever they are doing. May be called again."""
        if self._alive:
            self._alive = False
            ray.kill(self._actor)


class _PoolHost:
    """The pool, in an actor that takes no core. Its workers end with it."""

    def __init__(self, make_pool: MakePool, config: dict[str, Any], store_path: str, keep_global_tokens: bool) -> None:
        self._pool = make_pool(Config.model_validate(config), Path(store_path), keep_global_tokens=keep_global_tokens)

    def is_ready(self) -> bool:
        """Answers once the pool is there."""
        return True

    def start(self, workers: int) -> None:
        """See :meth:`MeasuringPool.start`."""
        self._pool.start(workers)

    def measure(
        self, settings: dict[str, Any], measurement: dict[str, Any], best_tokens_per_s: float | None, margin: float
    ) -> dict[str, Any]:
        """See :meth:`MeasuringPool.measure`; plain values, which need none of this code to be read."""
        section = MeasurementSection.model_validate(measurement)
        return asdict(self._pool.measure(Settings(**settings), section, best_tokens_per_s, margin))


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _check_same(config: Config, search: TuneConfig, folder: SearchFolder) -> list[str]:
    """Refuse to mix measurements of different experiments; remarks on what changed and may.

    Raises:
        ConfigError: what the folder's trials measured is not what this search would.
    """
    if not (folder.trials.exists() and folder.config.exists() and folder.tune.exists()):
        return []
    before, earlier = load_config(folder.config).model_dump(), load_tune_config(folder.tune)
    now = config.model_dump()
    keep = {"keep_global_tokens": search.keep_global_tokens}
    changed = differences(before | {"keep_global_tokens": earlier.keep_global_tokens}, now | keep)
    for key, (old, new) in changed.items():
        if within(key, CHANGES_SPEED) and not within(key, CHANGES_NO_SPEED):
            raise ConfigError(
                f"{key}: the trials of {folder.path} were measured with {old!r}, now it is {new!r}: set it back, or "
                "choose another --tune.name"
            )
    again = differences(earlier.measurement.model_dump(), search.measurement.model_dump())
    return [f"measurement.{key} was {old!r}, is now {new!r}: earlier trials stay" for key, (old, new) in again.items()]


def _check_hardware(folder: SearchFolder, journal: TrialJournal) -> None:
    """Refuse to mix measurements of different machines.

    Raises:
        ConfigError: the folder's trials were measured on others.
    """
    here = cluster.hardware()
    before = folder.hardware.read_text(encoding="utf-8").strip() if folder.hardware.exists() else here
    if journal.trials and before != here:
        raise ConfigError(
            f"{folder.path}: its trials were measured on {before}, this is {here}: choose another --tune.name"
        )
    write_atomically(folder.hardware, f"{here}\n")


def _space_lines(space: SearchSpace, search: TuneConfig) -> list[str]:
    lines = []
    for name in space.varied:
        lines.append(f"{NAMES[name]:<21} {', '.join(value_text(name, value) for value in space.values[name])}")
    lines.append(f"{'configurations':<21} {len(space):,}")
    lines += [f"{'left out':<21} {count:,}: {reason}" for reason, count in space.left_out.items()]
    trials = ThroughputSearch(space, search).max_trials
    budget_s = search.search.time_budget_s
    until = f", and none after {budget_s:g} s" if budget_s is not None else ""
    lines.append(f"{'trials':<21} at most {trials:,} ({search.search.algorithm}){until}")
    if repeats := search.search.repeats:
        lines.append(f"{'repeats':<21} the fastest, at most {repeats} of what may be it")
    return lines


def _preview(space: SearchSpace, search: TuneConfig) -> list[Settings]:
    """What is tried first where everything fits and nothing is faster than anything else."""
    searcher = ThroughputSearch(space, search)
    first: list[Settings] = []
    while len(first) < PREVIEWED and isinstance(trial := searcher.suggest(str(len(first))), dict):
        if searcher.repeats:
            break
        first.append(Settings(**trial["settings"]))
        same = Measurement("ok", "", tokens_per_s=1.0, windows=[1.0])
        searcher.on_trial_complete(str(len(first)), {"measurement": json.dumps(asdict(same))})
    return first


@dataclass
class _Progress:
    """A line for each trial and, on a terminal, one that says what is being measured."""

    space: SearchSpace
    search: TuneConfig
    searcher: ThroughputSearch
    _status: Status | None = None

    def console_status(self) -> Status | ExitStack:
        """The line that is kept up to date; nothing where there is no terminal."""
        if not sys.stdout.isatty():
            return ExitStack()
        self._status = Console().status("")
        return self._status

    def refresh(self) -> None:
        """Say what is being measured."""
        if self._status is not None and (proposal := self.searcher.measuring) is not None:
            what = settings_text(asdict(proposal.settings), self.space.varied)
            which = f"trial {self.searcher.trials} of at most {self.searcher.max_trials}"
            if proposal.phase == CONFIRM:
                which = "once more"
            self._status.update(f"{which}: {what}")

    def show(self, journal: TrialJournal) -> None:
        """Leave a line for the newest trial."""
        seen = seen_trials(journal)
        best = best_trial(seen, self.search.memory_margin)
        mark = " (the fastest so far)" if best is seen[-1] else ""
        which = f"{self.searcher.trials}/{self.searcher.max_trials} {seen[-1].phase}"
        if seen[-1].phase == CONFIRM:
            which = "once more, mean of its trials" if seen[-1].status == "ok" else "once more"
        line = f"{which}: {describe(seen[-1], self.space, self.search.memory_margin)}{mark}"
        if self._status is not None:
            self._status.console.print(line, highlight=False, markup=False)
        else:
            say(line)


def _conclude(
    config: Config,
    search: TuneConfig,
    folder: SearchFolder,
    space: SearchSpace,
    journal: TrialJournal,
    signals: StopSignals,
    error: Exception | None,
) -> int:
    trials = seen_trials(journal)
    best = best_trial(trials, search.memory_margin)
    if best is not None:
        write_best(folder.best, best, trials, space, config, search)
    if trials:
        write_pareto(folder.pareto, trials, search.memory_margin)
    if trials or not signals.received:
        _write_report(folder, space, journal)
    if signals.received:
        found = f", {folder.best} has the fastest so far ({speed(best):,.0f} tokens/s)" if best is not None else ""
        report = f", {folder.report} tells of them" if trials else ""
        say(f"stopped after {len(trials)} trials{report}{found}; the same command resumes it")
        return signals.exit_code
    if error is not None:
        raise error
    if best is None:
        raise nothing_fits(trials)
    print_table(trials, space, search.memory_margin, Console())
    say(f"  fastest  {folder.best}\n  trials   {folder.trials}\n  report   {folder.report}")
    return 0


def _write_report(folder: SearchFolder, space: SearchSpace, journal: TrialJournal) -> None:
    """A report that can't be drawn is no reason to hide a result."""
    from tuning.report import write_tune_report  # here: it loads matplotlib

    values = {name: list(values) for name, values in space.values.items()}
    try:
        write_tune_report(trial_records(journal), folder.path, values)
    except (OSError, ValueError, EsmerayError) as error:
        warn(f"{folder.report}: not written ({error})")
