"""Similarity of the proteins of a store: identity with the nearest training protein, and clusters at an identity.

Identity is defined as by MMseqs2 (``--min-seq-id`` with ``-c 0.8``): identical residues per column of the
Smith-Waterman alignment, which must cover 80 % of both sequences and have an E-value of at most 0.001. Equal sequences
have identity 1, however short they are. Only proteins that share the most 4-mers are aligned, so that some pairs near
30 % are missed (numbers in docs/classifier.md).

Shape legend: N queries, or records of a store; S distinct proteins.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from esmeray.alignment.scoring import scoring
from esmeray.alignment.search import Hit, Search, SharedWords
from esmeray.common.progress import record_bar
from esmeray.dataset.fasta.records import hashes_of
from esmeray.dataset.store.reader import Store

_COVERAGE = 0.8
_MAX_EVALUE = 1e-3
_CANDIDATES = 100
"""Proteins to align to each query: those that share the most 4-mers."""


def nearest_identity(queries: Sequence[str], store: Store, training: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the (N,) identities, 0 to 1, of proteins with their nearest training protein; 0 if none is similar.

    Queries are clean residues in upper case, as in a store. ``training``: ascending records of the store.
    """
    search, words = Search(store, scoring()), SharedWords(store, training)
    encoded = [query.encode() for query in queries]
    # Equal sequences need no search; short ones have no significant alignment, even with themselves.
    identities_N = np.isin(hashes_of(encoded), store.sequence_hashes[training]).astype(np.float64)
    with record_bar("comparing with training") as bar:
        for number, query in enumerate(encoded):
            if not identities_N[number]:
                hits = search.hits(query, _CANDIDATES, _MAX_EVALUE, words("", query, _CANDIDATES))
                identities_N[number] = max((_identity(search, query, hit) for hit in hits), default=0)
            bar((number + 1) / len(encoded), number + 1)
    return identities_N


def identity_clusters(store: Store, identity: float) -> NDArray[np.int64]:
    """Return the (N,) cluster of each record.

    Clusters are connected components: no pair of different clusters that the search finds has this identity or more.
    Greedy set cover, MMseqs2's default, compares proteins with the representative of their cluster only, so that
    similar proteins may get into different clusters, and onto both sides of a split.
    """
    # Equal sequences are one cluster from the start, and candidates once.
    _, first_S, clusters_N = np.unique(store.sequence_hashes, return_index=True, return_inverse=True)
    search, words = Search(store, scoring()), SharedWords(store, np.sort(first_S))
    with record_bar("clustering") as bar:
        for done, record in enumerate(np.sort(first_S).tolist(), 1):
            query = store.sequence(record).tobytes()
            candidates = words("", query, _CANDIDATES)
            # Proteins of the same cluster need no alignment; most pairs of a large family are never aligned.
            others = candidates[clusters_N[candidates] != clusters_N[record]]
            for hit in search.hits(query, _CANDIDATES, _MAX_EVALUE, others):
                ends = clusters_N[[record, hit.record]]
                if ends[0] != ends[1] and _identity(search, query, hit) >= identity:
                    clusters_N[clusters_N == ends[1]] = ends[0]
            bar(done / len(first_S), done)
    return clusters_N


def _identity(search: Search, query: bytes, hit: Hit) -> float:
    """Return the identity of the alignment with a hit, 0 if it covers too little of either sequence."""
    trace, paired, same = search.alignment(query, hit)
    covered = (paired[-1] - paired[0] + 1) / (len(query), search.store.lengths[hit.record])
    return same / len(trace) if covered.min() >= _COVERAGE else 0.0
