"""Alignment scoring: matrices, gap penalties, bit scores and E-values.

Matrices are parasail's by name, or read from a file in NCBI's format. Gap penalties follow BLAST: a gap of n residues
costs ``gap_open + n * gap_extend``. Letters that the matrix lacks are replaced: U by C, all others by X. Bit scores and
E-values are computed as in blastp without composition-based statistics, for the matrices and penalties that BLAST has
constants for.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import parasail
from numpy.typing import NDArray
from scipy.special import ndtr

from esmeray.common.errors import ConfigError, DataError, did_you_mean, parsing
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS, STORE_ALPHABET

_LETTERS = "ARNDCQEGHILKMFPSTWYVBZX"  # parasail's matrices end with *, which no stored protein has
_CONSTANTS = {
    "BLOSUM45": """0.9113 9.61106; 14 2 0.195 0.032 1.9 60.7362 61.1023; 13 3 0.207 0.049 1.5 35.8559 35.9639;
12 3 0.199 0.039 1.8 45.6936 45.8517; 11 3 0.19 0.031 2 62.8741 63.1037; 10 3 0.179 0.023 2.4 88.2868 88.6391;
16 2 0.21 0.051 1.5 36.2798 36.4524; 15 2 0.203 0.041 1.7 44.8257 45.0604; 13 2 0.185 0.024 2.2 85.1481 85.6894;
12 2 0.171 0.016 2.8 127.758 128.582; 19 1 0.205 0.04 1.9 53.0714 53.8282; 18 1 0.198 0.032 2 72.3424 73.4039;
17 1 0.189 0.024 2.4 103.055 104.721; 16 1 0.176 0.016 2.8 170.1 173.003""",
    "BLOSUM50": """0.6895 5.38831; 13 2 0.193 0.035 1.6 42.0595 42.4716; 13 3 0.212 0.063 1.1 18.1138 18.2028;
12 3 0.206 0.055 1.2 22.6546 22.7777; 11 3 0.197 0.042 1.4 29.8611 30.0457; 10 3 0.186 0.031 1.7 42.3938 42.674;
9 3 0.172 0.022 2.1 66.0696 66.5164; 16 2 0.215 0.066 1.05 17.9518 18.0921; 15 2 0.21 0.058 1.2 21.9401 22.1418;
14 2 0.202 0.045 1.4 28.6812 28.9619; 12 2 0.181 0.025 1.9 63.7476 64.3973; 19 1 0.212 0.057 1.2 26.3112 26.9233;
18 1 0.207 0.05 1.4 34.9037 35.7348; 17 1 0.198 0.037 1.6 48.8958 50.1486; 16 1 0.186 0.025 1.9 76.4691 78.443;
15 1 0.171 0.015 2.7 140.053 144.16""",
    "BLOSUM62": """0.7916 4.96466; 11 1 0.267 0.041 1.9 42.6028 43.6362; 11 2 0.297 0.082 1.1 12.6738 12.7576;
10 2 0.291 0.075 1.3 16.474 16.6026; 9 2 0.279 0.058 1.5 22.7519 22.95; 8 2 0.264 0.045 1.8 35.4838 35.8213;
7 2 0.239 0.027 2.5 61.2383 61.886; 6 2 0.201 0.012 3.3 140.417 141.882; 13 1 0.292 0.071 1.2 19.5063 19.8931;
12 1 0.283 0.059 1.5 27.8562 28.4699; 10 1 0.243 0.024 2.5 83.1787 85.0656; 9 1 0.206 0.01 4 210.333 214.842""",
    "BLOSUM80": """0.5222 1.91813; 10 1 0.299 0.071 1.1 13.8338 14.5334; 25 2 0.342 0.17 0.52 1.731 1.7313;
13 2 0.336 0.15 0.59 2.67347 2.6923; 9 2 0.319 0.11 0.76 5.57609 5.66786; 8 2 0.308 0.09 0.89 7.53695 7.68623;
7 2 0.293 0.07 1.1 11.5866 11.8404; 6 2 0.268 0.045 1.4 19.9581 20.4412; 11 1 0.314 0.095 0.9 8.80861 9.22332;
9 1 0.279 0.048 1.4 24.252 25.4904""",
    "PAM250": """0.98 11.7543; 14 2 0.182 0.024 2.5 96.3151 96.7568; 15 3 0.205 0.049 1.6 34.5784 34.928;
