"""The driver: from a config to a finished run, in the process that the user started.

Prepares the data, finds the workers, runs Ray Train and reports. The training itself is :mod:`training.loop.worker`, in
Ray's workers; its metrics come back through metrics.jsonl in the run's folder.
"""

import math
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cluster.placement import LOCAL, NodeResources, Workers, find, local_resources, place_workers
from cluster.signals import StopSignals
from common.errors import DataError, ResourceError
from common.progress import conversion_bar
from common.publishing import refuse_existing, write_atomically, writing
from common.text import counted, last_line
from model.export.exported_folder import MADE_BY
from monitoring.sinks.wandb_run import WandbFollowers, new_run_id
from monitoring.watch.alerts import AlertSink
from monitoring.watch.progress import ProgressSink
from monitoring.watch.run_watcher import RunWatcher, Sink
from run_folder.checkpoints import CheckpointStore, check_data
from run_folder.job import held
from run_folder.metrics_log import read_metrics
from run_folder.paths import RESERVE_BYTES, Outcome, RunFolder, no_space
from train_config.loading import dump_config
from train_config.monitoring_schema import AlertsSection
from train_config.natures import with_absolute_paths
from train_config.schema import Config, RaySection, RunSection, TrainingSection
from training.checkpoints.resuming import Resumption, check_worker_count
from training.engine.deepspeed_settings import check_precision
from training.launch.planning import Plan, check_warm_up, make_plan
from training.tasks.plan import TaskPlan, TaskSize
from training.tasks.registry import metric_labels, task_plan

WATCHER_TIMEOUT_S = 30.0


Beside = Callable[[Config, Path], AbstractContextManager[Config]]
"""What works on the cluster while the workers train, given the config and the prepared data; gives their config."""
MakeTrainer = Callable[[dict[str, Any], Workers], Any]
"""From the arguments of each worker and the workers to what :func:`fit` runs."""


def train(config: Config, beside: Beside = lambda config, _: nullcontext(config)) -> int:
    """Run the experiment to its end; EsmerayError where it can't start.

    Returns the process's exit code: 0 finished, 128 + signal when stopped, else that of the failure.
    """
    resumption = Resumption(with_absolute_paths(config))
    return until_signal(resumption.run, lambda signals: _train_locked(resumption, signals, beside), "training")


def until_signal(run: RunFolder, work: Callable[[StopSignals], int], name: str) -> int:
    """Do the work of a folder that no other process may work on; returns its exit code.

    ``work`` hears signals from :meth:`StopSignals.hand_over` on; 128 + signal is returned for one before that, and the
    name of the work printed.
    """
    signals = StopSignals()
    try:
        with signals, held(run.path):
            return work(signals)
    except (KeyboardInterrupt, SystemExit) as error:
        signum = signals.behind(error)
        if signum is None:
            raise
        print(f"interrupted before {name} began", file=sys.stderr)
        return 128 + signum


def _train_locked(resumption: Resumption, signals: StopSignals, beside: Beside) -> int:
    """Refuse what can be refused before anything of the run is written and before Ray starts; then train."""
    resumption = resumption.as_begun()
    config, run = resumption.config, resumption.run
    remarks = resumption.check()
    finished = resumption.is_finished()
    local = place_workers(config.ray, local_resources()) if not finished and find(config.ray) == LOCAL else None
    if not finished:
        _check_start(config.training, run, local)
    task = task_plan(config)
    with conversion_bar("preparing the data") as progress:
        store_path = task.prepare(run.stores, progress)
    _check_prepared(task, run, store_path)
    if finished:
        say(_finished(run))
        return 0
    size = task.measure(store_path)
    if local is not None:
        _check_plan(_plan(resumption, local, size), resumption)
    for remark in remarks:
        warn(remark)
    launch = partial(_launch, resumption, store_path, size, signals, beside)
    if local is not None and task.in_process and local.count == 1 and not local.use_gpu:
        from training.launch.local_worker import LocalTrainer  # here: it loads torch and DeepSpeed

        return launch(local, LocalTrainer)
    return _on_cluster(resumption, signals, launch)


def dry_run(config: Config) -> int:
    """Print the resolved config and the plan; start nothing. A run that could not start or resume is refused alike."""
    config = Resumption(config).as_begun().config
    resumption = Resumption(with_absolute_paths(config))
    run = resumption.run
    remarks = resumption.check()
    finished = resumption.is_finished()
    workers = place_workers(config.ray, resources_to_plan_with(config.ray))
    if not finished:
        _check_start(config.training, run, workers if config.ray.address in (None, LOCAL) else None)
    task = task_plan(config)
    if resumption.checkpoints.newest_intact() is not None:
        _check_source(task, run)
    plan = _plan(resumption, workers, task.estimate())
    if not finished:
        _check_plan(plan, resumption)
    for remark in remarks:
        warn(remark)
    print(dump_config(config))
    print("\n".join([*plan.lines(), *([_finished(run)] if finished else [])]))
    return 0


