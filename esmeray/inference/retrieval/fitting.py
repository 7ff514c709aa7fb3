"""Fit a network that finds relatives to labelled proteins, in closed form.

Counts of gapped k-mers are soft: a k-mer counts for all others by exp(0.3 s), s their BLOSUM62 score, which is the
inner product of counts that each residue's axis is turned by. Their principal components, each divided by the fourth
root of its variance, are the features of :mod:`esmeray.model.backbones.gapped_kmers`; on these groups are regressed.

Shape legend: L proteins that are learnt, F counts, P patterns, R residues, D channels of features, G groups, C channels
of a vector.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from esmeray.alignment.scoring import scoring
from esmeray.dataset.embeddings.manifest import ranges
from esmeray.dataset.tokens.esm import RESIDUE_TABLE, STANDARD_RESIDUES, VOCABULARY
from esmeray.model.backbones.gapped_kmers import KMERS, PATTERNS, RESIDUES, codes_of
from esmeray.model.backbones.loading import drawn
from esmeray.model.heads.relatives import RelativesHead, kernel

_SOFTNESS = 0.3
_BLOCK = 256
_PENALTY = 0.01
"""Of the regression, beside a kernel of 1 of a protein with itself."""


class Fitted(NamedTuple):
    """The table of the backbone, the head, and the share of proteins whose group is named by a regression on the others
    alone, of those that have relatives."""

    table: Tensor
    head: RelativesHead
    named: float


def fit(
    sequences: Sequence[NDArray[np.uint8]],
    groups_L: NDArray[np.int64],
    features: int,
    channels: int,
    seed: int,
    status: Callable[[str], None],
) -> Fitted:
    """Learn the groups, numbers from 0, of these ASCII sequences; ``features`` and ``channels`` are at most so many.

    Memory is the larger of some 400,000 L and 12 L² bytes.
    """
    turn_RR = _turn()
    counts_LF = torch.empty(len(sequences), len(PATTERNS) * KMERS)
    for start, stop in ranges(len(sequences), _BLOCK):
        status(f"counting k-mers of {start:,} of {len(sequences):,} proteins")
        counts_LF[start:stop] = _turned(torch.stack([*map(_counts, sequences[start:stop])]), turn_RR)
    status("principal components of the counts")
    mean_F = counts_LF.mean(0)
    counts_LF -= mean_F
    with drawn(seed):
        _, scales_D, axes_FD = torch.svd_lowrank(counts_LF, q=min(features, *counts_LF.shape), niter=1)
    # A component of nothing but rounding would be blown up.
    is_kept_D = scales_D > 1e-4 * scales_D[0]
    axes_FD = (axes_FD / scales_D.sqrt())[:, is_kept_D]
    learnt_LD = functional.normalize(counts_LF @ axes_FD, dim=1)
    del counts_LF
    status("regression of the groups")
    sizes_G = torch.from_numpy(np.bincount(groups_L))
    groups = torch.from_numpy(groups_L)
    # By the root of a group's size, so that small ones count.
    targets_LG = functional.one_hot(groups) / sizes_G.sqrt()
    kernel_LL = kernel(learnt_LD, learnt_LD)
    kernel_LL.diagonal().add_(_PENALTY)
    factor_LL = torch.linalg.cholesky(kernel_LL)
    del kernel_LL
    coefficients_LG = torch.cholesky_solve(targets_LG, factor_LL)
    # What the others say of a protein (Rasmussen & Williams 2006, equation 5.12).
    others_LG = targets_LG - coefficients_LG / torch.cholesky_inverse(factor_LL).diagonal()[:, None]
    named = (others_LG.argmax(1) == groups)[sizes_G[groups] > 1].float().mean()
    # The lowest of the regression's quadratic form: the sums of groups that the kernel says most of. Exact, since a
    # search by random vectors among so many that are nearly equal would find chance ones.
    _, axes_GG = torch.linalg.eigh(targets_LG.T @ coefficients_LG)
    coefficients_LC = coefficients_LG @ axes_GG[:, :channels]
    # The last row is that of what is no k-mer.
    table = functional.pad(_turned(axes_FD.T, turn_RR.T).T, (0, 0, 0, 1))
    return Fitted(table, RelativesHead(mean_F @ axes_FD, learnt_LD, coefficients_LC), float(named))


def _turn() -> Tensor:
    """(R, R) whose rows' inner products are the softness of a residue for another, 1 for itself."""
    by = scoring("BLOSUM62")
    rows_R = by.codes[[ord(VOCABULARY[residue]) for residue in STANDARD_RESIDUES]]
    soft_RR = np.exp(_SOFTNESS * by.scores[np.ix_(rows_R, rows_R)])
    soft_RR /= np.sqrt(np.outer(soft_RR.diagonal(), soft_RR.diagonal()))
    values_R, vectors_RR = np.linalg.eigh(soft_RR)
    return torch.from_numpy(vectors_RR * np.sqrt(values_R.clip(0))).float()


def _counts(sequence: NDArray[np.uint8]) -> Tensor:
    """(F,) of a sequence, by residue."""
    tokens_T = torch.from_numpy(RESIDUE_TABLE[sequence])
    codes = codes_of(tokens_T, torch.zeros(len(tokens_T), dtype=torch.int64)).flatten()
    return torch.bincount(codes, minlength=len(PATTERNS) * KMERS + 1)[:-1] / len(tokens_T)


def _turned(rows_nF: Tensor, turn_RR: Tensor) -> Tensor:
    """Each of the three residues' axes of (..., F) by a matrix."""
    of_residues = rows_nF.unflatten(-1, (len(PATTERNS), RESIDUES, RESIDUES, RESIDUES))
    return torch.einsum("...pabc,ax,by,cz->...pxyz", of_residues, turn_RR, turn_RR, turn_RR).flatten(-4)
