"""Fit a network for homology search to labelled proteins, in closed form.

Counts of gapped k-mers are soft: a k-mer counts for another one with weight exp(0.3 s), and s is their BLOSUM62
score. Transforming each residue axis of the counts makes these weights an inner product. The principal components, each
divided by the fourth root of its variance, are the features of :mod:`esmeray.model.relatives`. The groups
are regressed on these features.

Shape legend: L training proteins, F counts, P patterns, R residues, D channels of features, G groups, C channels of a
vector.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from esmeray.alignment.scoring import scoring
from esmeray.dataset.embeddings.manifest import ranges
from esmeray.dataset.tokens.esm import RESIDUE_TABLE, STANDARD_RESIDUES, VOCABULARY
from esmeray.model.backbones.loading import drawn
from esmeray.model.relatives import KMERS, PATTERNS, RESIDUES, RelativesHead, codes_of, kernel

_SOFTNESS = 0.3
_BLOCK = 256
_PENALTY = 0.01
"""Ridge penalty of the regression. The kernel of a protein with itself is 1."""


def fit(
    sequences: Sequence[NDArray[np.uint8]],
    groups_L: NDArray[np.int64],
    features: int,
    channels: int,
    seed: int,
    status: Callable[[str], None],
) -> tuple[Tensor, RelativesHead, float]:
    """Learn the groups, numbered from 0, of these ASCII sequences. ``features`` and ``channels`` are maximum numbers.

    Return the backbone's table, the head, and the leave-one-out accuracy: the share of proteins with relatives whose
    group is predicted correctly from all other proteins.

    Memory is the larger of about 400,000 L and 12 L² bytes.
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
    # Dropped, because scaling a component that is only rounding error would amplify noise.
    is_kept_D = scales_D > 1e-4 * scales_D[0]
    axes_FD = (axes_FD / scales_D.sqrt())[:, is_kept_D]
    learnt_LD = functional.normalize(counts_LF @ axes_FD, dim=1)
    del counts_LF
    status("regression of the groups")
    sizes_G = torch.from_numpy(np.bincount(groups_L))
    groups = torch.from_numpy(groups_L)
    # Divided by the root of the group's size, so that small groups count.
    targets_LG = functional.one_hot(groups) / sizes_G.sqrt()
    kernel_LL = kernel(learnt_LD, learnt_LD)
    kernel_LL.diagonal().add_(_PENALTY)
    factor_LL = torch.linalg.cholesky(kernel_LL)
    del kernel_LL
    coefficients_LG = torch.cholesky_solve(targets_LG, factor_LL)
    # Leave-one-out predictions (Rasmussen & Williams 2006, equation 5.12).
    others_LG = targets_LG - coefficients_LG / torch.cholesky_inverse(factor_LL).diagonal()[:, None]
    named = (others_LG.argmax(1) == groups)[sizes_G[groups] > 1].float().mean()
    # Combinations of groups with the lowest quadratic form of the regression, which the kernel predicts best. Solved
    # exactly, because a randomized solver finds arbitrary ones among many nearly equal eigenvalues.
    _, axes_GG = torch.linalg.eigh(targets_LG.T @ coefficients_LG)
    coefficients_LC = coefficients_LG @ axes_GG[:, :channels]
    # The last row is for positions without a k-mer.
    table = functional.pad(_turned(axes_FD.T, turn_RR.T).T, (0, 0, 0, 1))
    return table, RelativesHead(mean_F @ axes_FD, learnt_LD, coefficients_LC), float(named)


def _turn() -> Tensor:
    """(R, R) matrix whose rows' inner products are the soft weights between residues; 1 for a residue with itself."""
    by = scoring("BLOSUM62")
    rows_R = by.codes[[ord(VOCABULARY[residue]) for residue in STANDARD_RESIDUES]]
    soft_RR = np.exp(_SOFTNESS * by.scores[np.ix_(rows_R, rows_R)])
    soft_RR /= np.sqrt(np.outer(soft_RR.diagonal(), soft_RR.diagonal()))
    values_R, vectors_RR = np.linalg.eigh(soft_RR)
    return torch.from_numpy(vectors_RR * np.sqrt(values_R.clip(0))).float()


def _counts(sequence: NDArray[np.uint8]) -> Tensor:
    """(F,) k-mer counts of a sequence, divided by its length."""
    tokens_T = torch.from_numpy(RESIDUE_TABLE[sequence])
    codes = codes_of(tokens_T, torch.zeros(len(tokens_T), dtype=torch.int64)).flatten()
    return torch.bincount(codes, minlength=len(PATTERNS) * KMERS + 1)[:-1] / len(tokens_T)


def _turned(rows_nF: Tensor, turn_RR: Tensor) -> Tensor:
    """Apply a matrix to each of the three residue axes of (..., F)."""
    of_residues = rows_nF.unflatten(-1, (len(PATTERNS), RESIDUES, RESIDUES, RESIDUES))
    return torch.einsum("...pabc,ax,by,cz->...pxyz", of_residues, turn_RR, turn_RR, turn_RR).flatten(-4)
