"""Rotary positions (RoFormer, Su et al. 2021, equation 34): tables made once a batch, and the rotation itself.

ESM-2 rotates channels i and i + d/2 of each head of queries and keys by the angle position * frequency_i.

Shape legend: T tokens in the batch, P positions, H heads, d channels of a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class RotaryTables(NamedTuple):
    """Cosines and sines of the angles, for positions from 0; (P, d/2) fp32, contiguous."""

    cosines: Tensor
    sines: Tensor


def rotary_tables(frequencies: Tensor, num_positions: int) -> RotaryTables:
    """Tables for the first P positions. ``frequencies``: (d/2,) fp32, radians a position."""
    positions_P = torch.arange(num_positions, device=frequencies.device, dtype=torch.float32)
    angles = torch.outer(positions_P, frequencies.float())
    return RotaryTables(angles.cos(), angles.sin())


def rotate(x_THd: Tensor, cosines_T1d: Tensor, sines_T1d: Tensor) -> Tensor:
    """Rotate every head in fp32, by the rows (T, 1, d/2) of the tables at each token's position; in its own dtype."""
    first, second = x_THd.float().chunk(2, dim=-1)
    rotated = (first * cosines_T1d - second * sines_T1d, second * cosines_T1d + first * sines_T1d)
    return torch.cat(rotated, dim=-1).to(x_THd.dtype)