14 3 0.2 0.043 1.7 43.353 43.4438; 13 3 0.194 0.036 1.9 50.9485 51.0817; 12 3 0.186 0.029 2.2 69.6065 69.7936;
11 3 0.174 0.02 2.5 98.6535 98.9271; 17 2 0.204 0.047 1.7 41.5838 41.7358; 16 2 0.198 0.038 1.8 51.6352 51.8439;
15 2 0.191 0.031 2.2 67.2567 67.5585; 13 2 0.171 0.017 2.9 135.653 136.339; 21 1 0.205 0.045 1.8 48.7282 49.2188;
20 1 0.199 0.037 1.9 60.832 61.5141; 19 1 0.192 0.029 2.3 84.0197 84.9856; 18 1 0.183 0.021 2.6 113.829 115.184;
17 1 0.171 0.014 3.3 175.071 177.196""",
}
"""Constants of each matrix: a and alpha without gaps; then rows of gap_open, gap_extend, lambda, K, a, alpha and sigma,
the default row first. From blast_stat.c of NCBI's C++ toolkit (public domain)."""

MATRICES = tuple(_CONSTANTS)


class Statistics(NamedTuple):
    """Constants of a scoring: lambda and K (Karlin and Altschul 1990); the others correct for sequence lengths."""

    lambda_: float
    k: float
    a: float
    alpha: float
    sigma: float
    a_ungapped: float
    alpha_ungapped: float

    def bits(self, scores: NDArray) -> NDArray[np.float64]:
        """Bit scores, ``(lambda S - ln K) / ln 2``; shaped as the scores."""
        return (self.lambda_ * scores - math.log(self.k)) / math.log(2)

    def evalues(self, scores: NDArray, query: int, targets: NDArray, residues: int, gap: int) -> NDArray[np.float64]:
        """Return E-values: expected chance hits with at least these scores, shaped as the scores.

        Park, Sheetlin, Ma, Madden and Spouge 2012 (doi 10.1186/1756-0500-5-286), with the equations of
        BLAST_SpougeStoE. ``query``, ``targets``: lengths in residues. ``residues``: size of the database. ``gap``:
        penalty of a gap of one residue.
        """
        y = np.asarray(scores, np.float64)
        # Intercepts of the linear fits in the score (b, beta and tau of the paper), from the constants of ungapped
        # alignments.
        offset = 2 * gap * (self.a_ungapped - self.a)
        spread = 2 * gap * (self.alpha_ungapped - self.alpha)
        joint = 2 * gap * (self.alpha_ungapped - self.sigma)
        # The fits fall below 0 for small scores; BLAST clamps both at their values for a score of 2 / lambda.
        deviation = np.sqrt(np.maximum(2 * self.alpha / self.lambda_, self.alpha * y + spread))
        covariance = np.maximum(2 * self.sigma / self.lambda_, self.sigma * y + joint)
        positions: NDArray | float = 1.0
        probability: NDArray | float = 1.0
        for length in (query, targets):
            # Start positions with room for an alignment of this score: a long one does not fit near the end.
            left = length - (self.a * y + offset)
            share = ndtr(left / deviation)
            density = np.exp(-0.5 * (left / deviation) ** 2) / math.sqrt(2 * math.pi)
            positions = positions * np.maximum(left * share + deviation * density, 0)
            probability = probability * share
        # E-value of this pair; a database counts as residues / targets sequences of this length.
        return (positions + covariance * probability) * self.k * np.exp(-self.lambda_ * y) * residues / targets


