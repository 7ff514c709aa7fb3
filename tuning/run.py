"""The driver of a throughput search: from an experiment to best.yaml, the same experiment with the fastest settings.

Ray Tune runs the trials (:mod:`tuning.ray_tune`), Optuna chooses them (:mod:`tuning.search`). What every trial did is
in trials.jsonl before the next begins; the same command resumes the search from there.

<storage_path>/<tune.name>/
    config.yaml, tune.yaml   the experiment and the search, resolved
    hardware.txt             the machines on which it was measured
    trials.jsonl             see tuning.journal
    best.yaml                see tuning.results
    tune_report.html, .png   see tuning.report
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster import connection
from cluster.placement import LOCAL, find, local_resources
from cluster.signals import StopSignals
from common.errors import ConfigError, EsmerayError
from common.progress import conversion_bar, status_line
from common.publishing import write_atomically
from run_folder.job import differences
from run_folder.paths import RunFolder
from train_config.loading import dump_config, load_recorded, load_tune_config
from train_config.natures import with_absolute_paths
from train_config.schema import Config
from train_config.tune_schema import TuneConfig
from training.launch.driver import (
    resources_to_plan_with,
    say,
    until_signal,
    warn,
)
from training.tasks.registry import task_plan
from tuning.journal import TrialJournal
from tuning.pool import MeasuringPool
from tuning.results import Results, describe, nothing_fits, speed_text, write_best
from tuning.search import CONFIRM, Proposal, Search, most_trials
from tuning.settings import KEYS, NAMES, Measurement, settings_text, value_text
from tuning.space import SearchSpace, make_space

CHANGES_SPEED = ("data", "batch", "model", "training", "deepspeed", "ray.cpus_per_worker", "keep_global_tokens")
"""Settings under which a measurement holds; those that are searched may change nevertheless."""


class SearchFolder(RunFolder):
    """Paths of a search, which lies among the runs."""

    def __init__(self, storage_path: str | Path, name: str) -> None:
        super().__init__(storage_path, name)
        self.tune = self.path / "tune.yaml"
        self.hardware = self.path / "hardware.txt"
        self.trials = self.path / "trials.jsonl"
        self.best = self.path / "best.yaml"
        self.report = self.path / "tune_report.html"
        self.ray_tune = self.path / "ray_tune"


def tune(config: Config, search: TuneConfig, make_pool: Callable[..., Any] = MeasuringPool) -> int:
    """Search to the end with the pool that ``make_pool`` makes of a config, a store and ``keep_global_tokens``.

    Returns the process's exit code: 0 finished, 128 + signal when stopped. Raises EsmerayError where it can't start, or
    no configuration fits.
    """
    folder = SearchFolder(config.run.storage_path, search.name)
    config = with_absolute_paths(config)
    return until_signal(folder, lambda signals: _tune_locked(config, search, folder, signals, make_pool), "the search")


def dry_run_tune(config: Config, search: TuneConfig) -> int:
    """Print the resolved search and the space; measure nothing."""
    folder = SearchFolder(config.run.storage_path, search.name)
    _check_same(with_absolute_paths(config), search, folder)
    space = make_space(config, search, resources_to_plan_with(config.ray))
    print(dump_config(search))
    print("\n".join(_space_lines(space, search)))
    return 0


def _tune_locked(
    config: Config, search: TuneConfig, folder: SearchFolder, signals: StopSignals, make_pool: Callable[..., Any]
) -> int:
    _check_same(config, search, folder)
    journal = TrialJournal(folder.trials)
    # Whatever a trial writes belongs to the search, and a classifier's tokenizer lies in the folder of its run.
    measured = config.model_copy(update={"run": config.run.model_copy(update={"name": search.name})})
    if find(config.ray) == LOCAL:
        make_space(config, search, [*local_resources()])  # refuses what can be refused before Ray starts
    task = task_plan(measured)
    with conversion_bar("preparing the data") as progress:
        store_path = task.prepare(folder.stores, progress)
    with connection.connected(config.ray) as dashboard:
        signals.reinstall()
        here = connection.hardware()
        if journal.trials and folder.hardware.exists() and (before := folder.hardware.read_text().strip()) != here:
            raise ConfigError(f"{folder.path} was measured on {before}, this is {here}: choose another --tune.name")
        write_atomically(folder.hardware, f"{here}\n")
        space = make_space(config, search, connection.cluster_resources())
        write_atomically(folder.config, dump_config(config))
        write_atomically(folder.tune, dump_config(search))
        task.write_names(folder, store_path)
        say(f"search {search.name}: {folder.path}" + (f", dashboard http://{dashboard}" if dashboard else ""))
        say("\n".join(_space_lines(space, search)))
        if journal.trials:
            say(f"resumes from {len(journal.trials)} trials")
        make = partial(make_pool, measured, store_path, keep_global_tokens=search.keep_global_tokens)
        error = _run(make, space, search, folder, journal, signals)
    return _conclude(config, search, folder, space, journal, signals, error)


def _run(
    make_pool: Callable[[], Any],
    space: SearchSpace,
    search: TuneConfig,
    folder: SearchFolder,
    journal: TrialJournal,
    signals: StopSignals,
) -> Exception | None:
    """Measure from the first trial to the last, or to a signal; return what ended the search early, if anything did."""
    from tuning.ray_tune import SearchAlgorithm, run_trials  # here: it loads Ray Tune

    searcher = Search(space, search)

    def which(proposal: Proposal) -> str:
        if proposal.phase == CONFIRM:
            return "once more, mean of its trials"
        return f"{len(searcher.results) + 1}/{searcher.max_trials} {proposal.phase}"

    def measured(proposal: Proposal, measurement: Measurement) -> None:
        journal.add(proposal.settings, measurement, proposal.phase)
        results = Results(journal.trials, space, search.memory_margin)
        newest = results.configurations[-1]
        mark = " (the fastest so far)" if results.best is newest else ""
        say(f"{which(proposal)}: {describe(newest, results)}{mark}")

    with status_line() if sys.stdout.isatty() else nullcontext(lambda _: None) as show:

        def asked(proposal: Proposal) -> None:
            show(f"{which(proposal)}: {settings_text(proposal.settings, space.varied)}")

        algorithm = SearchAlgorithm(searcher, journal.trials, asked, measured)
        most = len(space) + search.search.repeats
        return run_trials(algorithm, make_pool, search, most, folder.ray_tune, signals)


def _check_same(config: Config, search: TuneConfig, folder: SearchFolder) -> None:
    """Refuse to mix measurements of different experiments by a ConfigError."""
    if not (folder.trials.exists() and folder.config.exists() and folder.tune.exists()):
        return
    kept = {"keep_global_tokens": load_tune_config(folder.tune).keep_global_tokens}
    before = load_recorded(folder.config).model_dump() | kept
    now = config.model_dump() | {"keep_global_tokens": search.keep_global_tokens}
    for change in differences(before, now):
        if change.within(CHANGES_SPEED) and change.key not in KEYS.values():
            raise ConfigError(
                f"{change}, and the trials of {folder.path} were measured before: set it back, or "
                "choose another --tune.name"
            )


def _space_lines(space: SearchSpace, search: TuneConfig) -> list[str]:
    words = {name: [value_text(name, value) for value in space.values[name]] for name in space.varied}
    lines = [f"{NAMES[name]:<21} {', '.join(values)}" for name, values in words.items()]
    lines.append(f"{'configurations':<21} {len(space):,}")
    lines += [f"{'left out':<21} {count:,}: {reason}" for reason, count in space.left_out.items()]
    trials = most_trials(search.search, len(space))
    budget_s = search.search.time_budget_s
    until = f", and none after {budget_s:g} s" if budget_s is not None else ""
    lines.append(f"{'trials':<21} at most {trials:,} ({search.search.algorithm}){until}")
    return lines


def _conclude(
    config: Config,
    search: TuneConfig,
    folder: SearchFolder,
    space: SearchSpace,
    journal: TrialJournal,
    signals: StopSignals,
    error: Exception | None,
) -> int:
    from tuning.report import print_table, write_tune_report  # here: it loads matplotlib

    results = Results(journal.trials, space, search.memory_margin)
    best = results.best
    if best is not None:
        write_best(folder.best, results, config, search)
    if results.trials or not signals.received:
        try:
            write_tune_report(results, folder.path)
        except (OSError, ValueError, EsmerayError) as failure:  # no reason to hide a result
            warn(f"{folder.report}: not written ({failure})")
    if signals.received:
        found = f", {folder.best} has the fastest so far ({speed_text(best.measurement)})" if best is not None else ""
        report = f", {folder.report} reports them" if results.trials else ""
        say(f"stopped after {len(results.trials)} trials{report}{found}; the same command resumes it")
        return signals.exit_code
    if error is not None:
        raise error
    if best is None:
        raise nothing_fits(results)
    print_table(results, Console())
    say(f"  fastest  {folder.best}\n  trials   {folder.trials}\n  report   {folder.report}")
    return 0
