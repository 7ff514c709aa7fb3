"""The training loop of :mod:`training.loop.worker` in a process of its own, without Ray: one config, one worker.

``python -m benchmarks.programs.worker_alone CONFIG`` trains as a run does, to its end.
"""

import sys
from pathlib import Path

import torch.distributed as dist

from model.device import choose_device
from run_folder.paths import RunFolder
from train_config.loading import load_config
from train_config.schema import RunSection
from training.engine.collective import WorkerContext
from training.loop.worker import train_worker
from training.tasks.registry import task_plan


def begin(section: RunSection) -> tuple[WorkerContext, RunFolder]:
    """A group of this process alone, and the run's folder."""
    context = WorkerContext(device=choose_device(0))
    run = RunFolder(section.storage_path, section.name)
    run.path.mkdir(parents=True)
    backend = "nccl" if context.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return context, run


def main(path: str) -> int:
    """Prepare the data as the driver does, and train; return the exit code."""
    config = load_config(path)
    context, run = begin(config.run)
    task = task_plan(config)
    store: Path = task.prepare(run.stores)
    task.write_names(run, store)
    outcome = train_worker(config, context, str(store))
    dist.destroy_process_group()
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
