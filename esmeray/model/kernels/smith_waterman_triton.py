"""Smith-Waterman scores in Triton, with one program per group and one lane per sequence.

A program processes the query in strips of ``ROWS`` residues, and each strip over all columns of the group. The strip's
last column is in registers. Its last row, h and f per cell, is stored in global memory for the next strip: 16 bytes of
traffic per ``ROWS`` cells. Scores are int32, so that none overflows. Compiled for sm_80 and sm_90, the kernel takes 68
registers without spilling. It has only run in Triton's interpreter, not on a GPU.
"""

# mypy: disable-error-code="assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16


def scores(profile_LS: Tensor, block: tuple[Tensor, Tensor, Tensor], lanes: int, first: int, extend: int) -> Tensor:
    """Return (G * P,) int32 scores of a :class:`~esmeray.model.kernels.smith_waterman.Block`; P is ``lanes``.

    ``profile_LS``: (L, S) int32 scores of the query's residues with each letter.
    """
    letters, starts, _ = block
    # Pad to whole strips. Padded rows have the score of padding, so that no alignment includes them.
    rows = -(-len(profile_LS) // ROWS) * ROWS
    padding = (0, 0, 0, rows - len(profile_LS))
    profile = torch.nn.functional.pad(profile_LS, padding, value=int(profile_LS[0, -1])).to(letters.device)
    h, f = (torch.empty_like(letters, dtype=torch.int32) for _ in range(2))
    best = torch.empty(len(starts) * lanes, dtype=torch.int32, device=letters.device)
    # One warp per program: its 32 lanes are the sequences of a group, and don't wait for other warps.
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
            if row > 0:  # the first strip has no row above, and scratch memory is not initialized
                up = tl.load(h_scratch + cell)
                f = tl.load(f_scratch + cell)
            diagonal = corner
            corner = up  # the next column's diagonal, saved before this strip overwrites scratch memory
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
