"""The driver: runs an experiment from its config to its end, in the process that the user started.

It prepares the data, finds the workers, runs Ray Train and reports. The training itself runs in the workers
(:mod:`esmeray.training.loop.worker`). Their metrics come back through metrics.jsonl in the run's folder.
"""

import math
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from esmeray.cluster.placement import (
    LOCAL,
    NodeResources,
    Workers,
    check_interface,
    find,
    local_resources,
    place_workers,
)
from esmeray.cluster.section import RaySection
from esmeray.cluster.signals import StopSignals
from esmeray.common import processor
from esmeray.common.command_line import say, warn
from esmeray.common.errors import ResourceError, last_line
from esmeray.common.progress import conversion_bar
from esmeray.common.publishing import refuse_existing, write_atomically, writing
from esmeray.common.remote import AT_ONCE_S
from esmeray.model.export.exported_folder import MADE_BY
from esmeray.monitoring.sinks.wandb_run import WandbFollowers
from esmeray.monitoring.watch.alerts import AlertSink
from esmeray.monitoring.watch.progress import ProgressSink
from esmeray.monitoring.watch.run_watcher import CurvesSink, RunWatcher, Sink
from esmeray.run_folder.checkpoints import CheckpointStore, check_data, saved_steps
from esmeray.run_folder.job import LOCK_FILE, held, refuse_foreign
from esmeray.run_folder.mirror import ENDING_S, RunMirror, place_of
from esmeray.run_folder.paths import RESERVE_BYTES, Outcome, RunFolder, no_space
from esmeray.tasks.plan import TaskPlan, TaskSize, task_plan
from esmeray.tasks.registry import metric_labels
from esmeray.train_config.loading import dump_config
from esmeray.train_config.section import with_absolute_paths
from esmeray.training.checkpoints.resuming import Resumption
from esmeray.training.config import Config, with_precision
from esmeray.training.engine.deepspeed_settings import check_precision
from esmeray.training.engine.watchdog import left_stacks
from esmeray.training.launch.elastic import Attempts, fit
from esmeray.training.launch.planning import Plan, check_task, check_warm_up, make_plan
from esmeray.training.section import TrainingSection

WATCHER_TIMEOUT_S = 30.0


Background = Callable[[Config, Path], AbstractContextManager[Config]]
"""Factory of a context that runs in the background of training on the cluster.

Gets the config and the prepared data, and returns the config for the workers.
"""


def train(config: Config, background: Background = lambda config, _: nullcontext(config)) -> int:
    """Run the experiment to its end. Raises EsmerayError if it can't start.

    Returns the process's exit code: 0 if finished, 128 + signal if stopped, otherwise the failure's code.
    """
    resumption = Resumption(with_absolute_paths(config))
    return until_signal(resumption.run, lambda signals: _train_locked(resumption, signals, background), "training")


def until_signal(run: RunFolder, work: Callable[[StopSignals], int], name: str) -> int:
    """Do work in a run's folder while no other process may work on it. Returns the exit code.

    ``work`` receives signals once it calls :meth:`StopSignals.hand_over`. For an earlier signal, the name of the work
    is printed and 128 + signal returned.
    """
    if run.path.is_dir() and not run.config.exists():
        refuse_foreign(run.path, {path.name for path in run.path.iterdir()}, LOCK_FILE)
    signals = StopSignals()
    try:
        with signals, held(run.path):
            return work(signals)
    except KeyboardInterrupt:
        print(f"interrupted before {name} started", file=sys.stderr)
        return signals.interrupted_code


