"""Match the protein ids of two files, in the spellings of databases.

``sp|P12345|NAME_HUMAN``, ``tr|P12345|...``, ``UniProtKB:P12345``, ``gi|4504347|ref|NP_000509.1|``, ``P12345.2`` (a
version) and ``P12345-2`` (an isoform) match the accession. An equal id has priority, then an id with the same isoform
and version, then the accession itself.
"""

import re
from collections.abc import Callable, Collection, Iterable
from itertools import islice

from esmeray.common.errors import DataError

_OF_DATABASE = re.compile(
    r"(?:(?:gi\|\d+\|)?(?:sp|tr|ref|gb|emb|dbj)\||UniProt(?:KB)?:)([^|\s]+)(?:\|.*)?", re.IGNORECASE
)
# Only accessions of these databases: design-1 and design-2, or domain.1 and domain.2, are names of different proteins.
_ACCESSION = re.compile(
    r"((?:[OPQ][0-9][A-Z0-9]{3}[0-9]|[A-NR-Z][0-9](?:[A-Z][A-Z0-9]{2}[0-9]){1,2})"  # UniProt's own pattern
    r"|[A-Z]{2}_[0-9]{6,9}|[A-Z]{3}[0-9]{5,7}|ENS[A-Z]*P[0-9]{11})"  # RefSeq, GenBank, Ensembl
    r"(?:-[0-9]+)?(?:\.[0-9]+)?",
    re.IGNORECASE,
)
_SHOWN = 3


def accession(record_id: str) -> str:
    """Return the accession of an id, without database, name, isoform and version; the id itself if it has none.

    >>> accession("sp|P12345-2|AATM_RABIT"), accession("NP_000509.1"), accession("design-1")
    ('P12345', 'NP_000509', 'design-1')
    """
    bare_id = without_database(record_id)
    match = _ACCESSION.fullmatch(bare_id)
    return match[1].upper() if match else bare_id


def without_database(record_id: str) -> str:
    """Return the id without its database and name: ``P12345-2`` of ``sp|P12345-2|AATM_RABIT``."""
    match = _OF_DATABASE.fullmatch(record_id)
    return match[1] if match else record_id


_SPELLINGS: tuple[tuple[Callable[[str], str], Callable[[str], str]], ...] = (
    (str, str),
    (without_database, without_database),
    (accession, without_database),
    (accession, accession),
)
"""Spellings of an id and of a known id that are compared, from the nearest to the farthest."""


def match_ids(
    ids: Iterable[str],
    known: Collection[str],
    source: object,
    known_source: object,
    *,
    share: float = 0.5,
    once: bool = False,
) -> dict[str, str]:
    """Return, for each of ``ids`` with a match, the id in ``known`` that names the same protein.

    Several ids may match the same known id (isoforms of an annotated protein). With ``once``, only the id with the
    nearest spelling matches. Ids without a match are left out, for the caller to count. ``source`` and
    ``known_source`` name both sides in messages.

    Raises DataError if less than ``share`` of the ids on both sides match, if an id matches several known ones, or if,
    with ``once``, several ids match a known one.
    """
    distinct = [*dict.fromkeys(ids)]
    known_ids = {*known}
    matches: dict[str, str] = {}
    # From the nearest spelling to the farthest: P12345-2 is itself, then the canonical P12345, then any P12345.
    for spelling, known_spelling in _SPELLINGS:
        unmatched = [record_id for record_id in distinct if record_id not in matches]
        if not unmatched:
            break
        by_spelling: dict[str, list[str]] = {}
        for known_id in known_ids.difference(matches.values() if once else ()):
            by_spelling.setdefault(known_spelling(known_id), []).append(known_id)
        candidates = {record_id: by_spelling.get(spelling(record_id), []) for record_id in unmatched}
        several = [record_id for record_id in unmatched if len(candidates[record_id]) > 1]
        if several:
            raise DataError(
                f"{source}: id {several[0]!r} matches {_shown(sorted(candidates[several[0]]))} of "
                f"{known_source}; use the same id in both"
            )
        matches |= {record_id: same[0] for record_id, same in candidates.items() if same}
    last = {known_id: record_id for record_id, known_id in matches.items()}
    rivals = [record_id for record_id, known_id in matches.items() if once and last[known_id] != record_id]
    if rivals:
        known_id = matches[rivals[0]]
        raise DataError(
            f"{source}: ids {rivals[0]!r} and {last[known_id]!r} match {known_id!r} of {known_source}; keep one of them"
        )
    # One side suffices: a database's annotations may be used with a few sequences, and a few labels with a database.
    if len(matches) < share * len(distinct) and len({*matches.values()}) < share * len(known_ids):
        raise DataError(
            f"{source}: only {len(matches):,} of {len(distinct):,} ids match {known_source}: {_shown(distinct)} "
            f"compared with {_shown(sorted(known_ids))}; use the same ids in both, or remove the unmatched ones"
        )
    return matches


def _shown(ids: Iterable[str]) -> str:
    return ", ".join(map(repr, islice(ids, _SHOWN)))
