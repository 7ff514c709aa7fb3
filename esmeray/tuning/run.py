"""The driver of a throughput search: from an experiment to best.yaml, the same experiment with the fastest settings.

Ray Tune runs the trials (:mod:`esmeray.tuning.ray_tune`), Optuna chooses them (:mod:`esmeray.tuning.search`).

<storage_path>/<tune.name>/
    config.yaml, tune.yaml   the experiment and the search, resolved
    hardware.txt             the machines that it was measured on
    trials.jsonl             Optuna's journal of all trials, see tuning.search
    ray_tune/                Ray Tune's own results and state
    best.yaml                see tuning.results
    trials.csv, trials.png   all trials as a table and a picture
"""

from dataclasses import replace

from rich.console import Console

from esmeray.cluster.placement import LOCAL, find, local_resources
from esmeray.cluster.signals import StopSignals
from esmeray.common.command_line import next_command, say
from esmeray.common.errors import ConfigError
from esmeray.common.progress import conversion_bar
from esmeray.common.publishing import write_atomically
from esmeray.run_folder.job import differences
from esmeray.tasks.plan import task_plan
from esmeray.train_config.loading import dump_config, load_settings
from esmeray.train_config.section import with_absolute_paths
from esmeray.training.config import load_config, with_precision
from esmeray.training.launch.driver import resources_to_plan_with, until_signal
from esmeray.training.launch.planning import check_task
from esmeray.tuning.records import KEYS, Job
from esmeray.tuning.results import Results, draw, make_table, nothing_fits, summary, to_set, trial_table, write_best
from esmeray.tuning.section import TuneConfig
from esmeray.tuning.space import make_space, space_lines

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
    task = task_plan(job.config.data, job.config.model)
    check_task(task, job.measured.training, job.measured.deepspeed, is_begun=job.folder.trials.exists())
    data_tokens = task.estimate().data.tokens
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
    check_task(task, job.measured.training, job.measured.deepspeed, is_begun=folder.trials.exists())
    with conversion_bar("preparing the data") as progress:
        store_path = task.prepare(folder.stores, progress)
    data_tokens = task.measure(store_path).data.tokens
    task.write_names(folder, store_path)
    from esmeray.tuning.ray_tune import search_on_cluster  # here: it loads Ray Tune
    from esmeray.tuning.search import read_trials

    space, error = search_on_cluster(replace(job, store_path=str(store_path)), data_tokens, signals)
    results = Results(read_trials(folder.trials), space, job.search.memory_margin)
    return _conclude(job, results, signals, error)


def _with_first_precision(job: Job) -> Job:
    """Return the job with the precision of the search that it resumes, if it sets none.

    Raises ConfigError for a different experiment, whose measurements would be mixed with the existing ones.
    """
    folder = job.folder
    if (folder.path / "trials").is_dir():
        raise ConfigError(f"{folder.path}: contains a search of an earlier version; choose another --tune.name")
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


def _conclude(job: Job, results: Results, signals: StopSignals, error: Exception | None) -> int:
    folder, best = job.folder, results.best
    # Written after a signal too: a user who stops a search wants its measurements.
    if best is not None:
        write_best(best, results, job)
    if results.trials:
        trials = trial_table(results)
        write_atomically(folder.table, trials.to_csv(index=False))
        draw(trials, folder.picture)
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
    say(f"  fastest  {folder.best}\n  trials   {folder.table}, {folder.picture}")
    say(next_command("train", "--config", folder.best))
    return 0
