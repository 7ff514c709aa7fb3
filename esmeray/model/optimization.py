"""Faster backbones: optimized for inference, and FP8 products in training (torchao).

In inference on the CPU, products have a fixed number of rows. A vector then depends on its sequence only, not on the
other sequences of the batch.
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
"""Rows per product in inference on the CPU: the token budget of a batch there, which batches nearly fill."""

_FREE_ROWS = 64
"""Rows per thread from which the order of summation in fp32 is independent of their number: four times the minimum."""


def in_blocks(product: Callable[[Tensor], Tensor], x: Tensor, block_rows: int = ROWS) -> Tensor:
    """Apply ``product`` to blocks of ``block_rows`` rows; the last block is padded with zeros.

    oneDNN and MKL choose the order of summation by the number of rows, so that the last bits of a row would depend on
    the number of other rows: in bf16 below 777 rows with 1,280 or more channels, in fp32 below 16 rows.
    """
    rows = x.flatten(0, -2)
    short = -len(rows) % block_rows
    if short:
        rows = functional.pad(rows, (0, 0, 0, short))
    blocks = [product(block) for block in rows.split(block_rows)]
    out = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    return out[: len(out) - short].unflatten(0, x.shape[:-1])


def arithmetic(device: torch.device, fixed_rows: bool) -> str:
    """Describe what the last bits of a vector depend on, in addition to its sequence, the model and the precision."""
    if device.type != "cpu":
        return f"{torch.cuda.get_device_name(device)}, rows of the batch"
    amx = " with AMX" if torch.cpu._is_amx_tile_supported() else ""
    rows = f"{ROWS:,} rows a product" if fixed_rows else "rows of the batch"
    return f"{torch.backends.cpu.get_cpu_capability()}{amx}, {rows}"


class FixedRowsLinear(nn.Linear):
    """Linear layer for inference on the CPU whose rows are bitwise independent of the other rows of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        # In fp32, products of enough rows per thread have the bits of ROWS rows, and padding would cost up to 8 %.
        if x.dtype == torch.float32 and x.shape[:-1].numel() >= _FREE_ROWS * torch.get_num_threads():
            return super().forward(x)
        return in_blocks(super().forward, x)


def fix_rows(module: nn.Module) -> None:
    """Make every Linear on the CPU a :class:`FixedRowsLinear`, in place."""
    for child in module.modules():
        is_on_cpu = type(child) is nn.Linear and child.weight.device.type == "cpu"
        # Without bf16 instructions, bf16 products sum sequentially, which is slow but the same for any number of rows.
        if is_on_cpu and (child.weight.dtype != torch.bfloat16 or _multiplies_bf16()):
            child.__class__ = FixedRowsLinear  # not wrapped, because heads read the weights of their layers


class PrepackedLinear(nn.Module):
    """Linear layer, x W^T + b in bf16, for inference on the CPU, with weights in oneDNN's layout.

    nn.Linear converts its weights to this layout at every call, and first copies its bias to every row. With weights
    converted once, products are 5 to 15 % faster (320 to 1,920 channels, one core of a Zen 4). ``torch.utils.mkldnn``
    also converts once, but copies activations to and from a layout of its own. The operators used here are the ones
    that torch.compile's frozen graphs call.
    """

    def __init__(self, linear: nn.Linear, fixed_rows: bool) -> None:
        super().__init__()
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
    """Cast and freeze a backbone for inference, in place. On the CPU in bf16, weights get oneDNN's layout.

    The backbone can't be trained, exported or moved to another device afterwards. Returns the same object.

    Args:
        backbone: backbone on the device where it will run.
        dtype: bf16 is fastest, on the CPU and on CUDA. The cosine of its features with fp32 features is at least 0.999.
        fixed_rows: on the CPU, make a vector independent of its batch. A few tokens then cost as much as
            :data:`ROWS`.
    """
    backbone.requires_grad_(False).eval().to(dtype)
    if not backbone.pads:  # T5's layers read the weights of their Linear, and padded batches affect vectors anyway
        _make_fast(backbone.model, fixed_rows)
    return backbone


def _make_fast(module: nn.Module, fixed_rows: bool) -> None:
    for streamed in [inner for inner in module.modules() if isinstance(inner, StreamedLayers)]:
        streamed.prepare = partial(_make_fast, fixed_rows=fixed_rows)  # applied to each layer when it is read
    _prepack(module, fixed_rows)
    if fixed_rows:
        fix_rows(module)


def _multiplies_bf16() -> bool:
    """Test whether this processor and this build of torch have bf16 products on the CPU."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _prepack(module: nn.Module, fixed_rows: bool) -> None:
    """Replace every bf16 Linear on the CPU, if the processor and this build of torch have bf16 products."""
    if not _multiplies_bf16():
        return
    for child_name, child in list(module.named_children()):
        # Exact type, because subclasses compute more (FP8, an adapter) than a plain product.
        if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16 and child.weight.device.type == "cpu":
            setattr(module, child_name, PrepackedLinear(child, fixed_rows))
        else:
            _prepack(child, fixed_rows)


def use_fp8(backbone: PackedBackbone, *, emulate: bool = False) -> None:
    """Use FP8 products in the Linears of every layer, in both passes. Call it before the layers are compiled.

    FP8 products are twice as fast as bf16 products on Hopper and later. Rounding each row of activations, weights and
    gradients takes time, so that FP8 is faster from about 1,280 channels.

    ``emulate``: round to FP8 and multiply in the precision of the weights, which works on any device. Parameters keep
    their names, so that checkpoints and exports are the same as with bf16. Raises ConfigError if torchao is not
    installed.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError("training.fp8: the package torchao is not installed; run: pip install torchao") from error

    def takes(module: nn.Module, name: str) -> bool:
        # FP8 kernels need both dimensions of a weight to be divisible by 16.
        return isinstance(module, nn.Linear) and not (module.in_features | module.out_features) % 16

    # Padded, because gradients of weights are products over tokens, whose number varies per micro-batch.
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate, pad_inner_dim=True)
    for layer in backbone.layers:
        convert_to_float8_training(layer, module_filter_fn=takes, config=config)
