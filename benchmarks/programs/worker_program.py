"""The training loop alone, in one process without Ray: ``python -m benchmarks.programs.worker_program CONFIG``.

CONFIG is a run's YAML file; its data are prepared as the driver prepares them.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from run_folder.paths import RunFolder
from train_config.loading import load_config
from training.engine.context import WorkerContext
from training.engine.device import choose_device
from training.loop.worker import train_worker
from training.tasks.registry import task_plan


def main(config_path: str) -> int:
    """Train to the end; the exit code of the run."""
    config = load_config(config_path)
    run = RunFolder(config.run.storage_path, config.run.name)
    run.path.mkdir(parents=True)
    task = task_plan(config)
    store = task.prepare(run.stores)
    task.write_names(run, store)
    context = WorkerContext(device=choose_device(0))
    backend = "nccl" if context.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    outcome = train_worker(config, context, str(store))
    dist.destroy_process_group()
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
