"""Embedded sample: synthetic protein families that a model can learn from, generated from a seed in a second.

Each family has an ancestor with UniProt's residue frequencies and a length from the log-normal distribution of
UniRef90. The ancestor has local structure: helices and strands, whose hydrophobic side returns every 3.6 or 2 residues,
between loops. Members differ from the ancestor in two ways:

- substitutions, mostly within groups of similar residues, at positions with rates of their own,
- short insertions and deletions.

Only uniform random numbers are drawn from NumPy, and transformed here. NumPy guarantees the stream of a bit generator,
but not of its distributions, and a seed must always give the same sample.

Shape legend: L residues of a sequence; residues are indices into :data:`~esmeray.dataset.fasta.alphabet.AMINO_ACIDS`.
"""

import math
from collections.abc import Iterator
from statistics import NormalDist

import numpy as np

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS

GENERATOR_VERSION = 2
"""Increased if any seed gives other records, so that old stores of the sample are made again."""

MEDIAN_LENGTH = 278
LENGTH_SIGMA = 0.61
"""Sigma of the log-normal: UniRef90's mean of 335 and median of 278 give sqrt(2 ln(335 / 278))."""

MIN_LENGTH = 30
MAX_LENGTH = 1000

# UniProtKB/Swiss-Prot release statistics, percent, in the order of AMINO_ACIDS.
_PERCENT = "8.25 1.38 5.46 6.72 3.86 7.07 2.27 5.91 5.80 9.65 2.41 4.06 4.74 3.93 5.53 6.65 5.36 6.86 1.10 2.92"
BACKGROUND = np.array([float(percent) for percent in _PERCENT.split()])
BACKGROUND /= BACKGROUND.sum()

# Hydropathy of Kyte and Doolittle 1982, table 2, scaled to about -1 to 1.
_KYTE_DOOLITTLE = "1.8 2.5 -3.5 -3.5 2.8 -0.4 -3.2 4.5 -3.9 3.8 1.9 -3.5 -1.6 -3.5 -4.5 -0.8 -0.7 4.2 -0.9 -1.3"
_HYDROPATHY = np.array([float(value) for value in _KYTE_DOOLITTLE.split()]) / 4.5

_LIKE_GROUPS = ("ILVM", "FYW", "KRH", "DENQ", "STA", "GP", "C")
"""Groups of residues that BLOSUM62 (Henikoff and Henikoff 1992) exchanges more often than chance."""

_HELIX_FORMERS, _STRAND_FORMERS, _LOOP_FORMERS = "AELMQKRH", "VIYCWFT", "GNPDS"
_PROPENSITY = 1.6
_AMPHIPATHICITY = 1.2
_SEGMENTS = (  # (period in residues, mean length in residues, favoured residues); a period of 0 means no period
    (3.6, 12, _HELIX_FORMERS),
    (0.0, 6, _LOOP_FORMERS),
    (2.0, 6, _STRAND_FORMERS),
    (0.0, 6, _LOOP_FORMERS),
)

_MIN_DIVERGENCE, _MAX_DIVERGENCE = 0.05, 0.5
_INDELS_PER_RESIDUE = 0.006
_MEAN_INDEL_LENGTH = 3.0


