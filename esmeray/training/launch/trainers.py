"""Runners of the training loop in workers: Ray Train, or this process for tasks that need no more than one on the CPU.

``arguments`` are the config (plain values), store_path, folder (the driver's, as :func:`place_of` names it), cpus and
wandb_run_id; workers get ``resized`` beside them.
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
    """Train in a process group of this process alone."""
    if not dist.is_initialized():  # DeepSpeed keeps the groups of the first: it lasts as long as the process
        join_alone("gloo")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # without it DeepSpeed (0.19.8) warns that there is no other
    # At most OMP_NUM_THREADS: in steps of a small network threads take most of their time to wait for one another.
    _train(arguments | {"cpus": min(arguments["cpus"], torch.get_num_threads())}, WorkerContext())
    gc.collect()  # DeepSpeed's engine refers to itself: weights and optimizer state would outlive training


def fit_workers(arguments: dict[str, Any], workers: Workers, run: RunSection, count: int, resized: Resized) -> None:
    """Train with so many workers of Ray Train, which get ``arguments``. Raises what ended the first that failed."""
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
            # Workers that can't start are tried for ever without the second limit.
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
            worker_runtime_env=worker_environment(),
        ),
        torch_config=ProcessGroupConfig(backend="nccl" if workers.use_gpu else "gloo"),
    ).fit()


def ray_train_loop(arguments: dict[str, Any]) -> None:
    """The function that Ray Train runs in each worker."""
    import ray.train.torch

    gc.disable()  # 900,000 objects of libraries, none of them garbage: looking for it takes a second
    importlib.import_module("esmeray.training.loop.worker")
    gc.freeze()  # nor does any later collection walk them
    gc.enable()
    launched = ray.train.get_context()
    device = ray.train.torch.get_device()
    if device.type == "cuda":  # Ray Train lets every worker of a node see all of its GPUs
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
    """Train, and log what this worker logs, warnings and its failure among it, to a file of the run."""
    from esmeray.training.loop.worker import (
        train_worker,  # here: it loads DeepSpeed, which Ray Train's driver does not need
    )

    config = Config.model_validate(arguments["config"])
    torch.set_num_threads(arguments["cpus"])  # as many as were reserved: by default it takes all of the machine
    run = RunFolder(config.run.storage_path, config.run.name)
    if run.uri is not None:
        if context.local_rank == 0 and arguments["folder"] != place_of(run):
            RunMirror(run).pull()
            run.clear_requests()  # of an earlier attempt
        dist.barrier()  # the workers of a node read what the first has fetched
    run.logs.mkdir(parents=True, exist_ok=True)
    with logged_to(run.logs / f"worker-{context.rank}.log", "%(asctime)s %(levelname)s %(name)s: %(message)s"):
        where = f"on {socket.gethostname()}, process {os.getpid()}"
        logger.info("rank %d of %d %s", context.rank, context.world_size, where)
        try:
            train_worker(config, context, arguments["store_path"], arguments["wandb_run_id"])
        except Exception:
            # Ray Train passes on the first worker's failure alone.
            logger.exception("worker %d failed", context.rank)
            raise
