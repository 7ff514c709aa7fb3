"""Embedded sample of structures: idealized folds, with sequences drawn from fold-dependent statistics.

A chain is a series of helices and strands with loops in between. It is built atom by atom from ideal bonds, angles and
torsion angles (Parsons et al. 2005, NeRF). Of several draws of the loops, the most compact one without a clash is kept.

Each residue depends only on its state (helix, strand or loop, buried or not). The best possible model is therefore
known: the most frequent residue of each state.

Shape legend: L residues, B draws of the loops.
"""

from functools import cache
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.store.sample import BACKGROUND
from esmeray.dataset.structures.store import Structure

GENERATOR_VERSION = 1
HELIX, STRAND, LOOP = range(3)
_TORSIONS = {HELIX: (-57.0, -47.0), STRAND: (-119.0, 113.0)}
_LOOP_TORSIONS = np.array([(-65, 140), (-65, -40), (-90, 0), (60, 40), (-120, 130), (-75, 160)], dtype=float)
_SPREAD = {HELIX: 3.0, STRAND: 8.0, LOOP: 20.0}
"""Standard deviation of torsion angles, in degrees."""
_DRAWS = 24
_SHORTEST, _LONGEST = 30, 120
_CLASH, _CONTACT, _CONTACTS_BURIED = 4.0, 10.0, 14
"""CA-CA distances in Å of a clash and of a contact, and the number of contacts at which a residue counts as buried."""

# Bond lengths in Å and angles in degrees from Engh and Huber 1991.
_N_CA, _CA_C, _C_N, C_O = 1.458, 1.525, 1.329, 1.231
_N_CA_C, _CA_C_N, _C_N_CA, CA_C_O = 111.0, 117.2, 121.7, 120.1

_FAVOURED = {
    (HELIX, True): "LAIMVF",
    (HELIX, False): "EKQRDA",
    (STRAND, True): "VIFYCW",
    (STRAND, False): "TKRSYQ",
    (LOOP, True): "PCWHGL",
    (LOOP, False): "GDNSPK",
}
_FAVOURED_SHARES = (0.5, 0.17, 0.1, 0.06, 0.05, 0.04)
"""Probabilities of a state's favoured residues, in their order. The rest is distributed as in nature."""


def sample_structure(number: int, seed: int = 0) -> Structure:
    """Return the structure of this number; the same seed gives the same structures."""
    random = np.random.Generator(np.random.PCG64([seed, number]))
    elements_L = _elements(random)
    coordinates, contacts_L = _best(_built(*_torsions(elements_L, random)))
    states_L = 2 * elements_L + (contacts_L >= _CONTACTS_BURIED)
    cumulative = np.cumsum(_distributions(), axis=1)[states_L]
    # Drawn by the state alone, so that the best possible model is known.
    drawn_L = (cumulative < random.random(len(states_L))[:, None] * cumulative[:, -1:]).sum(axis=1)
    residues = "".join(AMINO_ACIDS[index] for index in drawn_L.tolist())
    length = len(residues)
    # The coordinates are exact, so confidence is full.
    return Structure(
        id=f"fold{number:04d}",
        residues=residues,
        coordinates=coordinates.astype(np.float32),
        confidence=np.full(length, 100, np.float16),
        chains=np.zeros(length, np.int8),
        chain_names=("A",),
    )


def _elements(random: np.random.Generator) -> NDArray[np.int64]:
    """Return (L,) secondary structure: elements of one or both kinds, alternating with loops."""
    length = int(random.integers(_SHORTEST, _LONGEST + 1))
    kinds = cycle([(HELIX,), (STRAND,), (HELIX, STRAND)][int(random.integers(3))])
    parts: list[int] = [LOOP] * int(random.integers(1, 4))
    while len(parts) < length:
        kind = next(kinds)
        parts += [kind] * int(random.integers(8, 19) if kind == HELIX else random.integers(4, 9))
        parts += [LOOP] * int(random.integers(2, 6))
    return np.array(parts[:length])


