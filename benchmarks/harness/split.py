"""The three parts of the proteins that models are trained and judged on: no cluster has proteins of two of them.

A cluster is what Smith-Waterman hits of E-value 0.001 and better connect, directly or over others, among the hundred
proteins that share most rare 4-mers with each.
"""

import hashlib
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from benchmarks.harness.proteins import read_proteins, write_fasta, write_store
from esmeray.alignment.scoring import scoring
from esmeray.alignment.search import Search, SharedWords
from esmeray.dataset.store.reader import Store

Part: TypeAlias = Literal["training", "validation", "test"]
HELD_OUT = 0.05
"""Share of the clusters in the validation part, and in the test part."""
LARGEST_HELD_OUT = 20
"""Proteins of a cluster beyond which it is trained on: one family shall not decide."""
EVALUE = 1e-3
CANDIDATES = 100


def split(fasta: Path | None, folder: Path, most: int | None = None) -> dict[Part, Path]:
    """Write a FASTA file of each part of the proteins, at most of the first ``most``; a minute for 10,000 on two cores.

    Which part a cluster is in depends on its sequences alone.
    """
    store = Store(write_store(folder, read_proteins(fasta).sequences[:most]))
    cluster_N = clusters(store)
    members: dict[Part, list[str]] = {"training": [], "validation": [], "test": []}
    for number in range(cluster_N.max() + 1):
        records = np.flatnonzero(cluster_N == number).tolist()
        cluster = [store.sequence(record).tobytes().decode() for record in records]
        members[_part(cluster)] += cluster
    paths = {part: folder / f"{part}.fasta" for part in members}
    for part, path in paths.items():
        write_fasta(path, members[part], len(members[part]))
    return paths


def clusters(store: Store) -> NDArray[np.int32]:
    """(N,) the cluster of each record."""
    words = SharedWords(store)
    search = Search(store, scoring())
    pairs = [(record, record) for record in range(len(store))]  # what is like no other is a cluster, too
    # All with all would take a hundred times as long for 10,000: what shares no rare word is seldom a hit.
    for record in range(len(store)):
        query = store.sequence(record).tobytes()
        pairs += [(record, hit.record) for hit in search.hits(query, CANDIDATES, EVALUE, words("", query, CANDIDATES))]
    # Connected over any chain of hits: two members of a family may not be hits of each other.
    ones = np.ones(len(pairs), dtype=np.int8)
    return connected_components(coo_matrix((ones, np.array(pairs).T), shape=(len(store),) * 2), directed=False)[1]


def _part(cluster: list[str]) -> Part:
    # By a hash of a member, so that more proteins in the file move no cluster that stays as it is to another part.
    drawn = int(hashlib.sha256(min(cluster).encode()).hexdigest()[:8], 16) / 2**32
    if len(cluster) > LARGEST_HELD_OUT or drawn >= 2 * HELD_OUT:
        return "training"
    return "test" if drawn < HELD_OUT else "validation"
