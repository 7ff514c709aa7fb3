"""What a run leaves behind besides checkpoints: the exported model, and the records of batches that gave NaN."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.publishing import write_atomically
from dataset.packed_batch import PackedBatch
from run_folder.metrics_log import read_metrics
from run_folder.paths import RunFolder
from training.checkpoints.checkpoint import CheckpointFolder
from training.engine.engine import TrainingEngine
from training.tasks.experiment import TrainedState
from training.tasks.registry import experiment_class


def export_final(engine: TrainingEngine, checkpoint: CheckpointFolder, run: RunFolder, rank: int) -> None:
    """Export the trained model in fp32, as its checkpoint describes it. Every worker calls it; rank 0 writes."""
    state = engine.full_precision_state()
    if rank == 0:
        export_state(state, checkpoint, run, run.export)


def export_state(
    state: Mapping[str, Tensor], checkpoint: CheckpointFolder, run: RunFolder, folder: Path, overwrite: bool = True
) -> Path:
    """Write a Hugging Face folder of a model in which ``state`` was trained; the rest comes from its source.

    Config, tokenizer and label names are the checkpoint's: those in the run's folder may be of later data.

    Raises:
        ConfigError: the folder exists, and is no export or may not be overwritten.
        CheckpointError: the checkpoint is damaged, or the state does not fit its config's model.
    """
    config, step = checkpoint.config(), checkpoint.step
    facts: dict[str, Any] = {"run": config.run.name, "data": ", ".join(_shown(source) for source in config.data.source)}
    facts |= {"steps": step, "metrics": _validation_before(run.metrics, step)}
    trained = TrainedState(state, checkpoint, run, facts)
    return experiment_class(config.model.task).export(trained, folder, overwrite=overwrite)


def save_nonfinite_records(
    run: RunFolder, name_of: Callable[[int], str], step: int, rank: int, batches: list[PackedBatch]
) -> None:
    """Write which records this worker's part of a step was made of, to look for what made it NaN."""
    records = torch.cat([batch.records for batch in batches]).tolist() if batches else []
    run.nonfinite.mkdir(exist_ok=True)
    content: dict[str, Any] = {
        "step": step,
        "rank": rank,
        "records": [{"index": i, "id": name_of(i)} for i in records],
    }
    write_atomically(run.nonfinite / f"step-{step:08d}-rank-{rank:05d}.json", json.dumps(content, indent=1) + "\n")


def _validation_before(metrics: Path, step: int) -> dict[str, float]:
    if not metrics.exists():
        return {}
    records = [r for r in read_metrics(metrics) if r["kind"] == "validation" and r["step"] <= step]
    hidden = {"kind", "step", "epoch", "time"}
    return {name: value for name, value in records[-1].items() if name not in hidden} if records else {}


def _shown(source: str) -> str:
    return Path(source).name or source
