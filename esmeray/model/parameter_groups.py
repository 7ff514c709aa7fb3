"""Parameter groups of the optimizer: trainable parameters by weight decay and learning rate."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

RATE_SHARE = "rate_share"
"""Key of a group: factor of its learning rate."""
MATRICES = "matrices"
"""Key of a group: its parameters are matrices of layers, which an optimizer like Muon may update as matrices."""


def layer_matrices(layers: nn.Module) -> list[nn.Parameter]:
    """Trainable matrices of layers, without embeddings: T5 has a position embedding in its first layer."""
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
    """Parameter groups for an optimizer. Matrices have weight decay; biases and norms (one-dimensional) do not.

    Call it before an engine partitions the parameters, because ZeRO-3 changes their shapes.

    Args:
        model: model whose trainable parameters are grouped.
        weight_decay: weight decay of parameters with more than one dimension.
        rate_shares: factor of the learning rate per parameter; 1 for other parameters.
        matrices: parameters that get separate groups, after the others.
    """
    shares = rate_shares or {}
    apart = set(matrices)
    groups: dict[tuple[bool, float, bool], dict[str, Any]] = {}
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        share = shares.get(parameter, 1.0)
        decays = parameter.ndim > 1
        is_apart = parameter in apart
        group = groups.setdefault(
            (is_apart, share, decays),
            {"params": [], "weight_decay": weight_decay if decays else 0.0, RATE_SHARE: share},
        )
        group["params"].append(parameter)
        if is_apart:
            group[MATRICES] = True
    # Sorted by key, because a checkpoint's optimizer state is matched to groups by number.
    return [groups[key] for key in sorted(groups, key=lambda key: (key[0], -key[1], not key[2]))]
