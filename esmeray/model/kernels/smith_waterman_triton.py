"""Smith-Waterman scores in Triton: a program for each group, a lane for each of its sequences.

A program goes through the query in strips of ``ROWS`` residues, and with each through all columns of the group. The
strip's last column is in registers; its last row, h and f of each cell, goes to scratch in global memory for the next
strip, which is 16 bytes of traffic for ``ROWS`` cells. Scores are int32, so that none overflows. Compiled for sm_80 and
sm_90 it takes 68 registers and spills none; it has run under Triton's interpreter only, on no GPU.
"""

# mypy: disable-error-code="assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16


def scores(profile_LS: Tensor, block: tuple[Tensor, Tensor, Tensor], lanes: int, first: int, extend: int) -> Tensor:
    """(G * P,) int32 scores of a :class:`~esmeray.model.kernels.smith_waterman.Block`, P being ``lanes``.

    ``profile_LS``: (L, S) int32 scores of each residue of the query.
    """
    letters, starts, _ = block
    # Whole strips: rows of padding score as padding does everywhere, so that no alignment enters them.
    rows = -(-len(profile_LS) // ROWS) * ROWS
    padding = (0, 0, 0, rows - len(profile_LS))
    profile = torch.nn.functional.pad(profile_LS, padding, value=int(profile_LS[0, -1])).to(letters.device)
    h, f = (torch.empty_like(letters, dtype=torch.int32) for _ in range(2))
    best = torch.empty(len(starts) * lanes, dtype=torch.int32, device=letters.device)
    # One warp a program: its 32 lanes are the sequences of a group, and never wait for another warp.
    settings = {"ROWS": ROWS, "LANES": lanes, "LETTERS": profile.shape[1], "num_warps": 1}
    _kernel[(len(starts),)](profile, *block, h, f, best, rows, first, extend, **settings)
    return best


@triton.jit
def _kernel(
    profile,
    letters,
    starts,
    widths,
    h_scratch,
    f_scratch,
    best_out,
    rows,
    first,
    extend,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    LETTERS: tl.constexpr,
):
    group = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    begin = tl.load(starts + group)
    width = tl.load(widths + group)
    zero = tl.zeros([LANES], tl.int32)
    best = zero
    for row in range(0, rows, ROWS):
        h = ()
        e = ()
        for _ in tl.static_range(ROWS):
            h = h + (zero,)  # noqa: RUF005 - Triton unpacks no tuples
            e = e + (zero,)  # noqa: RUF005
        corner = zero
        for column in range(width):
            cell = begin + column * LANES + lanes
            letter = tl.load(letters + cell).to(tl.int32)
            up = zero
            f = zero
            if row > 0:  # above the first strip there is nothing, and scratch is not even written
                up = tl.load(h_scratch + cell)
                f = tl.load(f_scratch + cell)
            diagonal = corner
            corner = up  # before the strip below overwrites it: the next column's diagonal
            h_new = ()
            e_new = ()
            for r in tl.static_range(ROWS):
                gap = tl.maximum(e[r] - extend, h[r] - first)
                f = tl.maximum(f - extend, up - first)
                substituted = diagonal + tl.load(profile + (row + r) * LETTERS + letter)
                up = tl.maximum(tl.maximum(substituted, 0), tl.maximum(gap, f))
                best = tl.maximum(best, up)
                diagonal = h[r]
                h_new = h_new + (up,)  # noqa: RUF005
                e_new = e_new + (gap,)  # noqa: RUF005
            h = h_new
            e = e_new
            tl.store(h_scratch + cell, up)
            tl.store(f_scratch + cell, f)
    tl.store(best_out + group * LANES + lanes, best)