def _torsions(elements_L: NDArray[np.int64], random: np.random.Generator) -> tuple[NDArray, NDArray]:
    """Return (B, L) phi and psi in radians; the draws differ only in the loops."""
    B, L = _DRAWS, len(elements_L)
    ideal = np.zeros((B, L, 2))
    for kind, pair in _TORSIONS.items():
        ideal[:, elements_L == kind] = pair
    # Drawn for all residues, so that the random stream does not depend on the elements.
    loops = _LOOP_TORSIONS[random.integers(len(_LOOP_TORSIONS), size=(B, L))]
    ideal[:, elements_L == LOOP] = loops[:, elements_L == LOOP]
    spread_L = np.array([_SPREAD[kind] for kind in (HELIX, STRAND, LOOP)])[elements_L]
    angles = np.radians(ideal + spread_L[:, None] * random.standard_normal((B, L, 2)))
    return angles[..., 0], angles[..., 1]


def _built(phi_BL: NDArray, psi_BL: NDArray) -> NDArray[np.float64]:
    """Return (B, L, 4, 3) N, CA, C and O of chains with these torsion angles; peptide bonds are trans."""
    B, L = phi_BL.shape
    atoms = np.zeros((B, L, 4, 3))
    atoms[:, 0, 1, 0] = _N_CA
    atoms[:, 0, 2] = [_N_CA - _CA_C * np.cos(np.radians(_N_CA_C)), _CA_C * np.sin(np.radians(_N_CA_C)), 0]
    trans = np.full(B, np.pi)
    # Residue by residue, because each is built on the previous one; all draws in parallel.
    for residue in range(L):
        n, ca, c = (atoms[:, residue, atom] for atom in range(3))
        # O is in the plane of the peptide bond, opposite to the next N.
        atoms[:, residue, 3] = bonded_atom(n, ca, c, C_O, CA_C_O, psi_BL[:, residue] + np.pi)
        if residue + 1 < L:
            following = atoms[:, residue + 1]
            following[:, 0] = bonded_atom(n, ca, c, _C_N, _CA_C_N, psi_BL[:, residue])
            following[:, 1] = bonded_atom(ca, c, following[:, 0], _N_CA, _C_N_CA, trans)
            following[:, 2] = bonded_atom(c, following[:, 0], following[:, 1], _CA_C, _N_CA_C, phi_BL[:, residue + 1])
    return atoms


def bonded_atom(a: NDArray, b: NDArray, c: NDArray, bond: float, degrees: float, torsion: NDArray) -> NDArray:
    """Return (B, 3) the atom bonded to ``c``, at this angle to b-c and this torsion angle (radians) of a-b-c."""
    angle = np.radians(degrees)
    x = (c - b) / np.linalg.norm(c - b, axis=-1, keepdims=True)
    z = np.cross(b - a, x)
    z /= np.linalg.norm(z, axis=-1, keepdims=True)
    y = np.cross(z, x)
    side = np.sin(angle) * (np.cos(torsion)[..., None] * y + np.sin(torsion)[..., None] * z)
    return c + bond * (side - np.cos(angle) * x)


def torsion(a: NDArray, b: NDArray, c: NDArray, d: NDArray) -> NDArray:
    """Return (...) the torsion angle of four atoms in radians, -pi to pi."""
    axis = (c - b) / np.linalg.norm(c - b, axis=-1, keepdims=True)
    left, right = np.cross(a - b, axis), np.cross(d - c, axis)
    return np.arctan2((np.cross(left, right) * axis).sum(-1), (left * right).sum(-1))


def _best(atoms_B: NDArray) -> tuple[NDArray, NDArray]:
    """Return the draw with the fewest clashes, then the smallest radius: (L, 4, 3) atoms and (L,) contacts."""
    ca = atoms_B[:, :, 1]
    apart = np.linalg.norm(ca[:, :, None] - ca[:, None], axis=-1)
    positions = np.arange(ca.shape[1])
    # Skip neighbours in the chain, which are always close.
    far = np.abs(positions[:, None] - positions) > 2
    clashes_B = ((apart < _CLASH) & far).sum((1, 2))
    radius_B = np.square(ca - ca.mean(1, keepdims=True)).sum((1, 2))
    chosen = np.lexsort((radius_B, clashes_B))[0]
    return atoms_B[chosen], (apart[chosen] < _CONTACT).sum(1) - 1


@cache
def _distributions() -> NDArray[np.float64]:
    """Return (6, 20) probability of each residue in each state."""
    rows = np.empty((6, len(AMINO_ACIDS)))
    for (element, buried), letters in _FAVOURED.items():
        row = (1 - sum(_FAVOURED_SHARES)) * BACKGROUND
        for letter, share in zip(letters, _FAVOURED_SHARES, strict=True):
            row[AMINO_ACIDS.index(letter)] += share
        rows[2 * element + buried] = row
    return rows
