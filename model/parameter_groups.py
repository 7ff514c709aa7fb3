"""Which parameters the optimizer sees, and which of them decay."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for AdamW: trainable matrices decay; biases and norms (one-dimensional parameters) do not.

    Shared parameters are listed once. To be called before an engine partitions the parameters (ZeRO-3 changes their
    shapes). Empty groups are left out.

    Returns:
        Dictionaries with ``params``, ``weight_decay`` and ``name``.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"name": "decay", "params": [p for p in trainable if p.ndim > 1], "weight_decay": weight_decay},
        {"name": "no_decay", "params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