def _train_locked(resumption: Resumption, signals: StopSignals, background: Background) -> int:
    """Validate everything before writing to the run's folder or starting Ray; then train."""
    # First, because another machine may have trained the run since: all checks need its newest state.
    RunMirror(resumption.run, warn).pull(AT_ONCE_S)
    resumption = resumption.with_first_precision()
    config, run = resumption.config, resumption.run
    resumption.check()
    finished = resumption.is_finished()
    # If a cluster will be started here, its workers are already known. Any other cluster reports them once it is
    # joined.
    local = place_workers(config.ray, local_resources()) if not finished and find(config.ray) == LOCAL else None
    if not finished:
        _check_start(config.training, run, local)
    task = task_plan(config.data, config.model)
    check_task(task, config.training, config.deepspeed, is_begun=bool(resumption.checkpoints.complete()))
    with conversion_bar("preparing the data") as progress:
        store_path = task.prepare(run.stores, progress)
    _check_prepared(task, run, store_path)
    if finished:
        if not run.curves.exists():  # killed between the outcome and the curves
            CurvesSink(run, metric_labels()).close()
        say(_finished(run))
        return 0
    size = task.measure(store_path)
    # Check before Ray starts, which takes seconds.
    if local is not None:
        check_interface()
        _plan(resumption, local, size)
    with ExitStack() as cluster:
        if local is not None and task.in_process and local.count == 1 and not local.use_gpu:
            workers, dashboard = local, None
        else:
            from esmeray.cluster import connection  # here: it imports Ray, and the work that needs it begins

            dashboard = cluster.enter_context(connection.connected(config.ray, None if run.uri else run.path))
            workers = place_workers(config.ray, connection.cluster_resources())
            check_precision(config.training, workers.device)
        # Use the nodes' default, not this machine's. A cluster that was started here is this machine.
        default_precision = connection.default_precision if local is None else processor.default_precision
        config = with_precision(config, default_precision(workers.use_gpu))
        resumption = Resumption(config)
        plan = _plan(resumption, workers, size)
        for remark in resumption.check():  # checked again, now with the precision in which the workers compute
            warn(remark)
        _announce(resumption, plan, dashboard)
        _record_start(resumption, task, store_path)
        with _followed(resumption, plan, signals) as mirror, background(config, store_path) as of_workers:
            from esmeray.training.launch import trainers  # here: it loads torch

            arguments = {
                "config": of_workers.model_dump(mode="json"),
                "store_path": str(store_path),
                "folder": place_of(run),
                "cpus": workers.cpus_each,
                "wandb_run_id": run.wandb_run_id.read_text().strip(),
            }
            if dashboard is None:
                error = fit(partial(trainers.train_here, arguments), signals)
            else:
                attempts = Attempts(run, workers, partial(connection.capacity, workers), signals, config.ray)
                start = partial(trainers.fit_workers, arguments, workers, config.run)
                with connection.requested_machines(workers):
                    error = attempts.train(mirror.with_outcome()(start))
    # Once its own cluster has ended, no worker can save a checkpoint any more.
    return _conclude(run, error, signals, config.ray.max_failures)


def dry_run(config: Config) -> int:
    """Print the resolved config and the plan, and start nothing. Raises the same errors as a run that can't start or
    resume."""
    run = Resumption(config).run
    if run.uri is not None:
        with held(run.path):  # so as not to change the working copy of a run in progress
            RunMirror(run, warn).pull(AT_ONCE_S)
    config = Resumption(config).with_first_precision().config
    workers = place_workers(config.ray, resources_to_plan_with(config.ray))
    config = with_precision(config, processor.default_precision(workers.use_gpu))
    resumption = Resumption(with_absolute_paths(config))
    remarks = resumption.check()
    finished = resumption.is_finished()
    if not finished:
        _check_start(config.training, run, workers if config.ray.address in (None, LOCAL) else None)
    task = task_plan(config.data, config.model)
    check_task(task, config.training, config.deepspeed, is_begun=bool(resumption.checkpoints.complete()))
    _check_source(task, run)
    plan = _plan(resumption, workers, task.estimate())
    for remark in remarks:
        warn(remark)
    print(dump_config(config))
    print("\n".join([*plan.lines(), *([_finished(run)] if finished else [])]))
    return 0


def _finished(run: RunFolder) -> str:
    return (
        f"run {run.path.name} is finished: {run.uri or run.path}/export (to continue training, raise "
        "training.max_steps or training.epochs)"
    )


def _check_prepared(task: TaskPlan, run: RunFolder, path: Path) -> None:
    """Raise an error if the newest checkpoint was trained with other data, or its model would read the data
    differently."""
    checkpoint = CheckpointStore(run.checkpoints).newest_intact()
    if checkpoint is not None:
        check_data(run, task.data.source, task.checksum(path))
        task.check_resumed(checkpoint, path)


def _check_source(task: TaskPlan, run: RunFolder) -> None:
    """Check the data of a run that has a checkpoint. If the prepared data is missing, prepare it in a temporary
    folder."""
    if CheckpointStore(run.checkpoints).newest_intact() is None:
        return
    # Data that another machine prepared may be missing here.
    path = task.location(run.stores)
    if path.exists():
        _check_prepared(task, run, path)
        return
    elsewhere = replace(task, data=task.data.model_copy(update={"store": None}))
    with TemporaryDirectory() as folder, conversion_bar("reading the data") as progress:
        _check_prepared(task, run, elsewhere.prepare(Path(folder), progress))


def _plan(resumption: Resumption, workers: Workers, size: TaskSize) -> Plan:
    """Return the plan. Raises ConfigError if the end of training has already passed, or a new run's warm-up is too
    long."""
    config = resumption.config
    plan = make_plan(config.batch, config.training, config.deepspeed, workers, size)
    resumption.check_steps(plan.total_steps)
    # A run that an earlier version started with such a warm-up can still resume.
    if not resumption.checkpoints.complete():
        check_warm_up(config.training, plan.total_steps)
    return plan


def _check_start(training: TrainingSection, run: RunFolder, workers: Workers | None) -> None:
    """Raise an error if the run could not be exported, or if these workers, when known, can't train with its
    precision."""
    refuse_existing(
        run.export, MADE_BY, overwrite=True, remedy="move it away; the run exports its model to this folder"
    )
    if workers is not None:
        check_precision(training, workers.device)


