"""Tiny runs, and readers of their folders."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from esmeray.run_folder.checkpoints import Manifest, Position
from esmeray.run_folder.metrics_log import read_metrics
from esmeray.run_folder.paths import RunFolder
from esmeray.training.config import Config

TINY = {
    "data": {"max_length": 62, "num_workers": 0, "sample": {"records": 120, "families": 6}},
    "batch": {"tokens": 256, "global_tokens": 512},
    "model": {
        "backbone": {"source": "esm2_t6_8M", "layers": 1, "hidden_size": 16, "heads": 2},
        "autoencoder": {"hidden_sizes": [16, 8], "normalization_tokens": 512},
    },
    "training": {
        "max_steps": 8,
        "warmup_steps": 2,
        "learning_rate": 1e-2,
        "precision": "fp32",
        "evaluate_every_steps": 4,
        "evaluation_batches": 2,
    },
    "checkpoint": {"every_steps": 4},
    "wandb": {"mode": "disabled"},
}
"""Settings of a run that takes a few seconds without Ray."""


def merged(base: dict, changes: dict) -> dict:
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def tiny_config(folder: Path, **changes: dict) -> Config:
    base = merged(TINY, {"run": {"name": "tiny", "storage_path": str(folder)}})
    return Config.model_validate(merged(base, changes))


def run_folder(config: Config) -> RunFolder:
    return RunFolder(config.run.storage_path, config.run.name)


def train_losses(config: Config) -> dict[int, float]:
    records = read_metrics(run_folder(config).metrics)
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def events(config: Config, name: str) -> list[dict]:
    return [r for r in read_metrics(run_folder(config).metrics) if r["kind"] == "event" and r["event"] == name]


def validations(config: Config) -> list[dict]:
    return [record for record in read_metrics(run_folder(config).metrics) if record["kind"] == "validation"]


def exported_weights(config: Config) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(run_folder(config).export.glob("*.safetensors")):
        weights |= {f"{path.name}/{name}": tensor for name, tensor in load_file(path).items()}
    return weights


def a_manifest(step: int, world_size: int = 1, cost: float | None = None) -> Manifest:
    return Manifest(
        position=Position(step=step),
        world_size=world_size,
        seed=0,
        store_checksum="",
        wandb_run_id=None,
        validation_cost=cost,
        config={"a": [1, 2.5]},
        versions={},
        created="",
        files={},
    )
