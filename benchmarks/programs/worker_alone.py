"""The training loop of :mod:`esmeray.training.loop.worker` in a process of its own, without Ray: one config, one
worker.

``python -m esmeray.benchmarks.programs.worker_alone CONFIG`` trains as a run does, to its end; :func:`train` is
Esmeray's side of the training benchmark. The loop is the one that every run goes through, with its agreement, metrics
and learning rate; validation and checkpoints are left out there, as they are for the peer.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from esmeray.benchmarks.harness.proteins import MAX_RESIDUES
from esmeray.benchmarks.programs import training_workload as recipe
from esmeray.benchmarks.programs.processes import MemoryMeter
from esmeray.benchmarks.programs.training_workload import NEVER, StepLine, Workload
from esmeray.model.device import choose_device
from esmeray.run_folder.paths import RunFolder
from esmeray.train_config.loading import load_config
from esmeray.train_config.schema import Config, RunSection
from esmeray.training.engine.collective import WorkerContext
from esmeray.training.loop.building import Worker, build_worker
from esmeray.training.loop.worker import loop, start, train_worker
from esmeray.training.tasks.registry import task_plan


class EnoughError(Exception):
    """The last measured step is done; what a run does at its end is not part of the benchmark."""


class _StepLog:
    """Stands in for the run's log and keeps a line for each training step."""

    def __init__(self, last_step: int) -> None:
        self.lines: list[StepLine] = []
        self._last_step = last_step
        self._meter = MemoryMeter(trim=True)

    def write(self, kind: str, step: int, **metrics: Any) -> None:
        if kind == "train":
            tokens, memory_bytes = metrics["tokens"], self._meter.peak().computing_bytes
            self.lines.append(StepLine(metrics["step_s"], tokens, tokens, metrics["loss"], memory_bytes))
            if step == self._last_step:
                raise EnoughError

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Events are not measured."""


def train(
    workload: dict[str, Any], folder: str, threads: int | None = None, rank: int = 0, meeting: str = ""
) -> list[StepLine]:
    """The steps of a workload (:class:`~esmeray.benchmarks.programs.training_workload.Workload`).

    ``meeting``: a file at which two workers on the CPU meet; left out, this process is alone.
    """
    work = Workload(**workload)
    torch.set_num_threads(threads or torch.get_num_threads())
    torch.manual_seed(recipe.SEED)
    config = run_config(work, folder)
    context, run = begin_pair(config.run, rank, meeting) if meeting else begin(config.run)
    worker = build_worker(config, context, run, work.store, None)
    log = _StepLog(work.total_steps)
    train_until_enough(worker, log)
    return log.lines


def train_until_enough(worker: Worker, log: Any) -> None:
    """Train with this in place of the run's log until it raises EnoughError."""
    position = start(worker)
    worker.observers.log = log
    try:
        loop(worker, position)
    except EnoughError:
        worker.experiment.close()


def run_config(workload: Workload, folder: str) -> Config:
    """The recipe as the settings of a run."""
    return Config.model_validate(
        {
            "run": {"name": "benchmark", "storage_path": folder, "seed": recipe.SEED},
            "data": {"source": [workload.fasta], "max_length": MAX_RESIDUES, "validation_share": 0.0},
            "batch": {"tokens": workload.tokens, "global_tokens": workload.tokens * workload.accumulation},
            "model": {
                "task": "masked_lm",
                "backbone": {"source": workload.weights},
                "masked_lm": {"mask_share": recipe.MASK_SHARE},
            },
            "training": {
                "max_steps": workload.total_steps,
                "learning_rate": recipe.LEARNING_RATE,
                "min_learning_rate_share": recipe.LOWEST_RATE_SHARE,
                "warmup_steps": workload.rate_warmup_steps,
                "betas": recipe.BETAS,
                "weight_decay": recipe.WEIGHT_DECAY,
                "gradient_clipping": recipe.CLIPPING,
                "precision": "bf16",
                "evaluate_every_steps": NEVER,
            },
            "checkpoint": {"every_steps": NEVER},
            "wandb": {"mode": "disabled"},
        }
    )


def begin(section: RunSection) -> tuple[WorkerContext, RunFolder]:
    """A group of this process alone, and the run's folder."""
    run = RunFolder(section.storage_path, section.name)
    run.path.mkdir(parents=True)
    return WorkerContext(device=make_group()), run


def begin_pair(section: RunSection, rank: int, meeting: str) -> tuple[WorkerContext, RunFolder]:
    """A group of two workers, and the run's folder."""
    run = RunFolder(section.storage_path, section.name)
    run.path.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    return WorkerContext(rank, 2, rank), run


def make_group() -> torch.device:
    """Make a group of this process alone; return its device."""
    device = choose_device(0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


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
