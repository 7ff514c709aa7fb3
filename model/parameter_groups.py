"""Parameter groups of the optimizer: trained parameters, with or without weight decay, by learning rate."""

from collections.abc import Mapping
from typing import Any

from torch import nn

RATE_SHARE = "rate_share"
"""Key of a group: the share of the learning rate that it learns at."""


def parameter_groups(
    model: nn.Module, weight_decay: float, rate_shares: Mapping[nn.Parameter, float] | None = None
) -> list[dict[str, Any]]:
    """Groups for AdamW: trainable matrices decay; biases and norms (one-dimensional parameters) do not.

    To be called before an engine partitions the parameters (ZeRO-3 changes their shapes). ``rate_shares``: share of the
    learning rate of each parameter; 1 for those that are not named.
    """
    shares = rate_shares or {}
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        share, decays = shares.get(parameter, 1.0), parameter.ndim > 1
        name = ("decay" if decays else "no_decay") + ("" if share == 1.0 else f"_{share:.6g}")
        group = groups.setdefault(
            (share, decays),
            {"name": name, "params": [], "weight_decay": weight_decay if decays else 0.0, RATE_SHARE: share},
        )
        group["params"].append(parameter)
    return [groups[key] for key in sorted(groups, key=lambda key: (-key[0], not key[1]))]
