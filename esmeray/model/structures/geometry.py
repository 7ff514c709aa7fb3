"""Geometry of backbone atoms: nearest neighbours, and features that rotation and translation do not change.

Coordinates are the atoms N, CA, C and O of packed residues, NaN if unknown. The features are

- as in ProteinMPNN (Dauparas et al. 2022): distances between all pairs of five atoms in radial basis functions, and
  offsets along the chain;
- as in Ingraham et al. 2019: direction and orientation of the neighbour in the residue's frame, and torsion angles.

Shape legend: T tokens in the batch (special tokens have no coordinates), k neighbours per residue, A = 4 atoms.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from esmeray.dataset.packed_batch import PackedBatch

RADII = torch.linspace(2.0, 22.0, 16)
"""Centres of the radial basis functions in Å; their width is the distance between two centres."""
MAX_OFFSET = 32
"""Maximum offset along the chain in residues; larger offsets are clamped."""
PAIR_FEATURES = 25 * len(RADII) + (2 * MAX_OFFSET + 2) + 12
RESIDUE_FEATURES = 6
_CA = 1
_MAX_BOND = 2.5
"""Maximum distance in Å between C and the next residue's N; the chain is broken if it is larger."""
_AT_ONCE = 1 << 22
"""Maximum number of pairs whose distances are in memory at the same time."""


class Neighbours(NamedTuple):
    """Nearest residues of each residue, including itself: (T, k) int64 indices of tokens, and (T, k) bool ``known``.

    If a sequence has fewer than k residues with coordinates, the rest is not known.
    """

    indices: Tensor
    known: Tensor


def known_residues(coordinates_TA3: Tensor) -> Tensor:
    """Return (T,) bool, true for residues with all four atoms."""
    return coordinates_TA3.isfinite().all(-1).all(-1)