def _finished(run: RunFolder) -> str:
    return (
        f"run {run.path.name} is finished: {run.export} "
        "(raise training.max_steps or training.epochs to train it further)"
    )


def _check_prepared(task: TaskPlan, run: RunFolder, path: Path) -> None:
    """Refuse data that the newest checkpoint was not trained with, or that its model would read otherwise."""
    check_data(run, task.config.data, task.checksum(path))
    if (checkpoint := CheckpointStore(run.checkpoints).newest_intact()) is not None:
        task.check_resumed(checkpoint, path)


def _check_source(task: TaskPlan, run: RunFolder) -> None:
    """Call :func:`_check_prepared`; data that is not prepared yet is prepared in a temporary folder."""
    if (path := task.location(run.stores)).exists():
        _check_prepared(task, run, path)
        return
    data = task.config.data.model_copy(update={"store": None})
    elsewhere = task.config.model_copy(update={"data": data})
    with TemporaryDirectory() as folder, conversion_bar("reading the data") as progress:
        path = task_plan(elsewhere).prepare(Path(folder), progress)
        _check_prepared(task, run, path)


def _plan(resumption: Resumption, workers: Workers, size: TaskSize) -> Plan:
    config = resumption.config
    return make_plan(config.batch, config.training, config.deepspeed, workers, size)


def _check_plan(plan: Plan, resumption: Resumption) -> None:
    """Refuse an end of training that is behind the run, and for a new run a warm-up that is as long."""
    resumption.check_steps(plan.total_steps)
    if not resumption.checkpoints.complete():
        check_warm_up(resumption.config.training, plan.total_steps)


def _check_start(training: TrainingSection, run: RunFolder, workers: Workers | None) -> None:
    """Refuse what could not be exported after training, and what these workers, where known, can't do or resume."""
    refuse_existing(run.export, MADE_BY, overwrite=True, remedy="move it away, the run exports its model there")
    if workers is not None:
        check_precision(training, workers.device)
        check_worker_count(run, workers.count)


def resources_to_plan_with(ray: RaySection) -> list[NodeResources]:
    """This machine, or, for a cluster that is not asked, one that has what the config asks for."""
    (local,) = local_resources()
    if ray.address in (None, LOCAL):
        return [local]
    count = ray.num_workers if ray.num_workers != "auto" else 1
    cpus_each = ray.cpus_per_worker if ray.cpus_per_worker != "auto" else 1
    warn(f"the cluster at {ray.address} is not asked in a dry run: planned for {count} workers like this machine")
    return [NodeResources(max(local.cpus, cpus_each), min(1, local.gpus))] * count


def _on_cluster(
    resumption: Resumption, signals: StopSignals, launch: Callable[[Workers, MakeTrainer, str], int]
) -> int:
    """Launch the workers that the cluster has room for."""
    from cluster import connection  # here: it imports Ray, and the work that needs it begins

    config = resumption.config
    with connection.connected(config.ray) as dashboard:
        signals.reinstall()
        workers = place_workers(config.ray, connection.cluster_resources())
        _check_start(config.training, resumption.run, workers)
        if remark := connection.missing_now(workers):
            warn(remark)
        make_trainer = partial(_make_trainer, run=config.run, max_failures=config.ray.max_failures)
        return launch(workers, make_trainer, f", dashboard http://{dashboard}" if dashboard else "")


def _launch(
    resumption: Resumption,
    store_path: Path,
    size: TaskSize,
    signals: StopSignals,
    beside: Beside,
    workers: Workers,
    make_trainer: MakeTrainer,
    place: str = "",
) -> int:
    """Train with these workers to the end; ``place`` says where they are, for the user. Returns the exit code."""
    config, run = resumption.config, resumption.run
    plan = _plan(resumption, workers, size)
    _check_plan(plan, resumption)
    say(f"run {config.run.name}: {run.path}")
    say(f"{counted(workers.count, 'worker{s}')} on {workers.device}{place}")
    say("\n".join(plan.lines()[1:]))
    with writing(run.path):
        run.ray_snapshot.unlink(missing_ok=True)  # Ray Train fails on a damaged one, or on one of another version
        run.clear_requests()
        write_atomically(run.config, dump_config(config))
        task_plan(config).write_names(run, store_path)
        run_id = _wandb_run_id(run)
    say("starting the workers ...")
    signals.hand_over(run.request_stop, "stopping, saving a checkpoint (Ctrl-C again ends at once)")
    watcher = _watch(config.monitoring.alerts, run, plan.total_steps)
    wandb = WandbFollowers(config.wandb, run, workers.count, warn=warn)
    try:
        with beside(config, store_path) as workers_config:
            arguments = {
                "config": workers_config.model_dump(mode="json"),
                "store_path": str(store_path),
                "cpus": workers.cpus_each,
                "wandb_run_id": run_id,
            }
            error = fit(make_trainer(arguments, workers), signals)
    finally:
        watcher.close(signals.remaining_s(WATCHER_TIMEOUT_S))
        wandb.close(signals.remaining_s(math.inf))
    _draw(run)
    return _conclude(run, error, signals, config.ray.max_failures)


