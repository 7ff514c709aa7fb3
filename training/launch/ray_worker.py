"""What Ray Train runs in each worker: the loop of :mod:`training.loop.worker`, told where it is."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import ray.train
import ray.train.torch
import torch

from run_folder.paths import RunFolder
from train_config.schema import Config

logger = logging.getLogger(__name__)


class RayContext:
    """A :class:`~training.engine.engine.context.WorkerContext` that Ray Train gives."""

    def __init__(self) -> None:
        context = ray.train.get_context()
        self.rank = context.get_world_rank()
        self.world_size = context.get_world_size()
        self.local_rank = context.get_local_rank()
        self.device = ray.train.torch.get_device()
        if self.device.type == "cuda":  # Ray Train lets every worker of a node see all of its GPUs
            torch.cuda.set_device(self.device)

    def report(self, metrics: dict[str, float]) -> None:
        """Report to Ray Train; a barrier over the workers."""
        ray.train.report(metrics)


def ray_train_loop(arguments: dict[str, Any]) -> None:
    """The function that :class:`~ray.train.torch.TorchTrainer` runs.

    Args:
        arguments: ``config`` (the resolved config as plain values), ``store_path``, ``cpus``, ``wandb_run_id``.
    """
    from training.loop.worker import train_worker

    config = Config.model_validate(arguments["config"])
    context = RayContext()
    torch.set_num_threads(arguments["cpus"])
    _log_to_file(RunFolder(config.run.storage_path, config.run.name), context)
    try:
        train_worker(config, context, arguments["store_path"], arguments["wandb_run_id"])
    except Exception:
        logger.exception("worker %d failed", context.rank)
        raise


def _log_to_file(run: RunFolder, context: RayContext) -> None:
    run.logs.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(run.logs / f"worker-{context.rank}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    logger.info("rank %d of %d on %s, process %d", context.rank, context.world_size, socket.gethostname(), os.getpid())