@dataclass(frozen=True)
class Scoring:
    """A substitution matrix of S letters with scores (S, S), and penalties per gap and per gap residue.

    ``statistics`` is None if BLAST has no constants of bit scores and E-values.
    """

    name: str
    letters: str
    scores: NDArray[np.int32]
    gap_open: int
    gap_extend: int
    statistics: Statistics | None

    @property
    def first(self) -> int:
        """Penalty of a gap of one residue."""
        return self.gap_open + self.gap_extend

    @cached_property
    def matrix(self) -> Any:
        """The matrix as a parasail object."""
        matrix = parasail.matrix_create(self.letters, 0, 0)
        # Cell by cell: parasail 1.3.4 does not accept an array as a matrix.
        for cell in np.ndindex(self.scores.shape):
            matrix[cell] = int(self.scores[cell])
        return matrix

    @cached_property
    def codes(self) -> NDArray[np.uint8]:
        """(256,) matrix row of each letter that a store may have, upper or lower case; 255 for others."""
        codes = np.full(256, 255, np.uint8)
        for letter in STORE_ALPHABET + "J":  # J: queries are not ingested, which would replace it by X
            # Selenocysteine is cysteine with selenium in place of sulfur; the other letters have no close substitute.
            stand_in = "C" if letter == "U" else "X"
            codes[[ord(letter), ord(letter.lower())]] = self.letters.index(
                letter if letter in self.letters else stand_in
            )
        return codes

    @cached_property
    def _table(self) -> bytes:
        return bytes(ord(self.letters[code]) if code < 255 else 0 for code in self.codes)

    def known(self, residues: bytes) -> bytes:
        """Return the sequence in letters of the matrix. Raises DataError for a letter that is not a residue."""
        known = residues.translate(self._table)
        # Checked after the translation in one scan of bytes, which is faster than a check per letter.
        index = known.find(0)
        if index >= 0:
            raise DataError(f"residue {index + 1}, {chr(residues[index])!r}, is not an amino acid; fix the sequence")
        return known


def scoring(matrix: str = "BLOSUM62", gap_open: int | None = None, gap_extend: int | None = None) -> Scoring:
    """Return a scoring for a matrix name or file; omitted penalties default to BLAST's for the matrix.

    Raises ConfigError for an unknown name, or a file without penalties; DataError for a file that is not a matrix.
    """
    name = matrix.upper()
    if name in MATRICES:
        letters = _LETTERS
        scores = parasail.Matrix(name.lower()).matrix[: len(letters), : len(letters)].astype(np.int32)
    elif Path(matrix).is_file():
        # BLAST's defaults fit its own matrices; scores in a file may be on another scale.
        if gap_open is None or gap_extend is None:
            raise ConfigError(f"align.matrix {matrix}: a matrix from a file needs gap_open and gap_extend; set both")
        letters, scores = read_matrix(Path(matrix))
    else:
        raise ConfigError(
            f"align.matrix {matrix}: no such matrix or file{did_you_mean(name, MATRICES)}; available: "
            f"{', '.join(MATRICES)}"
        )
    ungapped, *rows = _CONSTANTS.get(name, "0 0").split(";")
    constants = {}
    for row in rows:
        opening, extension, *gapped = row.split()
        constants[int(opening), int(extension)] = Statistics(*map(float, gapped), *map(float, ungapped.split()))
    default_open, default_extend = next(iter(constants), (0, 0))
    gap_open = default_open if gap_open is None else gap_open
    gap_extend = default_extend if gap_extend is None else gap_extend
    # Looked up by the pair: the constants hold for these penalties only and cannot be interpolated.
    return Scoring(matrix, letters, scores, gap_open, gap_extend, constants.get((gap_open, gap_extend)))


def read_matrix(path: Path) -> tuple[str, NDArray[np.int32]]:
    """Return the letters and the (S, S) int32 scores of a file in NCBI's format, without its ``*``.

    Raises DataError, with the line, unless the file has a symmetric integer matrix with all amino acids and X.
    """
    with parsing(path, "give a matrix in NCBI's format"):
        lines = path.read_text(encoding="ascii").splitlines()
    rows = [(number, line.split()) for number, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    letters = [letter.upper() for letter in rows[0][1]] if rows else []
    scores = np.zeros((len(letters), len(letters)), np.int32)
    if [row[0].upper() for _, row in rows[1:]] != letters or len(set(letters)) < len(letters):
        raise DataError(f"{path}: its rows and columns have different letters; give a matrix in NCBI's format")
    for index, (number, row) in enumerate(rows[1:]):
        try:
            scores[index] = [int(value) for value in row[1:]]
        except (ValueError, OverflowError):
            raise DataError(f"{path}, line {number}: expected {len(letters)} integers after the letter") from None
    if missing := sorted(set(AMINO_ACIDS + "X") - set(letters)):
        raise DataError(f"{path}: column {missing[0]} is missing; a protein matrix has the 20 amino acids and X")
    if (scores != scores.T).any() or abs(scores).max() > 127:
        raise DataError(f"{path}: is not symmetric, or has a score above 127; give a matrix in NCBI's format")
    kept = [index for index, letter in enumerate(letters) if letter != "*"]
    return "".join(letters[index] for index in kept), scores[np.ix_(kept, kept)]
