"""The machine at hand, as far as a default of the settings depends on it. Imports nothing heavy."""

import ctypes
import re
from pathlib import Path
from typing import Literal

CPU_INFO = Path("/proc/cpuinfo")
_BF16 = re.compile(r"\b(avx512_bf16|amx_bf16|bf16)\b")
"""Flags of x86 and, the last, of Arm processors."""


def has_gpu_driver() -> bool:
    """Look for CUDA's driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def default_precision(on_cuda: bool) -> Literal["bf16", "fp32"]:
    """Precision of a computation on this machine that was given none: bf16 if there are instructions for it."""
    return "bf16" if on_cuda or cpu_computes_bf16() else "fp32"


def cpu_computes_bf16() -> bool:
    """Look for the processor's instructions for bf16.

    A processor without them multiplies matrices in bf16 six times slower than in fp32, and trains thirty times slower
    (torch 2.13, oneDNN 3; AVX2).
    """
    try:
        return _BF16.search(CPU_INFO.read_text(encoding="utf-8", errors="replace")) is not None
    except OSError:
        return False
