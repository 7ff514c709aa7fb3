"""A process group of one, tiny models and data, for what needs no Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from train_config.schema import Config

TINY = {
    "data": {"max_length": 62, "num_workers": 0, "sample": {"records": 120, "families": 6}},
    "batch": {"tokens": 256, "global_tokens": 512, "packing_window": 64},
    "model": {
        "backbone": {"source": "esm2_t6_8M", "layers": 1, "hidden_size": 16, "heads": 2},
        "autoencoder": {"hidden_sizes": [16, 8], "normalization_tokens": 512},
    },
    "training": {
        "max_steps": 8,
        "warmup_steps": 2,
        "learning_rate": 1e-2,
        "amp_dtype": "none",
        "evaluate_every_steps": 4,
        "evaluation_batches": 2,
    },
    "checkpoint": {"every_steps": 4, "asynchronous": False},
    "wandb": {"mode": "disabled"},
}
"""A run of a few seconds without Ray."""


def merged(base: dict, changes: dict) -> dict:
    """``base`` with nested ``changes``."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def tiny_config(folder: Path, **changes: dict) -> Config:
    """A tiny run in ``folder``, with sections changed."""
    base = merged(TINY, {"run": {"name": "tiny", "storage_path": str(folder)}})
    return Config.model_validate(merged(base, changes))


@pytest.fixture(scope="session")
def process_group() -> Iterator[None]:
    """A gloo group of this process alone; one for the session, since DeepSpeed keeps the groups that it made."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
