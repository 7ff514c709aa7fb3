"""Features of mutants, which define the kernels of a Gaussian process.

    site          introduced residues by position; similar amino acids share information
    near          mutated positions, smoothed along the sequence
    substitution  amino acids lost and introduced, and the change of their properties, independent of the position
    prior         a zero-shot score, scaled
    embedding     mean embedding over the residues, relative to the mean over mutants

A mutant with several mutations has the sum of their features. Shape legend: N, M mutants, L residues, D features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from esmeray.common.errors import DataError
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.mutations.variants import Mutant, Protein

_PROPERTIES = {
    # Kyte and Doolittle 1982.
    "hydrophobicity": "1.8 2.5 -3.5 -3.5 2.8 -0.4 -3.2 4.5 -3.9 3.8 1.9 -3.5 -1.6 -3.5 -4.5 -0.8 -0.7 4.2 -0.9 -1.3",
    # Cubic angstrom, Zamyatnin 1972.
    "volume": "88.6 108.5 111.1 138.4 189.9 60.1 153.2 166.7 168.6 166.7 162.9 114.1 112.7 143.8 173.4 89 116.1 140 "
    "227.8 193.6",
    "charge": "0 0 -1 -1 0 0 0.3 0 1 0 0 0 0 0 1 0 0 0 0 0",
    # kcal/mol in a helix, Pace and Scholtz 1998.
    "helix": "0 0.68 0.69 0.4 0.54 1 0.61 0.41 0.26 0.21 0.24 0.65 3.16 0.39 0.21 0.5 0.66 0.61 0.49 0.53",
    # Chou and Fasman 1978.
    "strand": "0.83 1.19 0.54 0.37 1.38 0.75 0.87 1.6 0.74 1.3 1.05 0.89 0.55 1.1 0.93 0.75 1.19 1.7 1.37 1.47",
    "aromatic": "0 0 0 0 1 0 1 0 0 0 0 0 0 0 0 0 0 0 1 1",
    "branched": "0 0 0 0 0 0 0 1 0 0 0 0 0 0 0 0 1 1 0 0",
}
"""Physicochemical descriptors of the amino acids, in the order of :data:`AMINO_ACIDS`."""
_NEAR = 2.0
"""Length scale along the sequence, in residues, over which information about a position decays by a factor of e."""
_SHARES = {"site": 0.5, "near": 0.2, "substitution": 0.1, "prior": 0.5, "embedding": 0.5}
"""Weights of the parts in the squared distance of two mutants, in units of the joint kernel's length scale."""


@dataclass(frozen=True)
class Features:
    """Parts of the features by name, each an (N, D) dense or sparse array; ``prior`` has one column."""

    parts: dict[str, Any]

    def __len__(self) -> int:
        return next(iter(self.parts.values())).shape[0]

    def __getitem__(self, rows: Any) -> "Features":
        return Features({name: part[rows] for name, part in self.parts.items()})

    def squares(self) -> dict[str, NDArray[np.float64]]:
        """(N,) diagonal of :func:`kernels` for each part."""
        return {name: np.asarray((part * part).sum(axis=1)).ravel() for name, part in self.parts.items()}


def kernels(left: Features, right: Features) -> dict[str, NDArray[np.float64]]:
    """(N, M) kernel of each part, linear in its features, and a ``joint`` RBF kernel of all parts.

    The joint kernel lets effects depend on each other: e.g. a protein that is unstable already loses less.
    """
    products = {}
    for name, part in left.parts.items():
        product = part @ right.parts[name].T
        products[name] = product.toarray() if hasattr(product, "toarray") else product
    near = sum(_SHARES[name] * product for name, product in products.items())
    return products | {"joint": np.exp(near - 0.5 * (_norms(left)[:, None] + _norms(right)))}


def _norms(features: Features) -> NDArray[np.float64]:
    """(N,) squared norms of the weighted features."""
    return np.sum([_SHARES[name] * values_N for name, values_N in features.squares().items()], axis=0)


