"""Esmeray's side of the training benchmark: the loop of :mod:`training.loop.worker`, in a process of its own.

The loop is the one that every run goes through,
with its agreement, metrics and learning rate; validation and checkpoints are left out, as they are for the peer.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.proteins import MAX_RESIDUES
from benchmarks.programs import training_workload as recipe
from benchmarks.programs.processes import MemoryMeter
from benchmarks.programs.training_workload import NEVER, StepLine, Workload, write_step
from benchmarks.programs.worker_alone import begin
from train_config.schema import Config
from training.loop.building import Worker
from training.loop.restoring import restore
from training.loop.worker import loop


class _EnoughError(Exception):
    """The last measured step is done; what a run does at its end is not part of the benchmark."""


class _StepReporter:
    """Stands in for the run's log and writes a line for each training step."""

    def __init__(self, lines: str, meter: MemoryMeter, last_step: int) -> None:
        self._lines, self._meter, self._last_step = lines, meter, last_step

    def write(self, kind: str, step: int, **metrics: Any) -> None:
        if kind != "train":
            return
        tokens = metrics["tokens"]
        memory_bytes = self._meter.peak().computing_bytes
        write_step(self._lines, StepLine(metrics["step_s"], tokens, tokens, metrics["loss"], memory_bytes))
        if step == self._last_step:
            raise _EnoughError

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Events are not measured."""


def run_config(workload: Workload, folder: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "benchmark", "storage_path": str(folder), "seed": recipe.SEED},
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


def train(workload: Workload, lines: str, folder: Path) -> None:
    """Train the workload's steps."""
    config = run_config(workload, folder)
    context, run = begin(config.run)
    meter = MemoryMeter()
    worker = Worker(config, context, run, workload.store, None)
    position = restore(worker)
    worker.log = _StepReporter(lines, meter, workload.total_steps)  # type: ignore[assignment]
    meter.model_built()
    with contextlib.suppress(_EnoughError):
        loop(worker, position)
    worker.experiment.close()
    worker.engine.close()
    dist.destroy_process_group()


def main() -> None:
    """WORKLOAD LINES FOLDER."""
    workload, lines, folder = sys.argv[1:]
    torch.manual_seed(recipe.SEED)
    train(Workload(**json.loads(workload)), lines, Path(folder))


if __name__ == "__main__":
    main()
