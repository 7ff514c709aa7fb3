"""Scores of terms propagated to their ancestors on a device, with the results of :mod:`function.propagation`.

Each level is one launch of a Triton kernel on CUDA (:mod:`model.kernels.propagation_triton`), else a little torch.

Shape legend: V terms, B proteins, P terms of a level, E their children.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Propagation:
    """An ontology on a device. ``steps``: (P,) terms, (E,) children, (P,) starts of each level, the deepest first."""

    def __init__(self, steps: Iterable[tuple[NDArray, NDArray, NDArray]], device: str) -> None:
        levels = [(terms, children, np.append(starts, len(children))) for terms, children, starts in steps]
        self.levels = [[torch.from_numpy(a.astype(np.int64)).to(device) for a in level] for level in levels]

    def __call__(self, scores_VB: Tensor, method: Literal["max", "fill"]) -> None:
        """Propagate contiguous scores in place: fp32, fp64 or whole numbers, not below 0."""
        path = propagate_in_torch
        if scores_VB.is_cuda:
            from model.kernels.propagation_triton import propagate as path  # here: a CPU build of torch has no Triton
        for terms, children, starts in self.levels:
            path(scores_VB, terms, children, starts, method)


def propagate_in_torch(scores_VB: Tensor, terms: Tensor, children: Tensor, starts: Tensor, method: str) -> None:
    """One level, on any device."""
    own_PB, children_EB = scores_VB[terms], scores_VB[children]
    places_E1 = torch.repeat_interleave(starts.diff(), output_size=len(children)).unsqueeze(1)
    below_PB = torch.zeros_like(own_PB).scatter_reduce_(0, places_E1.expand_as(children_EB), children_EB, "amax")
    scores_VB[terms] = own_PB.maximum(below_PB) if method == "max" else own_PB.where(own_PB != 0, below_PB)
