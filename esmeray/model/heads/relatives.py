"""Vectors that are close for proteins of one group, by kernel ridge regression.

The kernel of two proteins is exp(2 (cosine - 1)) of their mean features, centred by the mean over the training
proteins. Groups are regressed with it (Saunders et al. 1998, "Ridge regression learning algorithm in dual variables").
A vector is the prediction of the regression, in the directions that the kernel explains best.

Shape legend: N proteins, L training proteins, D channels of features, C channels of a vector.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from esmeray.model.optimization import in_blocks

_ROWS = 32
"""Proteins per product. It is fixed, so that a vector does not depend on the size of its batch."""


class RelativesHead(nn.Module):
    """Head that computes the vectors. Its buffers stay fp32 when a model is cast, like every head's."""

    mean: Tensor
    learnt: Tensor
    coefficients: Tensor

    def __init__(self, mean_D: Tensor, learnt_LD: Tensor, coefficients_LC: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean_D)
        self.register_buffer("learnt", learnt_LD)
        self.register_buffer("coefficients", coefficients_LC)

    def forward(self, means_ND: Tensor) -> Tensor:
        """Return (N, C) fp32 vectors from mean features."""
        unit_ND = functional.normalize(means_ND.float() - self.mean, dim=1)
        return in_blocks(lambda rows_nD: kernel(rows_nD, self.learnt) @ self.coefficients, unit_ND, _ROWS)


def kernel(unit_ND: Tensor, learnt_LD: Tensor) -> Tensor:
    """Return the (N, L) kernel of features with norm 1."""
    return torch.exp(2 * (unit_ND @ learnt_LD.T - 1))
