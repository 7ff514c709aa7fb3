"""Floating-point operations of a model for a token in training, counted from its shapes.

Model FLOPs as in Kaplan et al. 2020 (Scaling Laws, section 2.1) and Chowdhery et al. 2022 (PaLM, appendix B): two for
each weight that a token is multiplied by in the forward pass and four in the backward pass, and for attention
12 x layers x width x context over both. Embedding look-ups, norms and the softmax are left out, and what gradient
checkpointing computes again is no progress and not counted either. Both papers train all weights; here a frozen weight
has no gradient of its own (two less), and through a backbone without any trainable weight no gradient passes (two less
again).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from model.tasks.base import TaskModel


class MatrixWeights(NamedTuple):
    """Weights that tokens are multiplied by, and those of them that are trained."""

    total: int
    trainable: int

    @classmethod
    def of(cls, model: nn.Module) -> MatrixWeights:
        """Those of a model, shared ones as often as they are used; embeddings are looked up and left out."""
        matrices = [
            parameter
            for module in model.modules()
            if not isinstance(module, nn.Embedding)
            for parameter in module.parameters(recurse=False)
            if parameter.ndim > 1
        ]
        return cls(sum(p.numel() for p in matrices), sum(p.numel() for p in matrices if p.requires_grad))


def training_flops_per_token(model: TaskModel, context: float, *, runs_backbone: bool = True) -> float:
    """Operations of forward and backward pass for a token.

    The weights of a head count for each token, also where it takes one vector a sequence: it is small.

    Args:
        model: in the state that it is trained in (``requires_grad``), not partitioned by ZeRO-3.
        context: tokens that a token attends to: the mean over tokens of the length of their sequence.
        runs_backbone: False where kept features stand in for it.
    """
    backbone, whole = MatrixWeights.of(model.backbone), MatrixWeights.of(model)
    head = MatrixWeights(whole.total - backbone.total, whole.trainable - backbone.trainable)
    flops = 4.0 * head.total + 2.0 * head.trainable
    if not runs_backbone:
        return flops
    attention = attention_flops_per_token(model.backbone.config, context)
    passes = 2 if any(parameter.requires_grad for parameter in model.backbone.parameters()) else 1
    return flops + passes * 2.0 * backbone.total + 2.0 * backbone.trainable + (2 * passes - 1) * attention


def attention_flops_per_token(config: Any, context: float) -> float:
    """Operations of attention itself, queries with keys and weights with values, in the forward pass for a token.

    ``config``: of a transformer, with ``num_hidden_layers`` and ``hidden_size``; 0 is the answer for others.
    """
    layers: int = getattr(config, "num_hidden_layers", 0)
    head_width: int | None = getattr(config, "head_dim", None)
    if head_width is None:
        return 4.0 * layers * getattr(config, "hidden_size", 0) * context
    return 4.0 * layers * head_width * config.num_attention_heads * context
