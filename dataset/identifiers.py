"""Ids of proteins as databases write them, and the one way in which the ids of two files are matched.

``sp|P12345|NAME_HUMAN``, ``tr|P12345|...``, ``P12345.2`` (a version) and ``P12345-2`` (an isoform) match P12345. An id
that is the same on both sides always comes first.
"""

import re
from collections.abc import Collection, Iterable
from itertools import islice

from esmeray.common.errors import DataError

_SWISS_PROT = re.compile(r"(?:sp|tr)\|([^|\s]+)(?:\|.*)?", re.IGNORECASE)
# Of these databases alone: design-1 and design-2, or domain.1 and domain.2, are names of different proteins.
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
    swiss_prot = _SWISS_PROT.fullmatch(record_id)
    bare_id = swiss_prot[1] if swiss_prot else record_id
    match = _ACCESSION.fullmatch(bare_id)
    return match[1].upper() if match else bare_id


def match_ids(ids: Iterable[str], known: Collection[str], source: object, known_source: object) -> dict[str, str]:
    """Return, for each of ``ids`` that has one, the id in ``known`` that names the same protein.

    Several ids may match the same known id (isoforms of an annotated protein); ids without a match are left out, for
    the caller to count. ``source`` and ``known_source`` name both sides in messages.

    Raises DataError if fewer than half of the ids on both sides match, or if an id matches several known ones.
    """
    distinct = [*dict.fromkeys(ids)]
    known_ids = {*known}
    by_accession: dict[str, list[str]] = {}
    for known_id in known_ids:
        by_accession.setdefault(accession(known_id), []).append(known_id)
    matches = {}
    for record_id in distinct:
        candidates = [record_id] if record_id in known_ids else by_accession.get(accession(record_id), [])
        if len(candidates) > 1:
            raise DataError(
                f"{source}: id {record_id!r} matches {', '.join(map(repr, sorted(candidates)[:_SHOWN]))} of "
                f"{known_source}; write the same id on both sides"
            )
        matches.update(dict.fromkeys([record_id] if candidates else [], *candidates))
    # Of either side: a database's annotations go with a few sequences, and a few labels with a database's sequences.
    if 2 * len(matches) < len(distinct) and 2 * len({*matches.values()}) < len(known_ids):
        raise DataError(
            f"{source}: only {len(matches):,} of {len(distinct):,} ids match {known_source}: {_shown(distinct)} on one "
            f"side, {_shown(sorted(known_ids))} on the other; make the ids agree, or remove those without a match"
        )
    return matches


def _shown(ids: Iterable[str]) -> str:
    return ", ".join(map(repr, islice(ids, _SHOWN)))
