"""Peaks of devices, from data sheets or measured: matrix products, memory, and the link to other GPUs of the node.

GPUs are known by the name that the driver reports. TFLOP/s are for dense matrix products with fp32 accumulation, which
training computes; a data sheet's "with sparsity" value is twice that. Unlisted GPUs and MIG slices have no known peaks:
set ``monitoring.peak_tflops`` for a run.
"""

import re
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from esmeray.common.timing import median_seconds

Precision = Literal["bf16", "fp16", "tf32", "fp32"]


class Peaks(NamedTuple):
    """Peaks of one GPU: dense TFLOP/s (None without hardware support for the precision), memory, and NVLink or PCIe.

    ``link_gb_per_s`` is for one direction: half of the value in data sheets.
    """

    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float
    memory_gb: float
    memory_gb_per_s: float
    link_gb_per_s: float


# Patterns match the whole name without "NVIDIA" and "Tesla"; it may contain the memory size.
_KNOWN: tuple[tuple[str, Peaks], ...] = (
    # NVIDIA's data sheets of these GPUs; B200: HGX, per GPU, halved if given with sparsity
    (r"B200", Peaks(2250.0, 2250.0, 1125.0, 75.0, 180, 7700, 900)),
    (r"H200 NVL", Peaks(835.5, 835.5, 417.5, 60.0, 141, 4800, 450)),
    (r"H100 NVL", Peaks(835.5, 835.5, 417.5, 60.0, 94, 3900, 300)),
    (r"H100 PCIe", Peaks(756.5, 756.5, 378.0, 51.2, 80, 2000, 64)),
    (r"H100( HBM3)?", Peaks(989.4, 989.4, 494.7, 66.9, 80, 3350, 450)),
    (r"H200", Peaks(989.4, 989.4, 494.7, 66.9, 141, 4800, 450)),
    (r"GH200", Peaks(989.4, 989.4, 494.7, 66.9, 96, 4000, 450)),
    (r"A100(-SXM4)?-40GB", Peaks(312.0, 312.0, 156.0, 19.5, 40, 1555, 300)),
    (r"A100[- ]PCIE-40GB", Peaks(312.0, 312.0, 156.0, 19.5, 40, 1555, 32)),
    (r"A100[- ]PCI[Ee]", Peaks(312.0, 312.0, 156.0, 19.5, 80, 1935, 32)),
    (r"A100([- ]SXM4)?", Peaks(312.0, 312.0, 156.0, 19.5, 80, 2039, 300)),
    (r"L4", Peaks(121.0, 121.0, 60.0, 30.3, 24, 300, 32)),
    (r"L40S", Peaks(362.05, 362.05, 183.0, 91.6, 48, 864, 32)),
    (r"A10G", Peaks(70.0, 70.0, 35.0, 35.0, 24, 600, 32)),
    (r"T4", Peaks(None, 65.0, None, 8.1, 16, 320, 16)),
    (r"V100[- ]SXM[23](-LS)?-32GB", Peaks(None, 125.0, None, 15.7, 32, 900, 150)),
    (r"V100[- ]SXM[23](-LS)?", Peaks(None, 125.0, None, 15.7, 16, 900, 150)),
    (r"V100[- ]PCIE", Peaks(None, 112.0, None, 14.0, 16, 900, 16)),
    # NVIDIA's whitepapers of GA102, Ada and RTX Blackwell, appendix A: tensor TFLOPS with FP32 accumulate
    (r"GeForce RTX 3090", Peaks(71.2, 71.2, 35.6, 35.6, 24, 936, 32)),
    (r"GeForce RTX 4090", Peaks(165.2, 165.2, 82.6, 82.6, 24, 1008, 32)),
    (r"GeForce RTX 5090", Peaks(209.5, 209.5, 104.8, 104.8, 32, 1792, 64)),
)


def known_peaks(gpu_name: str) -> Peaks | None:
    """Return peaks of a GPU by its driver's name or a short name (``h100``); None if unknown."""
    whole = re.sub(r"^(NVIDIA\s+)?(Tesla\s+)?", "", gpu_name.strip())
    # Tried with the memory size too: the 40 GB A100 has another bandwidth than the 80 GB one.
    names = (whole, re.sub(r"\s*[- ]\d+GB\b", "", whole))
    # The whole name must match: names of laptop GPUs and MIG slices begin like known names but have other peaks.
    return next((peaks for pattern, peaks in _KNOWN if any(re.fullmatch(pattern, n, re.I) for n in names)), None)


def known_gpus(precision: Precision) -> list[str]:
    """Return the shortest name of each GPU with a peak in this precision.

    It is the GPU's pattern without optional parts, with the first alternative.
    """
    patterns = [pattern for pattern, peaks in _KNOWN if getattr(peaks, precision) is not None]
    return [re.sub(r"\[(.)[^]]*\]", r"\1", re.sub(r"\([^)]*\)\?", "", pattern)) for pattern in patterns]


def peak_tflops(gpu_name: str, precision: Precision) -> float | None:
    """Return dense TFLOP/s of a GPU by its driver's name (``NVIDIA H100 80GB HBM3``); None if unknown.

    A GPU without TF32 computes fp32.
    """
    peaks = known_peaks(gpu_name)
    value = getattr(peaks, precision, None)
    return peaks.fp32 if peaks and value is None and precision == "tf32" else value


def product_flops_per_s(device: torch.device | str, dtype: torch.dtype, size: int) -> float:
    """Measure the FLOP/s of a product of two square matrices of this size."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    repeats = 20 if left.is_cuda else 1
    return 2.0 * size**3 * repeats / median_seconds(lambda: [left @ right for _ in range(repeats)])


def copy_bytes_per_s(source: Tensor, target: Tensor) -> float:
    """Measure the bytes/s read by a copy between two tensors of the same size; on one device as many are written."""
    return source.nbytes / median_seconds(lambda: target.copy_(source, non_blocking=True))
