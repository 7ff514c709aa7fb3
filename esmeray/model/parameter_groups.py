"""Parameter groups of the optimizer: trained parameters, with or without weight decay, by learning rate."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

RATE_SHARE = "rate_share"
"""Key of a group: the share of the learning rate that it learns at."""
MATRICES = "matrices"
"""Key of a group: its parameters are matrices of layers, which an optimizer may update as such."""


def layer_matrices(layers: nn.Module) -> list[nn.Parameter]:
    """Trained matrices of layers, those of embeddings left out: T5 has one, of positions, in its first layer."""
    return [
        parameter
        for module in layers.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad and parameter.ndim == 2
    ]


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    rate_shares: Mapping[nn.Parameter, float] | None = None,
    matrices: Collection[nn.Parameter] = (),
) -> list[dict[str, Any]]:
    """Groups for an optimizer: trainable matrices decay; biases and norms (one-dimensional parameters) do not.

    To be called before an engine partitions the parameters (ZeRO-3 changes their shapes). ``rate_shares``: share of the
    learning rate of each parameter; 1 for those that are not named. ``matrices`` stand in groups of their own, the
    last.
    """
    shares = rate_shares or {}
    apart = set(matrices)
    groups: dict[tuple[bool, float, bool], dict[str, Any]] = {}
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        share = shares.get(parameter, 1.0)
        decays = parameter.ndim > 1
        is_apart = parameter in apart
        name = "decay" if decays else "no_decay"
        if is_apart:
            name = MATRICES
        if share != 1:
            name += f"_{share:.6g}"
        group = groups.setdefault(
            (is_apart, share, decays),
            {"name": name, "params": [], "weight_decay": weight_decay if decays else 0.0, RATE_SHARE: share},
        )
        group["params"].append(parameter)
        if is_apart:
            group[MATRICES] = True
    # In an order that follows from the groups alone: a checkpoint's optimizer state is matched to them by number.
    return [groups[key] for key in sorted(groups, key=lambda key: (key[0], -key[1], not key[2]))]