def sample_records(records: int, families: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield ids like ``family012_0034`` and sequences, family by family; families have equal sizes, give or take 1."""
    width = max(3, len(str(families - 1)))
    for family in range(families):
        members = records // families + (family < records % families)
        # A generator per family, so that a family does not depend on the others.
        random = np.random.Generator(np.random.PCG64([seed, family]))
        ancestor_L = _ancestor(random)
        # Substitution rates, mean about 1: most positions evolve slowly, a few fast.
        rates_L = -np.log(1 - random.random(len(ancestor_L)))
        for member in range(members):
            residues_L = _descend(ancestor_L, rates_L, random)
            yield f"family{family:0{width}d}_{member:04d}", _LETTERS[residues_L].tobytes().decode("ascii")


def _ancestor(random: np.random.Generator) -> np.ndarray:
    """Return (L,) residues that begin with methionine."""
    # The inverse CDF is undefined at 0, which a uniform number may be, and at 1.
    probability = min(max(random.random(), 1e-12), 1 - 1e-12)
    length = round(MEDIAN_LENGTH * math.exp(LENGTH_SIGMA * NormalDist().inv_cdf(probability)))
    length = min(max(length, MIN_LENGTH), MAX_LENGTH)
    weights = np.concatenate(list(_segment_weights(length, random)))[:length]
    residues_L = _draw(np.cumsum(weights, axis=1), random)
    residues_L[0] = AMINO_ACIDS.index("M")  # the start codon, as in nearly every protein
    return residues_L


def _segment_weights(length: int, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield (segment, 20) weights of the residues, segment by segment, until ``length`` is covered."""
    kind = int(random.random() * len(_SEGMENTS))
    covered = 0
    while covered < length:
        # In a fixed order, so that a loop always separates helices and strands.
        period, mean_length, favoured = _SEGMENTS[kind % len(_SEGMENTS)]
        segment = 3 + round(-(mean_length - 3) * math.log(1 - random.random()))
        phase = 2 * math.pi * random.random()
        moment = np.cos(2 * math.pi * np.arange(segment) / period + phase) if period else np.zeros(segment)
        weights = BACKGROUND * np.where(_is_one_of(favoured), _PROPENSITY, 1.0)
        yield weights * np.exp(_AMPHIPATHICITY * moment[:, None] * _HYDROPATHY)
        covered += segment
        kind += 1


def _descend(ancestor_L: np.ndarray, rates_L: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return one member of the family: the ancestor with substitutions, deletions and insertions after position 1."""
    divergence = _MIN_DIVERGENCE + (_MAX_DIVERGENCE - _MIN_DIVERGENCE) * random.random()
    # Probability of at least one change if changes are a Poisson process: several at one position show as one.
    chance_L = 1 - np.exp(-divergence * rates_L)
    changed_L = random.random(len(ancestor_L)) < chance_L
    changed_L[0] = False
    residues_L = ancestor_L.copy()
    residues_L[changed_L] = _draw(_SUBSTITUTIONS[ancestor_L[changed_L]], random)
    return _with_indels(residues_L, divergence, random)


def _with_indels(residues_L: np.ndarray, divergence: float, random: np.random.Generator) -> np.ndarray:
    # Proportional to the substitutions: a distant relative has more of both.
    events = int(np.sum(random.random(len(residues_L)) < _INDELS_PER_RESIDUE * divergence / _MAX_DIVERGENCE))
    for _ in range(events):
        length = 1 + int(-_MEAN_INDEL_LENGTH * math.log(1 - random.random()))
        at = 1 + int(random.random() * (len(residues_L) - 1))  # never before the first residue
        if random.random() < 0.5:
            inserted = _draw(np.tile(np.cumsum(BACKGROUND), (length, 1)), random)
            residues_L = np.concatenate([residues_L[:at], inserted, residues_L[at:]])[:MAX_LENGTH]
        elif len(residues_L) - length >= MIN_LENGTH:
            residues_L = np.delete(residues_L, slice(at, at + length))
    return residues_L


def _draw(cumulative: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return (L,) residues, each drawn from its row of (L, 20) cumulative weights, which need not end at 1."""
    threshold = random.random(len(cumulative))[:, None] * cumulative[:, -1:]
    # The product may round up to the last sum, which would give the index after the last residue.
    return np.minimum((cumulative <= threshold).sum(axis=1), len(AMINO_ACIDS) - 1)


def _is_one_of(letters: str) -> np.ndarray:
    return np.array([letter in letters for letter in AMINO_ACIDS])


def _substitutions() -> np.ndarray:
    """Return (20, 20) cumulative weights of the replacement of each residue; similar residues have eightfold weight."""
    like = np.ones((len(AMINO_ACIDS), len(AMINO_ACIDS)))
    for group in _LIKE_GROUPS:
        member = _is_one_of(group)
        like[np.ix_(member, member)] = 8.0
    weights = BACKGROUND * like
    np.fill_diagonal(weights, 0.0)
    return np.cumsum(weights, axis=1)


_SUBSTITUTIONS = _substitutions()
_LETTERS = np.frombuffer(AMINO_ACIDS.encode("ascii"), dtype=np.uint8)
