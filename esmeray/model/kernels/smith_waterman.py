"""Smith-Waterman scores of a query with many sequences, with affine gaps, in integers: exact on any device.

Sequences are sorted by length and padded in groups of ``LANES``, whose scores are computed in parallel: by a Triton
kernel on CUDA (:mod:`esmeray.model.kernels.smith_waterman_triton`), otherwise along anti-diagonals in torch, for tests.
On a CPU, parasail is faster (:mod:`esmeray.alignment.search`).

Shape legend: N sequences, P sequences per group, G groups per launch, W residues of a group's longest sequence,
L residues of the query, S letters.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LANES = 32
"""Sequences per group (P): the threads of a warp."""
_BLOCK_RESIDUES = 2**26
"""Padded residues per launch, each with 8 bytes of scratch memory on the device."""
_NEVER = -(2**20)
"""Score of padding, too low for any alignment to include it."""


class Block(NamedTuple):
    """Groups of one launch: uint8 letters, concatenated (W, P) per group; (G,) int64 starts and int32 widths."""

    letters: Tensor
    starts: Tensor
    widths: Tensor


class SmithWaterman:
    """Sequences on a device, and scoring parameters.

    ``sequences``: N arrays of uint8 codes below S. ``matrix``: (S, S) scores. ``first``, ``extend``: integer penalties
    for the first residue of a gap and for each further residue.
    """

    def __init__(
        self, sequences: Iterable[NDArray[np.uint8]], matrix: NDArray, first: int, extend: int, device: str
    ) -> None:
        codes = list(sequences)
        # Sorted by length, because a group is padded to its longest sequence, and its lanes wait for each other.
        self.order = np.argsort(list(map(len, codes)), kind="stable")
        self.residues = sum(map(len, codes))
        self._matrix_SS, self._gaps, self._device = np.asarray(matrix, np.int32), (first, extend), device
        self.blocks: list[Block] = []
        groups: list[NDArray[np.uint8]] = []
        for start in range(0, len(codes), LANES):
            members = [codes[number] for number in self.order[start : start + LANES]]
            # Padding is an additional letter after the letters of the matrix.
            group_WP = np.full((len(members[-1]), LANES), len(matrix), np.uint8)
            for lane, member in enumerate(members):
                group_WP[: len(member), lane] = member
            groups.append(group_WP)
            # Put many groups into a block, because a query needs a launch per block.
            if sum(group.size for group in groups) >= _BLOCK_RESIDUES or start + LANES >= len(codes):
                self.blocks.append(self._block(groups))
                groups = []

    def __call__(self, query: NDArray[np.uint8]) -> NDArray[np.int32]:
        """Return (N,) int32 scores of a query, which has the same codes as the sequences."""
        profile_LS = np.full((len(query), len(self._matrix_SS) + 1), _NEVER, np.int32)
        profile_LS[:, :-1] = self._matrix_SS[query]
        scores = np.zeros(len(self.order), np.int32)
        if len(query) and self.blocks:
            # Read back once, after all launches. The last group may have lanes without a sequence.
            by_length = torch.cat([self._scores(torch.from_numpy(profile_LS), block) for block in self.blocks])
            scores[self.order] = by_length.cpu().numpy()[: len(scores)]
        return scores

    def _block(self, groups: list[NDArray[np.uint8]]) -> Block:
        sizes = np.array([group.size for group in groups], np.int64)
        letters = np.concatenate([group.ravel() for group in groups])
        arrays = (letters, sizes.cumsum() - sizes, (sizes // LANES).astype(np.int32))
        return Block(*(torch.from_numpy(array).to(self._device) for array in arrays))

    def _scores(self, profile_LS: Tensor, block: Block) -> Tensor:
        """Return (G * P,) int32 scores of a block."""
        if block.letters.is_cuda:
            from esmeray.model.kernels.smith_waterman_triton import scores  # CPU builds of torch lack Triton

            return scores(profile_LS, block, LANES, *self._gaps)
        groups = [group.view(-1, LANES) for group in block.letters.split((block.widths * LANES).tolist())]
        return torch.cat([_scores_on_diagonals(profile_LS, group_WP, *self._gaps) for group_WP in groups])


def _scores_on_diagonals(profile_LS: Tensor, letters_WP: Tensor, first: int, extend: int) -> Tensor:
    """Return (P,) int32 scores. Cells of an anti-diagonal depend only on the two diagonals before it (Gotoh 1982)."""
    length, letters = profile_LS.shape
    width, lanes = letters_WP.shape
    # Pad before and after the letters, so that every diagonal has a cell per residue of the query.
    outside = letters_WP.new_full((length, lanes), letters - 1)
    padded = torch.cat([outside, letters_WP, outside]).flip(0).long()
    zeros = torch.zeros(length + 1, lanes, dtype=torch.int32)
    h_before, h_last, e_LP, f_LP = (zeros.clone() for _ in range(4))  # row 0 is before the query
    best_P = zeros[0].clone()
    rows = torch.arange(length)[:, None]
    for diagonal in range(length + width - 1):
        start = len(padded) - length - 1 - diagonal
        substituted_LP = profile_LS[rows, padded[start : start + length]]
        e_LP[1:] = torch.maximum(e_LP[1:] - extend, h_last[1:] - first)
        f_LP[1:] = torch.maximum(f_LP[:-1] - extend, h_last[:-1] - first)
        h_LP = torch.maximum(torch.maximum(h_before[:-1] + substituted_LP, zeros[1:]), torch.maximum(e_LP, f_LP)[1:])
        h_before, h_last = h_last, torch.cat([zeros[:1], h_LP])
        best_P = torch.maximum(best_P, h_LP.amax(0))
    return best_P
