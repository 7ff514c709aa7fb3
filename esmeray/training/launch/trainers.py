"""Runners of the training loop: Ray Train, or this process for tasks that need a single worker on the CPU.

``arguments`` are the config (plain values), store_path, folder (the driver's, as :func:`place_of` names it), cpus and
wandb_run_id. Workers get ``resized`` in addition.
"""

import gc
import importlib
import logging
import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from esmeray.cluster.collective import WorkerContext, join_alone
from esmeray.cluster.placement import Workers
from esmeray.common.command_line import logged_to
from esmeray.run_folder.mirror import RunMirror, place_of
from esmeray.run_folder.paths import RunFolder
from esmeray.run_folder.section import RunSection
from esmeray.training.config import Config
from esmeray.training.launch.elastic import Resized

logger = logging.getLogger(__name__)


def train_here(arguments: dict[str, Any]) -> None:
    """Train in a process group that contains only this process."""
    if not dist.is_initialized():  # DeepSpeed keeps the groups of the first, so it stays until the process ends
        join_alone("gloo")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # without it DeepSpeed (0.19.8) warns that no accelerator was found
    # Use at most OMP_NUM_THREADS threads: in a small network they mostly wait for each other.
    _train(arguments | {"cpus": min(arguments["cpus"], torch.get_num_threads())}, WorkerContext())
    gc.collect()  # DeepSpeed's engine is in a reference cycle: weights and optimizer state would stay in memory


def fit_workers(arguments: dict[str, Any], workers: Workers, run: RunSection, count: int, resized: Resized) -> None:
    """Train with ``count`` workers of Ray Train, which get ``arguments``. Raises the error of the first failed
    worker."""
    from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig

    from esmeray.cluster.connection import worker_environment
    from esmeray.cluster.process_group import ProcessGroupConfig, WithoutDatasets

    WithoutDatasets(
        ray_train_loop,
        train_loop_config=arguments | {"resized": resized},
        scaling_config=ScalingConfig(
            num_workers=count,
            use_gpu=workers.use_gpu,
            resources_per_worker={"CPU": workers.cpus_each} | ({"GPU": 1} if workers.use_gpu else {}),
        ),
        run_config=RunConfig(
            name=run.name,
            storage_path=str(RunFolder(run.storage_path, run.name).path.parent),
            # Without the second limit, workers that can't start are retried forever.
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
            worker_runtime_env=worker_environment(),
        ),
        torch_config=ProcessGroupConfig(backend="nccl" if workers.use_gpu else "gloo"),
    ).fit()


def ray_train_loop(arguments: dict[str, Any]) -> None:
    """Run in each worker, called by Ray Train."""
    import ray.train.torch

    gc.disable()  # the imports create 900,000 objects, none of them garbage: collections take a second
    importlib.import_module("esmeray.training.loop.worker")
    gc.freeze()  # later collections skip them as well
    gc.enable()
    launched = ray.train.get_context()
    device = ray.train.torch.get_device()
    if device.type == "cuda":  # Ray Train makes all GPUs of a node visible to each worker
        torch.cuda.set_device(device)
    context = WorkerContext(
        launched.get_world_rank(),
        launched.get_world_size(),
        launched.get_local_rank(),
        device,
        ray.train.report,
        replaced=True,
        resized=arguments["resized"],
    )
    _train(arguments, context)


def _train(arguments: dict[str, Any], context: WorkerContext) -> None:
    """Train, and write this worker's log, including warnings and its failure, to a file of the run."""
    from esmeray.training.loop.worker import (
        train_worker,  # here: it loads DeepSpeed, which Ray Train's driver does not need
    )

    config = Config.model_validate(arguments["config"])
    torch.set_num_threads(arguments["cpus"])  # as many as were reserved: the default is all cores of the machine
    run = RunFolder(config.run.storage_path, config.run.name)
    if run.uri is not None:
        if context.local_rank == 0 and arguments["folder"] != place_of(run):
            RunMirror(run).pull()
            run.clear_requests()  # requests of an earlier attempt
        dist.barrier()  # the other workers of the node read the files that the first one fetched
    run.logs.mkdir(parents=True, exist_ok=True)
    with logged_to(run.logs / f"worker-{context.rank}.log", "%(asctime)s %(levelname)s %(name)s: %(message)s"):
        where = f"on {socket.gethostname()}, process {os.getpid()}"
        logger.info("rank %d of %d %s", context.rank, context.world_size, where)
        try:
            train_worker(config, context, arguments["store_path"], arguments["wandb_run_id"])
        except Exception:
            # Ray Train passes on only the first worker's failure.
            logger.exception("worker %d failed", context.rank)
            raise