def resources_to_plan_with(ray: RaySection) -> list[NodeResources]:
    """Return this machine, or, for a remote cluster in a dry run, nodes with the resources that the config requests."""
    (local,) = local_resources()
    if ray.address in (None, LOCAL):
        return [local]
    count = ray.sizes[-1] if isinstance(ray.num_workers, tuple) else 1 if ray.num_workers == "auto" else ray.num_workers
    cpus_each = ray.cpus_per_worker if ray.cpus_per_worker != "auto" else 1
    warn(f"a dry run does not connect to the cluster at {ray.address}: planned for {count} workers like this machine")
    return [NodeResources(max(local.cpus, cpus_each), min(1, local.gpus))] * count


def _announce(resumption: Resumption, plan: Plan, dashboard: str | None) -> None:
    """Print the run's name, its location, its workers and the plan."""
    run, workers = resumption.run, plan.workers
    remark = resumption.remark_on_workers(workers.count)
    if remark:
        warn(remark)
    say(f"run {run.path.name}: {run.uri or run.path}")
    at = f", dashboard http://{dashboard}" if dashboard else ""
    say(f"{workers.numbers} worker{'' if workers.allowed == (1,) else 's'} on {workers.device}{at}")
    say("\n".join(plan.lines()[1:]))


def _record_start(resumption: Resumption, task: TaskPlan, store_path: Path) -> None:
    """Write the config, the names and the W&B id of a starting run to its folder."""
    run = resumption.run
    with writing(run.path):
        # Clear first: requests of an earlier attempt must not end this one.
        run.clear_requests()
        write_atomically(run.config, dump_config(resumption.config))
        task.write_names(run, store_path)
        # A resumed run keeps its W&B id.
        if not run.wandb_run_id.exists():
            write_atomically(run.wandb_run_id, secrets.token_hex(4))


@contextmanager
def _followed(resumption: Resumption, plan: Plan, signals: StopSignals) -> Iterator[RunMirror]:
    """Follow a run while the block runs: at its URI, on the terminal, in its curves and in W&B.

    From here on a signal makes the workers save a checkpoint and end.
    """
    config, run = resumption.config, resumption.run
    mirror = RunMirror(run, warn)
    mirror.begin()
    say("starting the workers ...")
    signals.hand_over(
        run.stop_request.touch, "stopping and saving a checkpoint (press Ctrl-C again to stop immediately)"
    )
    labels = metric_labels()
    sinks: list[Sink] = [ProgressSink(plan.total_steps, labels), CurvesSink(run, labels), AlertSink(run.alerts)]
    watcher = RunWatcher(run, sinks, warn=warn)
    # Use the maximum number of workers, since it may change during the run.
    wandb = WandbFollowers(config.wandb, run, plan.workers.allowed[-1], warn=warn)
    try:
        yield mirror
    finally:
        # First, since the code below reads the files of worker 0, which may be on another node.
        mirror.wait(ENDING_S)
        mirror.close()
        watcher.close(signals.remaining_s(WATCHER_TIMEOUT_S))
        wandb.close(signals.remaining_s(math.inf))
    mirror.save_files(run.alerts.name, run.curves.name, "wandb")


def _conclude(run: RunFolder, error: Exception | None, signals: StopSignals, max_failures: int) -> int:
    # The outcome that the workers wrote overrides any error that reached the driver.
    outcome = run.read_outcome()
    if outcome is None:
        outcome = _without_outcome(run, error, signals, max_failures)
        with suppress(OSError):  # the disk may be full, or gone
            run.write_outcome(outcome)
    folder = run.uri or run.path
    if outcome.status == "finished":
        say(
            f"{outcome.message}\n  model        {folder}/export\n  checkpoints  {folder}/checkpoints\n"
            f"  metrics      {folder}/metrics.jsonl\n  curves       {folder}/curves.png"
        )
        return 0
    if outcome.status == "stopped":
        say(outcome.message)
        return signals.exit_code
    print(f"error: {outcome.message}", file=sys.stderr)
    return outcome.exit_code


def _without_outcome(run: RunFolder, error: Exception | None, signals: StopSignals, max_failures: int) -> Outcome:
    """Determine the outcome of a run whose workers ended without writing one, from the files they left."""
    step, saved = saved_steps(run)
    if error is None and signals.expired:
        return Outcome("stopped", step, f"stopped before the workers had finished, {saved}", 0)
    failures = getattr(error, "worker_failures", None)
    tried = f" after {max_failures} retries" if failures else ""
    cause: Any = next(iter(failures.values())) if failures else error
    # More specific than Ray's reason, which is that a process ended.
    stacks = ", ".join(map(str, left_stacks(run.logs)))
    reason = (
        f"workers made no progress; for their stack traces see {stacks}"
        if stacks
        else f"{last_line(cause)} (worker logs: {run.logs})"
    )
    # If the disk is full, any error that reached the driver is a consequence.
    is_full = shutil.disk_usage(run.path).free < RESERVE_BYTES
    message = no_space(run.path) if is_full else f"training failed{tried}: {reason}; {saved}"
    return Outcome("failed", step, message, ResourceError.exit_code)
