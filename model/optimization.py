"""Backbones made fast: for inference alone, and in training by products in FP8 (torchao)."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from esmeray.common.errors import ConfigError
from esmeray.model.backbones.base import PackedBackbone
from esmeray.model.backbones.huggingface import PaddedBackbone
from esmeray.model.backbones.streaming import StreamedLayers

_ROWS_HINT = 2048
"""Tokens of a call, roughly; the layout is good for any number."""
_FP8_MULTIPLE = 16
"""What FP8's kernels want both sides of a weight to be divisible by."""


class PrepackedLinear(nn.Module):
    """x W^T + b in bf16, for inference, of a linear layer on the CPU, its weights as oneDNN's product wants them.

    The ordinary Linear brings its weights into that layout at every call and copies its bias to every row first; laid
    out once, products run 5 to 15 % faster (at 320 to 1,920 channels, one core of a Zen 4). ``torch.utils.mkldnn`` does
    the same, but copies the activations to and from a layout of their own. The operators are those that torch.compile's
    frozen graphs call.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


def optimize_for_inference(backbone: PackedBackbone, dtype: torch.dtype = torch.bfloat16) -> PackedBackbone:
    """Take a backbone over for inference alone: cast, frozen, and on the CPU in bf16 with weights laid out for oneDNN.

    ``backbone``: on the device where it is to run. It can't be trained, exported or moved to another device afterwards.
    ``dtype``: bf16 is the fastest on the CPU as on CUDA; its features have a cosine of 0.999 or more with fp32's.
    Returns the same object.
    """
    backbone.requires_grad_(False).eval().to(dtype)
    if not isinstance(backbone, PaddedBackbone):  # T5's layers look at the weights of their Linear
        prepack(backbone.model)
    return backbone


def prepack(module: nn.Module) -> None:
    """Replace every bf16 Linear on the CPU; leaves a module alone where this torch or processor can't."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return
    for child_name, child in list(module.named_children()):
        # Not a subclass: it computes something else (FP8, an adapter) that a plain product would drop.
        if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16 and child.weight.device.type == "cpu":
            setattr(module, child_name, PrepackedLinear(child))
        elif isinstance(child, StreamedLayers):
            child.prepare = prepack  # each layer, once it is read
        else:
            prepack(child)


def use_fp8(backbone: PackedBackbone, *, emulate: bool = False) -> None:
    """Have the Linears of every layer multiply in FP8, in both passes. To be called before the layers are compiled.

    FP8 products run twice as fast as bf16's on Hopper and later; rounding each row of activations, weights and
    gradients takes some of that back, so that it pays from about 1,280 channels on.

    ``emulate``: round as FP8 does and multiply in the weights' precision, which any device can. Parameters keep their
    names, so that checkpoints and exports are those of bf16. Raises ConfigError where torchao is not installed.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError("training.fp8 needs torchao: pip install torchao") from error

    def takes(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and not (module.in_features | module.out_features) % _FP8_MULTIPLE

    # Padded: weights' gradients are products over tokens, of which a part of a batch has any number.
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate, pad_inner_dim=True)
    for layer in backbone.layers:
        convert_to_float8_training(layer, module_filter_fn=takes, config=config)
