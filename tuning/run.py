"""The driver of a throughput search: from an experiment to best.yaml, the same experiment with the fastest settings.

:mod:`tuning.search` chooses the next configuration; the :class:`~tuning.pool.MeasuringPool`, whose Ray actors stay
from trial to trial, measures it. What every trial did is in trials.jsonl before the next begins; the same command
resumes it from there.

<storage_path>/<tune.name>/
    config.yaml, tune.yaml   the experiment and the search, resolved
    hardware.txt             the machines on which it was measured
    trials.jsonl             see tuning.journal
    best.yaml, pareto.csv    see tuning.results
    tune_report.html, .png   see tuning.report
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from common.errors import ConfigError, EsmerayError
from common.progress import conversion_bar, status_line
from common.publishing import write_atomically
from run_folder.paths import RunFolder
from train_config.loading import dump_config, load_config, load_tune_config
from train_config.schema import Config
from train_config.tune_schema import TuneConfig
from training.checkpoints.resuming import differences, within
from training.launch import cluster
from training.launch.driver import (
    resources_to_plan_with,
    say,
    until_signal,
    warn,
    with_absolute_paths,
)
from training.launch.placement import LOCAL, find, local_resources
from training.launch.signals import StopSignals
from training.tasks.registry import task_plan
from tuning.journal import TrialJournal
from tuning.pool import MeasuringPool
from tuning.results import Results, describe, nothing_fits, print_table, speed_text, write_best, write_pareto
from tuning.search import CONFIRM, Search, most_trials
from tuning.settings import KEYS, NAMES, Measurement, Settings, settings_text, value_text
from tuning.space import SearchSpace, make_space

MakePool: TypeAlias = Callable[..., Any]

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


def tune(config: Config, search: TuneConfig, make_pool: MakePool = MeasuringPool) -> int:
    """Search to the end.

    Args:
        config: the experiment.
        search: what is varied and how.
        make_pool: what measures; called with config, store and ``keep_global_tokens``.

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
        print(f"  {settings_text(settings, space.varied) or 'the experiment as it is'}")
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
        with make_pool(measured, store_path, keep_global_tokens=search.keep_global_tokens) as pool:
            error = _run(pool, space, search, journal, signals)
    return _conclude(config, search, folder, space, journal, signals, error)


def _run(
    pool: MeasuringPool, space: SearchSpace, search: TuneConfig, journal: TrialJournal, signals: StopSignals
) -> EsmerayError | None:
    """Measure from the first trial to the last, or to a signal; return what ended the search early, if anything did."""
    searcher = Search(space, search)
    earlier = journal.measured()
    try:
        with status_line() if sys.stdout.isatty() else nullcontext(lambda _: None) as show:
            while (proposal := searcher.ask()) is not None:
                settings, phase = proposal
                if answers := earlier.get(settings):
                    searcher.tell(settings, answers.pop(0))
                    continue
                which = f"{len(searcher.results) + 1}/{searcher.max_trials} {phase}"
                if phase == CONFIRM:
                    which = "once more, mean of its trials"
                show(f"{which}: {settings_text(settings, space.varied)}")
                to_beat = searcher.to_beat(proposal)
                measurement = pool.measure(settings, search.measurement, to_beat, search.search.prune_margin)
                journal.add(settings, measurement, phase)
                searcher.tell(settings, measurement)
                say(f"{which}: {_newest(Results(journal.trials, space, search.memory_margin))}")
    except (KeyboardInterrupt, SystemExit) as error:
        signals.received = signals.behind(error)
        if signals.received is None:
            raise
    except EsmerayError as error:
        return error
    return None


def _newest(results: Results) -> str:
    """The configuration tried last, in a line."""
    newest = results.configurations[-1]
    mark = " (the fastest so far)" if results.best is newest else ""
    return f"{describe(newest, results.space, results.margin)}{mark}"


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
    trials = most_trials(search.search, len(space))
    budget_s = search.search.time_budget_s
    until = f", and none after {budget_s:g} s" if budget_s is not None else ""
    lines.append(f"{'trials':<21} at most {trials:,} ({search.search.algorithm}){until}")
    if repeats := search.search.repeats:
        lines.append(f"{'repeats':<21} the fastest, at most {repeats}")
    return lines


def _preview(space: SearchSpace, search: TuneConfig) -> list[Settings]:
    """The first configurations where all fit and are equally fast."""
    searcher = Search(space, search)
    first: list[Settings] = []
    while len(first) < PREVIEWED and (proposal := searcher.ask()) is not None and proposal.phase != CONFIRM:
        first.append(proposal.settings)
        searcher.tell(proposal.settings, Measurement("ok", "", tokens_per_s=1.0, windows=[1.0]))
    return first


def _conclude(
    config: Config,
    search: TuneConfig,
    folder: SearchFolder,
    space: SearchSpace,
    journal: TrialJournal,
    signals: StopSignals,
    error: Exception | None,
) -> int:
    results = Results(journal.trials, space, search.memory_margin)
    if results.best is not None:
        write_best(folder.best, results, config, search)
    if results.trials:
        write_pareto(folder.pareto, results)
    if results.trials or not signals.received:
        _write_report(folder, results)
    if signals.received:
        best = results.best
        found = f", {folder.best} has the fastest so far ({speed_text(best.measurement)})" if best is not None else ""
        report = f", {folder.report} reports them" if results.trials else ""
        say(f"stopped after {len(results.trials)} trials{report}{found}; the same command resumes it")
        return signals.exit_code
    if error is not None:
        raise error
    if results.best is None:
        raise nothing_fits(results)
    print_table(results, Console())
    say(f"  fastest  {folder.best}\n  trials   {folder.trials}\n  report   {folder.report}")
    return 0


def _write_report(folder: SearchFolder, results: Results) -> None:
    """A report that can't be drawn is no reason to hide a result."""
    from tuning.report import write_tune_report  # here: it loads matplotlib

    try:
        write_tune_report(results, folder.path)
    except (OSError, ValueError, EsmerayError) as error:
        warn(f"{folder.report}: not written ({error})")
