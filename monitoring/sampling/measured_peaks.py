"""Peaks measured on the device at hand: FLOP/s of a large matrix product, bytes/s of a large copy."""

import torch
from torch import Tensor

from common.timing import median_seconds


def product_flops_per_s(device: torch.device | str, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of the product of two square matrices of this size."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    repeats = 20 if left.is_cuda else 1
    return 2.0 * size**3 * repeats / median_seconds(lambda: [left @ right for _ in range(repeats)])


def copy_bytes_per_s(source: Tensor, target: Tensor) -> float:
    """Bytes/s read by a copy between two tensors of one size; on one device as many are written."""
    return source.nbytes / median_seconds(lambda: target.copy_(source, non_blocking=True))
