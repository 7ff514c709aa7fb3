"""How far generated sequences are from known ones, by Smith-Waterman against all of a store."""

from typing import NamedTuple

from alignment.search import Search


class Nearest(NamedTuple):
    """The known sequence of the highest score, and the share of the design's residues that differ from it, where
    they are not aligned included."""

    record: str
    novelty: float


def nearest(residues: str, known: Search) -> Nearest:
    """Compare a sequence with all of a store."""
    query = residues.encode()
    hits = known.hits(query, count=1, evalue=float("inf"))
    if not hits:
        return Nearest(known.store.id(0), 1.0)
    target = known.store.text(hits[0].record)
    pairs = known.alignment(query, hits[0]).tolist()
    matches = sum(residues[q] == target[t] for q, t in pairs if q >= 0 and t >= 0)
    return Nearest(known.store.id(hits[0].record), 1 - matches / len(residues))