def nearest(ca_T3: Tensor, known_T: Tensor, batch: PackedBatch, k: int) -> Neighbours:
    """Find the k residues of the same record with the nearest CA, by exact distances, without padding to a square."""
    bounds = batch.cu_seqlens.long()
    segments_T = batch.segment_ids()
    starts_T, ends_T = bounds[:-1][segments_T], bounds[1:][segments_T]
    # Each row has a window from the start of its record, as long as the longest record.
    window = torch.arange(batch.max_seqlen, device=ca_T3.device)
    k = min(k, batch.max_seqlen)
    blocks = []
    for rows in torch.arange(batch.num_tokens, device=ca_T3.device).split(max(1, _AT_ONCE // batch.max_seqlen)):
        others = starts_T[rows, None] + window
        inside = others < ends_T[rows, None]
        # Keep indices within the batch; positions beyond the record are masked below.
        others = others.clamp(max=batch.num_tokens - 1)
        distances = (ca_T3[others] - ca_T3[rows, None]).square().sum(-1)
        distances = distances.masked_fill(~(inside & known_T[others] & known_T[rows, None]), torch.inf)
        nearest = distances.topk(k, largest=False)
        blocks.append((others.gather(1, nearest.indices), nearest.values.isfinite()))
    indices, known = (torch.cat(columns) for columns in zip(*blocks, strict=True))
    return Neighbours(indices, known)


def pair_features(atoms_TA3: Tensor, neighbours: Neighbours, chains_T: Tensor) -> Tensor:
    """Return (T, k, PAIR_FEATURES) fp32. ``atoms_TA3`` must not have NaN."""
    indices = neighbours.indices
    five_T53 = torch.cat([atoms_TA3, virtual_cb(atoms_TA3)[:, None]], dim=1)
    apart = (five_T53[:, None, :, None] - five_T53[indices][:, :, None]).square().sum(-1)
    distances = (apart.flatten(2) + 1e-6).sqrt()  # the root has no derivative at 0, an atom's distance to itself
    radii = RADII.to(distances)
    radial = (-((distances[..., None] - radii) / (radii[1] - radii[0])).square()).exp().flatten(2)
    offsets = indices - torch.arange(len(indices), device=indices.device)[:, None]
    offsets = offsets.clamp(-MAX_OFFSET, MAX_OFFSET) + MAX_OFFSET
    other_chain = chains_T[indices] != chains_T[:, None]  # offsets between chains mean nothing and get their own class
    along = functional.one_hot(offsets.masked_fill(other_chain, 2 * MAX_OFFSET + 1), 2 * MAX_OFFSET + 2)
    frames_T33 = _frames(atoms_TA3)
    ca_T3 = atoms_TA3[:, _CA]
    to_local = frames_T33.transpose(1, 2)[:, None]
    direction = (to_local @ functional.normalize(ca_T3[indices] - ca_T3[:, None], dim=-1)[..., None])[..., 0]
    orientation = (to_local @ frames_T33[indices]).flatten(2)
    return torch.cat([radial, along.to(radial.dtype), direction, orientation], dim=-1)


def residue_features(atoms_TA3: Tensor, known_T: Tensor, chains_T: Tensor, batch: PackedBatch) -> Tensor:
    """Return (T, RESIDUE_FEATURES) fp32: sine and cosine of phi, psi and omega, 0 at breaks and ends of a chain."""
    n, ca, c = atoms_TA3[:, 0], atoms_TA3[:, 1], atoms_TA3[:, 2]
    segments_T = batch.segment_ids()
    bonded = known_T[1:] & known_T[:-1] & (segments_T[1:] == segments_T[:-1]) & (chains_T[1:] == chains_T[:-1])
    # Check the distance as well, because residues that are missing in the file leave no gap in the batch.
    bonded &= (n[1:] - c[:-1]).square().sum(-1) < _MAX_BOND**2
    phi = _torsion(c[:-1], n[1:], ca[1:], c[1:])
    psi = _torsion(n[:-1], ca[:-1], c[:-1], n[1:])
    omega = _torsion(ca[:-1], c[:-1], n[1:], ca[1:])
    first, last = (1, 0), (0, 1)  # phi and omega belong to the second residue of a bond, psi to the first
    # Sine and cosine, because an angle would jump at 180 degrees, near which strands are.
    columns = [
        functional.pad(torch.where(bonded, value, 0.0), side)
        for angle, side in ((phi, first), (psi, last), (omega, first))
        for value in (angle.sin(), angle.cos())
    ]
    return torch.stack(columns, dim=-1)


def virtual_cb(atoms_TA3: Tensor) -> Tensor:
    """Return (T, 3) positions of CB in ideal residues (ProteinMPNN's constants)."""
    b, c = atoms_TA3[:, 1] - atoms_TA3[:, 0], atoms_TA3[:, 2] - atoms_TA3[:, 1]
    a = torch.linalg.cross(b, c)
    return -0.58273431 * a + 0.56802827 * b - 0.54067466 * c + atoms_TA3[:, 1]


def _frames(atoms_TA3: Tensor) -> Tensor:
    """Return (T, 3, 3) frames of residues, basis vectors as columns, by Gram-Schmidt (Jumper et al. 2021, alg. 21)."""
    x = functional.normalize(atoms_TA3[:, 2] - atoms_TA3[:, 1], dim=-1)
    to_n = atoms_TA3[:, 0] - atoms_TA3[:, 1]
    y = functional.normalize(to_n - (x * to_n).sum(-1, keepdim=True) * x, dim=-1)
    return torch.stack([x, y, torch.linalg.cross(x, y)], dim=-1)


def _torsion(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Return (...) torsion angles in radians about the bond from b to c."""
    axis = functional.normalize(c - b, dim=-1)
    left, right = torch.linalg.cross(a - b, axis), torch.linalg.cross(d - c, axis)
    return torch.atan2((torch.linalg.cross(left, right) * axis).sum(-1), (left * right).sum(-1))
