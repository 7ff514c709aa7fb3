"""Propagation in Triton: a program goes through the children of one term for one block of proteins.

Terms of a level are written while only terms below it are read. Compiled for sm_80, sm_90 and sm_100 it takes 27 to 44
registers and spills none; it has run under Triton's interpreter only, on no GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROTEINS = 512


def propagate(scores_VB: Tensor, terms: Tensor, children: Tensor, starts: Tensor, method: str) -> None:
    """One level, in place."""
    B = scores_VB.shape[1]
    with torch.cuda.device_of(scores_VB):
        _kernel[len(terms), triton.cdiv(B, PROTEINS)](scores_VB, terms, children, starts, B, method, PROTEINS)


@triton.jit
def _kernel(scores, terms, children, starts, proteins, METHOD: tl.constexpr, PROTEINS: tl.constexpr):
    place = tl.program_id(0)
    columns = tl.program_id(1) * PROTEINS + tl.arange(0, PROTEINS)
    inside = columns < proteins
    places = scores + tl.load(terms + place) * proteins + columns
    own = tl.load(places, inside, other=0)
    below = tl.zeros_like(own)
    for edge in range(tl.load(starts + place), tl.load(starts + place + 1)):
        child = tl.load(children + edge)
        below = tl.maximum(below, tl.load(scores + child * proteins + columns, inside, other=0))
    tl.store(places, tl.maximum(own, below) if METHOD == "max" else tl.where(own == 0, below, own), inside)
