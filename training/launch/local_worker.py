"""One worker in this process, without a launcher: the training loop on the CPU, for tasks that need no more."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from cluster.placement import Workers
from run_folder.paths import RunFolder
from train_config.schema import Config
from training.engine.collective import WorkerContext
from training.loop.worker import train_worker

logger = logging.getLogger(__name__)


class LocalTrainer:
    """A trainer with the interface of Ray Train's: ``fit`` trains to the end."""

    def __init__(self, arguments: dict[str, Any], workers: Workers) -> None:
        self._arguments = arguments

    def fit(self) -> None:
        """Train in a process group of this process alone."""
        arguments, context = self._arguments, WorkerContext()
        config = Config.model_validate(arguments["config"])
        run = RunFolder(config.run.storage_path, config.run.name)
        torch.set_num_threads(arguments["cpus"])
        if not dist.is_initialized():  # DeepSpeed keeps the groups of the first: it lasts as long as the process
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with logged_to_file(run, context.rank, context.world_size):
            train_worker(config, context, arguments["store_path"], arguments["wandb_run_id"])


@contextmanager
def logged_to_file(run: RunFolder, rank: int, world_size: int) -> Iterator[None]:
    """Log what this worker logs, warnings and its failure among it, to a file of the run."""
    run.logs.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(run.logs / f"worker-{rank}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    logger.info("rank %d of %d on %s, process %d", rank, world_size, socket.gethostname(), os.getpid())
    try:
        yield
    except Exception:
        logger.exception("worker %d failed", rank)
        raise
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()
