"""The function that Ray Train runs in each worker: the loop of :mod:`training.loop.worker`."""

from typing import Any

import ray.train
import ray.train.torch
import torch

from run_folder.paths import RunFolder
from train_config.schema import Config
from training.engine.collective import WorkerContext


def ray_context() -> WorkerContext:
    """Return the place that Ray Train gave this worker."""
    context = ray.train.get_context()
    device = ray.train.torch.get_device()
    if device.type == "cuda":  # Ray Train lets every worker of a node see all of its GPUs
        torch.cuda.set_device(device)
    return WorkerContext(
        context.get_world_rank(), context.get_world_size(), context.get_local_rank(), device, ray.train.report
    )


def ray_train_loop(arguments: dict[str, Any]) -> None:
    """The function that Ray Train runs, with config (plain values), store_path, cpus and wandb_run_id."""
    from training.launch.local_worker import logged_to_file
    from training.loop.worker import train_worker

    config = Config.model_validate(arguments["config"])
    context = ray_context()
    torch.set_num_threads(arguments["cpus"])
    with logged_to_file(RunFolder(config.run.storage_path, config.run.name), context.rank, context.world_size):
        train_worker(config, context, arguments["store_path"], arguments["wandb_run_id"])
