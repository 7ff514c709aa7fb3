"""Similarity of proteins in memory: identity with the nearest training protein, and clusters at an identity.

Identity is defined as by MMseqs2 (``--min-seq-id`` with ``-c 0.8``): identical residues per column of the
Smith-Waterman alignment, which must cover 80 % of both sequences and have an E-value of at most 0.001. Equal sequences
have identity 1, however short they are. Only proteins that share the most 4-mers are aligned, so that some pairs near
30 % are missed (numbers in docs/classifier.md).

Shape legend: N queries or proteins.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from esmeray.alignment.scoring import scoring
from esmeray.alignment.search import ProteinList, Search, SharedWords

_COVERAGE = 0.8
_MAX_EVALUE = 1e-3
_CANDIDATES = 100
"""Proteins to align to each query: those that share the most 4-mers."""


def nearest_identity(queries: Sequence[str], training: Sequence[str]) -> NDArray[np.float64]:
    """Return the (N,) identities, 0 to 1, of the queries with their nearest training protein; 0 if none is similar.

    Sequences are clean residues in upper case, as in a store.
    """
    near = _Neighbours(training)
    known = set(training)
    # Equal sequences need no search; short ones have no significant alignment, even with themselves.
    return np.array([1.0 if query in known else max(near.identities(query), default=0.0) for query in queries])


class _Neighbours:
    """Proteins that are similar to a query over most of the length of both."""

    def __init__(self, proteins: Sequence[str]) -> None:
        self._proteins = ProteinList(proteins)
        self._search = Search(self._proteins, scoring())
        self._words = SharedWords(self._proteins)

    def identities(self, query: str) -> Iterator[float]:
        """Yield the identity with each significant hit, 0 if the alignment covers too little."""
        letters = np.frombuffer(query.encode(), np.uint8)
        candidates = self._words("", letters.tobytes(), _CANDIDATES)
        for hit in self._search.hits(letters.tobytes(), _CANDIDATES, _MAX_EVALUE, candidates):
            target = self._proteins.sequence(hit.record)
            trace = self._search.alignment(letters.tobytes(), hit)
            paired = trace[(trace >= 0).all(axis=1)]
            covered = (paired[-1] - paired[0] + 1) / (len(letters), len(target))
            same = int((letters[paired[:, 0]] == target[paired[:, 1]]).sum())
            yield same / len(trace) if covered.min() >= _COVERAGE else 0.0
