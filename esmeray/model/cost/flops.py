"""Floating-point operations of a model per token, in training and in a forward pass, counted from its shapes.

Model FLOPs as in Kaplan et al. 2020 (Scaling Laws, section 2.1) and Chowdhery et al. 2022 (PaLM, appendix B): per
weight, two in the forward pass and four in the backward pass; for attention, 12 x layers x width x context in both
passes together. Embedding look-ups, norms, the softmax and recomputation by gradient checkpointing are not counted.
Both papers train all weights. Here a frozen weight has no gradient of its own (two less), and no gradient passes
through a backbone without any trainable weight (another two less).
"""

from typing import Any

from torch import nn

from esmeray.model.backbones.base import PackedBackbone
from esmeray.model.task_model import TaskModel


def training_flops_per_token(model: TaskModel, context: float, *, runs_backbone: bool = True) -> float:
    """Operations per token of the forward and the backward pass.

    The weights of a head count per token even if it takes one vector per sequence, because it is small.

    Args:
        model: model with ``requires_grad`` as in training, not partitioned by ZeRO-3.
        context: number of tokens that a token attends to: the mean over tokens of the length of their sequence.
        runs_backbone: False if the backbone's features are cached.
    """
    total, trained = _matrix_weights(model)
    if model.backbone is None:
        return 4.0 * total + 2.0 * trained
    backbone, trained_backbone = _matrix_weights(model.backbone)
    flops = 4.0 * (total - backbone) + 2.0 * (trained - trained_backbone)
    if not runs_backbone:
        return flops
    # If any weight of the backbone is trainable, e.g. an adapter's, the gradient passes through the layers after it.
    passes = 2 if any(parameter.requires_grad for parameter in model.backbone.parameters()) else 1
    # Attention has no weights: its backward pass has two products per product of the forward pass.
    attention = (2 * passes - 1) * _attention_flops(model.backbone.config, context)
    return flops + passes * 2.0 * backbone + 2.0 * trained_backbone + attention


def forward_flops(backbone: PackedBackbone) -> tuple[float, float]:
    """Operations of a forward pass: per token, and in addition per token that it attends to."""
    return 2.0 * _matrix_weights(backbone)[0], _attention_flops(backbone.config, 1.0)


def _matrix_weights(model: nn.Module) -> tuple[int, int]:
    """Number of weights in matrix products with tokens, and how many of them are trainable.

    Shared weights count once per use. Embeddings are look-ups and don't count.
    """
    matrices = []
    for module in model.modules():
        # Checked per module, so that tied output weights count at the head.
        if not isinstance(module, nn.Embedding):
            matrices += [p for p in module.parameters(recurse=False) if p.ndim > 1]  # biases and norms are negligible
    return sum(p.numel() for p in matrices), sum(p.numel() for p in matrices if p.requires_grad)


def _attention_flops(config: Any, context: float) -> float:
    """Operations per token of the two products of attention (query-key, weights-values) in the forward pass."""
    # In Qwen 3 the heads are wider than hidden_size / heads.
    head_width: int | None = getattr(config, "head_dim", None)
    width = config.hidden_size if head_width is None else head_width * config.num_attention_heads
    return 4.0 * config.num_hidden_layers * width * context
