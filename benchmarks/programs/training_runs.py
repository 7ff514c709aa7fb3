"""Whole training runs in processes of their own, by config, for stages that compare two ways to train the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.stage import WrongWorkError
from benchmarks.programs.processes import run_program

NEVER = 10**9
"""Steps between validations, or checkpoints, that are left out."""

TOY = {"layers": 1, "hidden_size": 32, "heads": 2}
"""The model of a smoke run."""

Record = dict[str, Any]
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


class TrainingRuns:
    """Runs numbered in one folder, each of which must come to the losses of the first.

    ``tolerance`` is the largest relative difference between losses of a step.
    """

    def __init__(self, folder: Path, tolerance: float) -> None:
        self._folder = folder.resolve()
        self._tolerance = tolerance
        self._losses: list[float] = []
        self._number = 0

    def train(self, settings: Record, *, on_ray: bool) -> list[Record]:
        """Train once, on one worker and thread, by ``train_ray.py`` or in the training loop alone.

        ``settings`` are the config without the name and place of the run. Returns the training records of all steps in
        metrics.jsonl. Raises WrongWorkError where the losses differ from those of the first run.
        """
        from run_folder.metrics_log import read_metrics
        from run_folder.paths import RunFolder
        from train_config.loading import dump_config
        from train_config.schema import Config

        name, self._number = f"run-{self._number}", self._number + 1
        config = Config.model_validate(settings | {"run": {"name": name, "storage_path": str(self._folder)}})
        run = RunFolder(config.run.storage_path, config.run.name)
        path = self._folder / f"{name}.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        program = ["train_ray.py", "--config"] if on_ray else ["-m", __name__]
        run_program([sys.executable, *program, str(path)], _ENVIRONMENT)
        records = [record for record in read_metrics(run.metrics) if record["kind"] == "train"]
        self.compare([record["loss"] for record in records])
        return records

    def compare(self, losses: Sequence[float]) -> None:
        """Hold the losses of a run to those of the first; raises WrongWorkError where they differ."""
        self._losses = self._losses or list(losses)
        worst = max(abs(a - b) / abs(a) for a, b in zip(self._losses, losses, strict=True))
        if not worst <= self._tolerance:
            raise WrongWorkError(f"losses of two runs of the same training differ by {worst:.1e} relative")


def _train_alone(config_path: str) -> int:
    """Run the training loop in this process without Ray, its data prepared as the driver does; return the exit code."""
    import torch.distributed as dist

    from model.device import choose_device
    from run_folder.paths import RunFolder
    from train_config.loading import load_config
    from training.engine.context import WorkerContext
    from training.loop.worker import train_worker
    from training.tasks.registry import task_plan

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
    sys.exit(_train_alone(*sys.argv[1:]))
