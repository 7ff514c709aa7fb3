"""The training loop started by torchrun, for the benchmark of what Ray Train costs.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.programs.worker_program CONFIG STORE

CONFIG is a run's YAML file, STORE a store on a disk of this machine. Threads are torchrun's OMP_NUM_THREADS.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from run_folder.paths import RunFolder
from train_config.loading import load_config
from training.engine.context import WorkerContext
from training.engine.device import choose_device
from training.loop.worker import train_worker


def main(config_path: str, store_path: str) -> int:
    """Train to the end; the exit code of the run."""
    config = load_config(config_path)
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    context = WorkerContext(rank, world_size, local_rank, choose_device(local_rank))
    if context.device.type == "cuda":
        torch.cuda.set_device(context.device)
    dist.init_process_group("nccl" if context.device.type == "cuda" else "gloo")
    RunFolder(config.run.storage_path, config.run.name).path.mkdir(parents=True, exist_ok=True)
    outcome = train_worker(config, context, store_path)
    dist.barrier()
    dist.destroy_process_group()
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
