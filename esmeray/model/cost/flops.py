"""Floating-point operations of a model for a token, in training and in a forward pass, counted from its shapes.

Model FLOPs as in Kaplan et al. 2020 (Scaling Laws, section 2.1) and Chowdhery et al. 2022 (PaLM, appendix B): two for
each weight that a token is multiplied by in the forward pass and four in the backward pass, and for attention
12 x layers x width x context over both. Embedding look-ups, norms, the softmax and what gradient checkpointing computes
again are not counted. Both papers train all weights; here a frozen weight has no gradient of its own (two less), and
through a backbone without any trainable weight no gradient passes (two less again).
"""

from typing import Any

from torch import nn

from esmeray.model.backbones.base import PackedBackbone
from esmeray.model.task_model import TaskModel


def training_flops_per_token(model: TaskModel, context: float, *, runs_backbone: bool = True) -> float:
    """Operations of forward and backward pass for a token.

    The weights of a head count for each token, also where it takes one vector a sequence: it is small. ``model``: in
    the state that it is trained in (``requires_grad``), not partitioned by ZeRO-3. ``context``: tokens that a token
    attends to: the mean over tokens of the length of their sequence. ``runs_backbone``: False where it is cached.
    """
    total, trained = _matrix_weights(model)
    if model.backbone is None:
        return 4.0 * total + 2.0 * trained
    backbone, trained_backbone = _matrix_weights(model.backbone)
    flops = 4.0 * (total - backbone) + 2.0 * (trained - trained_backbone)
    if not runs_backbone:
        return flops
    # One trained weight in the backbone, an adapter's say, and the gradient passes through all that follows it.
    passes = 2 if any(parameter.requires_grad for parameter in model.backbone.parameters()) else 1
    # Attention has no weights: its backward pass is two products for each of the forward pass.
    attention = (2 * passes - 1) * _attention_flops(model.backbone.config, context)
    return flops + passes * 2.0 * backbone + 2.0 * trained_backbone + attention


def forward_flops(backbone: PackedBackbone) -> tuple[float, float]:
    """Operations of a forward pass for a token, and besides for each token that it attends to."""
    return 2.0 * _matrix_weights(backbone)[0], _attention_flops(backbone.config, 1.0)


def _matrix_weights(model: nn.Module) -> tuple[int, int]:
    """Weights that tokens are multiplied by, and those of them that are trained.

    Shared ones count as often as they are used; embeddings are looked up and left out.
    """
    matrices = [
        parameter
        for module in model.modules()
        if not isinstance(module, nn.Embedding)  # by module: tied output weights are counted at the head
        for parameter in module.parameters(recurse=False)
        if parameter.ndim > 1  # biases and norms are an addition for a row of products
    ]
    return sum(p.numel() for p in matrices), sum(p.numel() for p in matrices if p.requires_grad)


def _attention_flops(config: Any, context: float) -> float:
    """Operations of queries with keys and weights with values, in the forward pass for a token."""
    # Qwen 3's heads are wider than their share of the channels.
    head_width: int | None = getattr(config, "head_dim", None)
    width = config.hidden_size if head_width is None else head_width * config.num_attention_heads
    return 4.0 * config.num_hidden_layers * width * context
