"""The training loop of :mod:`esmeray.training.loop.worker` in a process of its own, without Ray: one config, one
worker.

``python -m benchmarks.programs.worker_alone CONFIG`` trains as a run does, to its end; :func:`train` is
Esmeray's side of the training benchmark. The loop is the one that every run goes through, with its agreement, metrics
and learning rate; validation and checkpoints are left out there, as they are for the peer.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.proteins import MAX_RESIDUES
from benchmarks.programs import training_workload as recipe
from benchmarks.programs.processes import MemoryMeter
from benchmarks.programs.training_workload import NEVER, StepLine, Workload
from esmeray.cluster.collective import WorkerContext
from esmeray.model.device import choose_device
from esmeray.run_folder.paths import RunFolder
from esmeray.run_folder.section import RunSection
from esmeray.tasks.plan import task_plan
from esmeray.training.config import Config, load_config
from esmeray.training.loop.building import Worker, build_worker
from esmeray.training.loop.worker import loop, start, train_worker


class EnoughError(Exception):
    """The last measured step is done; what a run does at its end is not part of the benchmark."""


class _StepLog:
    """Stands in for the run's log: the loop needs no seam for benchmarks, and has nothing to write in timed steps."""

    def __init__(self, stepped: Callable[[int, dict[str, Any]], bool]) -> None:
        self._stepped = stepped

    def write(self, kind: str, step: int, **metrics: Any) -> None:
        if kind == "train" and self._stepped(step, metrics):
            raise EnoughError

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Events are not measured."""


def train(workload: dict[str, Any], folder: str) -> list[StepLine]:
    """The steps of a workload (:class:`~benchmarks.programs.training_workload.Workload`)."""
    work = Workload(**workload)
    torch.manual_seed(recipe.SEED)
    config = run_config(work, folder)
    worker = build_worker(config, *begin(config.run), work.store, None)
    meter = MemoryMeter(trim=True)  # now, as the peer's begins when its engine is built
    lines: list[StepLine] = []

    def stepped(step: int, metrics: dict[str, Any]) -> bool:
        tokens = metrics["tokens"]
        # Packed: all tokens that are computed on are real.
        lines.append(StepLine(metrics["step_s"], tokens, tokens, metrics["loss"], meter.peak().computing_bytes))
        return step == work.total_steps

    train_until_enough(worker, stepped)
    return lines


def train_until_enough(worker: Worker, stepped: Callable[[int, dict[str, Any]], bool]) -> None:
    """Train until ``stepped``, which is given the number and the metrics of each step, returns True."""
    position = start(worker)
    worker.observers.log = _StepLog(stepped)  # type: ignore[assignment]
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


def make_group() -> torch.device:
    """Make a group of this process alone; return its device."""
    device = choose_device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    # A store in memory: a port could be taken, by another benchmark on this machine.
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def main(path: str) -> int:
    """Prepare the data as the driver does, and train; return the exit code."""
    config = load_config(path)
    context, run = begin(config.run)
    task = task_plan(config.data, config.model)
    store: Path = task.prepare(run.stores)
    task.write_names(run, store)
    outcome = train_worker(config, context, str(store))
    dist.destroy_process_group()
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
