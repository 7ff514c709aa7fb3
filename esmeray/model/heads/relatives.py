"""Vectors that lie close for proteins of one group, by kernel ridge regression.

The kernel of two proteins is exp(2 (cosine - 1)) of the means of their features, less the mean of the proteins that
were learnt. Groups are regressed on it (Saunders et al. 1998, "Ridge regression learning algorithm in dual variables");
a vector is what the regression gives, in the directions that the kernel explains best.

Shape legend: N proteins, L learnt ones, D channels of features, C channels of a vector.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from esmeray.model.optimization import in_blocks

_ROWS = 32
"""Proteins of a product, so that a vector does not depend on how many share its batch."""


class RelativesHead(nn.Module):
    """See the module. Its buffers, as all of a head, keep fp32 where a model is cast."""

    mean: Tensor
    learnt: Tensor
    coefficients: Tensor

    def __init__(self, mean_D: Tensor, learnt_LD: Tensor, coefficients_LC: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean_D)
        self.register_buffer("learnt", learnt_LD)
        self.register_buffer("coefficients", coefficients_LC)

    def forward(self, means_ND: Tensor) -> Tensor:
        """(N, C) fp32 of the means of features."""
        unit_ND = functional.normalize(means_ND.float() - self.mean, dim=1)
        return in_blocks(lambda rows_nD: kernel(rows_nD, self.learnt) @ self.coefficients, unit_ND, _ROWS)


def kernel(unit_ND: Tensor, learnt_LD: Tensor) -> Tensor:
    """(N, L) of features of length 1."""
    return torch.exp(2 * (unit_ND @ learnt_LD.T - 1))
