"""How far generated sequences are from known ones, by Smith-Waterman against all of a store (parasail, Daily 2016)."""

from __future__ import annotations

from typing import NamedTuple

import parasail

from dataset.store.reader import Store

_OPEN, _EXTEND = 11, 1
"""BLAST's gap penalties for BLOSUM62: of the first residue of a gap, and of each further one."""


class Nearest(NamedTuple):
    """The known sequence of the highest score, and the share of the design's residues that differ from it, where
    they are not aligned included."""

    record: str
    novelty: float


def nearest(residues: str, known: Store) -> Nearest:
    """Compare a sequence with all of a store."""
    profile = parasail.profile_create_stats_sat(residues, parasail.blosum62)
    best, record, matches = 0, 0, 0
    for index in range(len(known)):
        found = parasail.sw_stats_striped_profile_sat(profile, known.text(index), _OPEN, _EXTEND)
        if found.score > best:
            best, record, matches = found.score, index, found.matches
    return Nearest(known.id(record), 1 - matches / len(residues))
