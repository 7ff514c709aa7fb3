"""Peak speed of devices, of data sheets or measured.

Known are GPUs by the name that the driver gives them, and a precision: TFLOP/s of dense matrix products with fp32 sums,
which is what training computes; a data sheet's "with sparsity" value is twice that. A GPU that is not listed, or a MIG
slice of one that is, has no known peak: ``monitoring.peak_tflops`` gives it.
"""

import re
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from common.timing import median_seconds

Precision = Literal["bf16", "fp16", "tf32", "fp32"]


class Peaks(NamedTuple):
    """Peaks of one GPU, dense TFLOP/s; None where it lacks the precision in hardware."""

    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float


# By a pattern that the whole name has to match, without "NVIDIA", "Tesla" and the size of the memory.
_KNOWN: tuple[tuple[str, Peaks], ...] = (
    # NVIDIA's data sheets of these GPUs; B200: HGX, per GPU, halved where it is given with sparsity
    (r"B200", Peaks(2250.0, 2250.0, 1125.0, 75.0)),
    (r"H[12]00 NVL", Peaks(835.5, 835.5, 417.5, 60.0)),
    (r"H100 PCIe", Peaks(756.5, 756.5, 378.0, 51.2)),
    (r"H100( HBM3)?|H200|GH200", Peaks(989.4, 989.4, 494.7, 66.9)),
    (r"A100[- ](SXM4|PCIE|PCIe)|A100", Peaks(312.0, 312.0, 156.0, 19.5)),
    (r"L4", Peaks(121.0, 121.0, 60.0, 30.3)),
    (r"L40S", Peaks(362.05, 362.05, 183.0, 91.6)),
    (r"A10G", Peaks(70.0, 70.0, 35.0, 35.0)),
    (r"T4", Peaks(None, 65.0, None, 8.1)),
    (r"V100[- ]SXM[23](-LS)?", Peaks(None, 125.0, None, 15.7)),
    (r"V100[- ]PCIE", Peaks(None, 112.0, None, 14.0)),
    # NVIDIA's whitepapers of GA102, Ada and RTX Blackwell, appendix A: tensor TFLOPS with FP32 accumulate
    (r"GeForce RTX 3090", Peaks(71.2, 71.2, 35.6, 35.6)),
    (r"GeForce RTX 4090", Peaks(165.2, 165.2, 82.6, 82.6)),
    (r"GeForce RTX 5090", Peaks(209.5, 209.5, 104.8, 104.8)),
)


def peak_tflops(gpu_name: str, precision: Precision) -> float | None:
    """Dense TFLOP/s of a GPU by its driver's name (``NVIDIA H100 80GB HBM3``); None where it is not known.

    A GPU without TF32 computes fp32.
    """
    name = re.sub(r"\s*[- ]\d+GB\b|^NVIDIA\s+|^Tesla\s+", "", gpu_name.removeprefix("NVIDIA ")).strip()
    for pattern, peaks in _KNOWN:
        if re.fullmatch(pattern, name):
            value = getattr(peaks, precision)
            return peaks.fp32 if value is None and precision == "tf32" else value
    return None


def product_flops_per_s(device: torch.device | str, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of the product of two square matrices of this size."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    repeats = 20 if left.is_cuda else 1
    return 2.0 * size**3 * repeats / median_seconds(lambda: [left @ right for _ in range(repeats)])


def copy_bytes_per_s(source: Tensor, target: Tensor) -> float:
    """Bytes/s read by a copy between two tensors of one size; on one device as many are written."""
    return source.nbytes / median_seconds(lambda: target.copy_(source, non_blocking=True))
