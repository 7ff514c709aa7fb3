"""Backbones made fast: for inference alone, and in training by products in FP8 (torchao).

In inference on the CPU a vector depends on its sequence alone, not on what shares its batch: products are of a fixed
number of rows.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from esmeray.common.errors import ConfigError
from esmeray.model.backbones.base import PackedBackbone
from esmeray.model.backbones.streaming import StreamedLayers

ROWS = 2048
"""Rows of each product in inference on the CPU: the token budget of a batch there, which is nearly filled."""


def in_blocks(product: Callable[[Tensor], Tensor], x: Tensor, block_rows: int = ROWS) -> Tensor:
    """``product`` of so many rows at a time, with zeros below the last.

    By the number of rows oneDNN and MKL choose how to divide the sums of a product, so that the last bits of a row
    would depend on how many others there are: in bf16 from 1,280 channels on below 777 rows, in fp32 below 16.
    """
    rows = x.flatten(0, -2)
    short = -len(rows) % block_rows
    if short:
        rows = functional.pad(rows, (0, 0, 0, short))
    blocks = [product(block) for block in rows.split(block_rows)]
    out = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    return out[: len(out) - short].unflatten(0, x.shape[:-1])


def arithmetic(device: torch.device, fixed_rows: bool) -> str:
    """Describe what the last bits of a vector depend on beside its sequence, the model and the precision."""
    if device.type != "cpu":
        return f"{torch.cuda.get_device_name(device)}, rows of the batch"
    amx = " with AMX" if torch.cpu._is_amx_tile_supported() else ""
    rows = f"{ROWS:,} rows a product" if fixed_rows else "rows of the batch"
    return f"{torch.backends.cpu.get_cpu_capability()}{amx}, {rows}"


class FixedRowsLinear(nn.Linear):
    """A linear layer of inference on the CPU whose rows are the same bits whatever shares their batch."""

    def forward(self, x: Tensor) -> Tensor:
        return in_blocks(super().forward, x)


def fix_rows(module: nn.Module) -> None:
    """Make every Linear on the CPU a :class:`FixedRowsLinear`, in place."""
    for child in module.modules():
        is_on_cpu = type(child) is nn.Linear and child.weight.device.type == "cpu"
        # Without instructions for bf16 its products are sums in order, slow, and the same for any number of rows.
        if is_on_cpu and (child.weight.dtype != torch.bfloat16 or _multiplies_bf16()):
            child.__class__ = FixedRowsLinear  # in place of wrapping it: heads read their layers' weights


class PrepackedLinear(nn.Module):
    """x W^T + b in bf16, for inference, of a linear layer on the CPU, its weights as oneDNN's product wants them.

    The ordinary Linear brings its weights into that layout at every call and copies its bias to every row first; laid
    out once, products run 5 to 15 % faster (at 320 to 1,920 channels, one core of a Zen 4). ``torch.utils.mkldnn`` does
    the same, but copies the activations to and from a layout of their own. The operators are those that torch.compile's
    frozen graphs call.
    """

    def __init__(self, linear: nn.Linear, fixed_rows: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._fixed_rows = fixed_rows

    def forward(self, x: Tensor) -> Tensor:
        return in_blocks(self._product, x) if self._fixed_rows else self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


def optimize_for_inference(
    backbone: PackedBackbone, dtype: torch.dtype = torch.bfloat16, *, fixed_rows: bool = True
) -> PackedBackbone:
    """Take a backbone over for inference alone: cast, frozen, and on the CPU in bf16 with weights laid out for oneDNN.

    ``backbone``: on the device where it is to run. It can't be trained, exported or moved to another device afterwards.
    ``dtype``: bf16 is the fastest on the CPU as on CUDA; its features have a cosine of 0.999 or more with fp32's.
    ``fixed_rows``: on the CPU a vector does not depend on its batch, for which a few tokens cost what
    :data:`ROWS` do. Returns the same object.
    """
    backbone.requires_grad_(False).eval().to(dtype)
    if not backbone.pads:  # T5's layers look at the weights of their Linear, and its groups depend on the batch anyway
        _make_fast(backbone.model, fixed_rows)
    return backbone


def _make_fast(module: nn.Module, fixed_rows: bool) -> None:
    for streamed in [inner for inner in module.modules() if isinstance(inner, StreamedLayers)]:
        streamed.prepare = partial(_make_fast, fixed_rows=fixed_rows)  # each layer, once it is read
    _prepack(module, fixed_rows)
    if fixed_rows:
        fix_rows(module)


def _multiplies_bf16() -> bool:
    """Test that this processor and this torch have products in bf16 on the CPU."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _prepack(module: nn.Module, fixed_rows: bool) -> None:
    """Replace every bf16 Linear on the CPU; leaves a module alone where this torch or processor can't."""
    if not _multiplies_bf16():
        return
    for child_name, child in list(module.named_children()):
        # Not a subclass: it computes something else (FP8, an adapter) that a plain product would drop.
        if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16 and child.weight.device.type == "cpu":
            setattr(module, child_name, PrepackedLinear(child, fixed_rows))
        else:
            _prepack(child, fixed_rows)


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
        # FP8's kernels want both sides of a weight to be divisible by 16.
        return isinstance(module, nn.Linear) and not (module.in_features | module.out_features) % 16

    # Padded: weights' gradients are products over tokens, of which a part of a batch has any number.
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate, pad_inner_dim=True)
    for layer in backbone.layers:
        convert_to_float8_training(layer, module_filter_fn=takes, config=config)