def fit(trainer: Any, signals: StopSignals) -> Exception | None:
    """Run ``fit()`` of a trainer or tuner of Ray to its end or that of the grace period after a signal.

    Returns its error.

    It runs in a thread: in the main thread Ray would install a signal handler of its own that aborts without saving.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            trainer.fit()
        except Exception as error:  # noqa: BLE001 - reported by the main thread
            errors.append(error)

    thread = threading.Thread(target=run, name="trainer-fit", daemon=True)
    thread.start()
    while thread.is_alive() and not signals.expired:
        thread.join(0.2)
    return errors[0] if errors else None


def _make_trainer(arguments: dict[str, Any], workers: Workers, run: RunSection, max_failures: int) -> Any:
    """The trainer of Ray Train, whose workers get ``arguments``."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from cluster.connection import worker_environment
    from cluster.process_group import ProcessGroupConfig
    from training.launch.ray_worker import ray_train_loop

    # Ray waits for workers on a busy cluster for ever without the limit. Its types know neither name.
    failures: dict[str, Any] = {"max_failures": max_failures, "controller_failure_limit": 1}
    environment: dict[str, Any] = {"worker_runtime_env": worker_environment()}
    return TorchTrainer(
        ray_train_loop,
        train_loop_config=arguments,
        scaling_config=ScalingConfig(
            num_workers=workers.count,
            use_gpu=workers.use_gpu,
            resources_per_worker={"CPU": workers.cpus_each} | ({"GPU": 1} if workers.use_gpu else {}),
        ),
        run_config=RunConfig(
            name=run.name,
            storage_path=run.storage_path,
            failure_config=FailureConfig(**failures),
            **environment,
        ),
        torch_config=ProcessGroupConfig(backend="nccl" if workers.use_gpu else "gloo"),
    )


def _watch(alerts: AlertsSection, run: RunFolder, total_steps: int) -> RunWatcher:
    sinks: list[Sink] = [ProgressSink(total_steps, metric_labels())]
    if alerts.enabled:
        sinks.append(AlertSink(run.alerts, alerts))
    return RunWatcher(run, sinks, warn=warn)


def _conclude(run: RunFolder, error: Exception | None, signals: StopSignals, max_failures: int) -> int:
    if (outcome := run.read_outcome()) is not None:
        return _report(outcome, run, signals)
    if error is None and signals.expired:
        say(
            "stopped without saving the last steps: the workers did not answer; "
            f"the same command resumes from {run.checkpoints}"
        )
        return signals.exit_code
    if shutil.disk_usage(run.path).free < RESERVE_BYTES:
        raise ResourceError(no_space(run.path)) from error
    tried = f", also after {max_failures} more tries" if getattr(error, "worker_failures", None) else ""
    raise ResourceError(f"training failed{tried}: {_reason(error)} (the workers' logs are in {run.logs})") from error


def _draw(run: RunFolder) -> None:
    """Draw the curves; a picture that can't be drawn hides no result."""
    from monitoring.watch.curves import draw_curves  # here: it loads matplotlib

    try:
        if run.metrics.exists():
            draw_curves(read_metrics(run.metrics), run.curves, run.path.name, metric_labels())
    except (OSError, DataError) as error:
        warn(f"{run.curves}: not drawn ({error})")


def _report(outcome: Outcome, run: RunFolder, signals: StopSignals) -> int:
    if outcome.status == "finished":
        say(
            f"{outcome.message}\n  model        {run.export}\n  checkpoints  {run.checkpoints}\n"
            f"  metrics      {run.metrics}\n  curves       {run.curves}"
        )
        return 0
    if outcome.status == "stopped":
        say(outcome.message)
        return signals.exit_code
    print(f"error: {outcome.message}", file=sys.stderr)
    return outcome.exit_code


def _reason(error: Exception | None) -> str:
    """The first failed worker's error, in a line."""
    failures = getattr(error, "worker_failures", None)
    cause: Any = next(iter(failures.values())) if failures else error
    return last_line(cause)


def _wandb_run_id(run: RunFolder) -> str:
    if not run.wandb_run_id.exists():
        write_atomically(run.wandb_run_id, new_run_id())
    return run.wandb_run_id.read_text().strip()


def say(text: str) -> None:
    print(text, flush=True)


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