def substitution_features(protein: Protein, mutants: Sequence[Mutant]) -> dict[str, Any]:
    """The first three parts. Raises DataError for insertions and deletions."""
    if any(mutant.whole is not None for mutant in mutants):
        raise DataError("features one_hot: support only substitutions; use embeddings")
    length = len(protein.sequence)
    rows, offsets, lost, won = _columns(mutants)
    positions = csr_array((np.ones(len(rows)), (rows, offsets)), shape=(len(mutants), length))
    properties_20D = _properties()
    # Kernel of amino acids at one position: 0.3 for the same one, their similarity by properties, and a constant.
    alike = np.exp(-0.5 * ((properties_20D[:, None] - properties_20D) ** 2).mean(axis=-1))
    factor = np.linalg.cholesky((alike + 1.0 + 0.3 * np.eye(20)) / 2.3)
    columns = 20 * offsets[:, None] + np.arange(20)
    site = csr_array((factor[won].ravel(), (np.repeat(rows, 20), columns.ravel())), shape=(len(mutants), 20 * length))
    distances = np.abs(np.arange(length)[:, None] - np.arange(length))
    near = positions @ np.linalg.cholesky(np.exp(-distances / _NEAR))
    changes = (properties_20D[won] - properties_20D[lost]) / np.sqrt(len(_PROPERTIES))
    rows_of_features = np.hstack([np.eye(20)[won], np.eye(20)[lost], changes, np.ones((len(rows), 1))]) / 2
    substitution = np.zeros((len(mutants), rows_of_features.shape[1]))
    np.add.at(substitution, rows, rows_of_features)
    return {"site": site, "near": np.asarray(near), "substitution": substitution}


def one_hot(protein: Protein, mutants: Sequence[Mutant]) -> csr_array:
    """(N, L * 20): 1 for an introduced residue, -1 for the wild type's residue."""
    rows, offsets, lost, won = _columns(mutants)
    shape = (len(mutants), 20 * len(protein.sequence))
    gained, missing = (
        csr_array((np.ones(len(rows)), (rows, 20 * offsets + kind)), shape=shape) for kind in (won, lost)
    )
    return csr_array(gained - missing)


class Inputs(NamedTuple):
    """Inputs from models and tables: (N,) zero-shot scores, and (N, D) embeddings if they are features."""

    scores: NDArray[np.float64]
    embeddings: NDArray[np.float64] | None

    def of(self, rows: Sequence[int]) -> "Inputs":
        return Inputs(self.scores[rows], None if self.embeddings is None else self.embeddings[rows])


@dataclass(frozen=True)
class Measured:
    """Distinct measured mutants of a protein.

    Attributes:
        values: (N,) means over measurements.
        replicates: (N,) numbers of measurements relative to their mean.
        groups: (N,) numbers of the user's groups.
    """

    protein: Protein
    mutants: Sequence[Mutant]
    inputs: Inputs
    values: NDArray[np.float64]
    replicates: NDArray[np.float64]
    groups: NDArray[np.int64] | None = None

    @cached_property
    def features(self) -> Features:
        return self.encode(self.mutants, self.inputs)

    def encode(self, mutants: Sequence[Mutant], inputs: Inputs) -> Features:
        """Compute the features of mutants from their inputs, scaled as the inputs of the measured mutants."""
        scores_N, embeddings_ND = self.inputs
        # With embeddings, the residues at the positions are features only if there are no insertions and deletions.
        has_sites = embeddings_ND is None or all(mutant.whole is None for mutant in self.mutants)
        parts = substitution_features(self.protein, mutants) if has_sites else {}
        parts["prior"] = ((inputs.scores - scores_N.mean()) / (scores_N.std() or 1.0))[:, None]
        if embeddings_ND is not None and inputs.embeddings is not None:
            centre_D = embeddings_ND.mean(axis=0)
            spread = np.sqrt(((embeddings_ND - centre_D) ** 2).sum(axis=1).mean()) or 1.0
            parts["embedding"] = (inputs.embeddings - centre_D) / spread
        return Features(parts)


def _columns(mutants: Sequence[Mutant]) -> NDArray[np.int64]:
    """(4, mutations): row of the mutant, offset, and indices of the amino acids lost and introduced."""
    return (
        np.array(
            [
                (row, offset, AMINO_ACIDS.index(wild), AMINO_ACIDS.index(letter))
                for row, mutant in enumerate(mutants)
                for wild, offset, letter in mutant.mutations
            ],
            np.int64,
        )
        .reshape(-1, 4)
        .T
    )


def _properties() -> NDArray[np.float64]:
    table = np.array([text.split() for text in _PROPERTIES.values()], float).T
    return (table - table.mean(axis=0)) / table.std(axis=0)
