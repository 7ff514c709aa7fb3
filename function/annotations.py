"""Files of proteins and their terms: annotations, predicted scores, weights of terms.

In: CAFA's TSV (protein, term and, of predictions, a score) or GAF 2.2, plain or compressed. Out: sparse matrices of proteins by
terms for each aspect, annotations propagated to the ancestors. A term that is not in the ontology, or a predicted
protein that is not wanted, is refused or ignored, as ``unknown`` says.

Shape legend: N proteins, V terms of an aspect.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from common.errors import DataError
from common.text import counted
from function.ontology import Aspect, Ontology, lines_of

log = logging.getLogger(__name__)

Unknown: TypeAlias = Literal["refuse", "ignore"]
EXPERIMENTAL = ("EXP", "IDA", "IPI", "IMP", "IGI", "IEP", "TAS", "IC", "HTP", "HDA", "HMP", "HGI", "HEP")
"""Evidence codes of experiments, single and high-throughput, and the two of curators that CAFA takes with them."""
_GAF = "!gaf-version:"
_HEADERS = {"AUTHOR", "MODEL", "KEYWORDS", "ACCURACY", "END", "EntryID"}
"""First words of lines of CAFA's files that are no annotations."""


@dataclass(frozen=True)
class Annotations:
    """Annotated proteins of one aspect.

    Attributes:
        proteins: N ids, as they first appear.
        terms: (N, V) bool, with all ancestors.
    """

    proteins: tuple[str, ...]
    terms: csr_array

    def of(self, proteins: Sequence[str]) -> csr_array:
        """Rows of these proteins; empty ones for those without annotation."""
        places = {protein: place for place, protein in enumerate(self.proteins)}
        found = [(row, places[protein]) for row, protein in enumerate(proteins) if protein in places]
        rows, columns = np.array(found, np.int64).reshape(-1, 2).T
        chosen = csr_array((np.ones(len(rows), bool), (rows, columns)), shape=(len(proteins), len(places)))
        return chosen @ self.terms


class _Terms:
    """Places of the terms of a file's lines."""

    def __init__(self, path: Path, ontology: Ontology, aspect: str | None, unknown: Unknown) -> None:
        self._path, self._aspect, self._unknown, self._ignored = path, aspect, unknown, 0
        self.places = ontology.places
        if aspect is not None:
            ontology.aspect(aspect)

    def place(self, term: str, number: int) -> tuple[str, int] | None:
        """Aspect and place of a term; None for an unknown one that is ignored."""
        found = self.places.get(term)
        if found is None:
            self.miss(number, f"the term {term!r} is not in the ontology, or obsolete")
        elif self._aspect not in (None, found[0]):
            raise DataError(
                f"{self._path}, line {number}: {term} is a term of {found[0]}, and only {self._aspect} was asked for; "
                "remove the other aspects"
            )
        return found

    def miss(self, number: int, problem: str) -> None:
        """Count a line that is ignored, or refuse it."""
        if self._unknown == "refuse":
            raise DataError(f"{self._path}, line {number}: {problem}; mend it, or give --unknown ignore")
        self._ignored += 1

    def report(self) -> None:
        if self._ignored:
            log.warning("%s: %s with unknown terms or proteins ignored", self._path, counted(self._ignored, "line{s}"))


def read_annotations(
    path: Path,
    ontology: Ontology,
    *,
    aspect: str | None = None,
    unknown: Unknown = "refuse",
    evidence: Sequence[str] = EXPERIMENTAL,
    since: str = "",
    before: str = "",
) -> dict[str, Annotations]:
    """Annotations of each aspect that the file has, propagated; ``aspect`` asks for one alone.

    Of GAF, those with these evidence codes and without NOT, of dates (YYYYMMDD) from ``since`` on and earlier than
    ``before``, where given. Raises DataError for a file that can't be read so, or where no annotation is left.
    """
    if next((line for _, line in islice(lines_of(path), 1)), "").startswith("!"):
        pairs = _gaf(path, frozenset(evidence), since, before)
    else:
        pairs = ((number, row[0], row[1]) for number, row in _rows(path, 2))
    terms = _Terms(path, ontology, aspect, unknown)
    ids: dict[str, dict[str, int]] = {}
    places: dict[str, tuple[array[int], array[int]]] = {}
    for number, protein, term in pairs:
        if found := terms.place(term, number):
            name, column = found
            proteins = ids.setdefault(name, {})
            rows, columns = places.setdefault(name, (array("i"), array("i")))
            rows.append(proteins.setdefault(protein, len(proteins)))
            columns.append(column)
    terms.report()
    if not ids:
        raise DataError(f"{path}: no annotation is left; check terms, evidence codes and dates")
    made = {}
    for name in (name for name in ontology.aspects if name in ids):
        shape = len(ids[name]), len(ontology.aspects[name].terms)
        leaves = csr_array((np.ones(len(places[name][0]), bool), places[name]), shape=shape)
        made[name] = Annotations(tuple(ids[name]), leaves @ ontology.aspects[name].ancestors)
    return made


def read_scores(
    path: Path,
    ontology: Ontology,
    proteins: Mapping[str, Sequence[str]],
    *,
    aspect: str | None = None,
    unknown: Unknown = "refuse",
) -> dict[str, csr_array]:
    """(N, V) float64 scores of these proteins of each aspect, not propagated, for the aspects that have some.

    The largest counts of several for the same protein and term. Raises DataError for a score that is not in 0 to 1.
    """
    terms = _Terms(path, ontology, aspect, unknown)
    ids = {name: {protein: place for place, protein in enumerate(some)} for name, some in proteins.items()}
    everyone = frozenset().union(*ids.values())
    found = {name: (array("i"), array("i"), array("d")) for name in ids}
    for number, row in _rows(path, 3):
        place = terms.places.get(row[1]) if aspect is None else None
        place = place or terms.place(row[1], number)
        try:
            score = float(row[2])
        except ValueError:
            score = -1.0
        if not 0 <= score <= 1:
            raise DataError(f"{path}, line {number}: the score {row[2]!r} is not a number from 0 to 1")
        if row[0] not in everyone:
            terms.miss(number, f"the protein {row[0]!r} has no annotation to evaluate it by")
        elif place and (protein := ids.get(place[0], {}).get(row[0])) is not None:
            rows, columns, scores = found[place[0]]
            rows.append(protein)
            columns.append(place[1])
            scores.append(score)
    terms.report()
    made = {name: _largest(*(np.asarray(part) for part in parts)) for name, parts in found.items() if len(parts[0])}
    shapes = {name: (len(ids[name]), len(ontology.aspects[name].terms)) for name in made}
    return {name: csr_array((data, places), shape=shapes[name]) for name, (data, places) in made.items()}


def read_accretion(path: Path, ontology: Ontology, *, unknown: Unknown = "refuse") -> dict[str, NDArray[np.float64]]:
    """(V,) information accretion of each aspect's terms, in bits, from a TSV of term and value; 0 for those that are missing.

    Infinite values and NaN count as 0, as in cafaeval. Raises DataError for a value below 0.
    """
    terms = _Terms(path, ontology, None, unknown)
    made = {name: np.zeros(len(aspect.terms)) for name, aspect in ontology.aspects.items()}
    for number, row in _rows(path, 2):
        try:
            value = float(row[1])
        except ValueError:
            value = -1.0
        if value < 0:
            raise DataError(f"{path}, line {number}: the information accretion {row[1]!r} is not a number from 0 on")
        place = terms.place(row[0], number)
        if place and ontology.aspects[place[0]].terms[place[1]] == row[0]:  # cafaeval ignores alternative ids here
            made[place[0]][place[1]] = value if np.isfinite(value) else 0.0
    terms.report()
    return made


def information_accretion(annotations: Annotations, aspect: Aspect, proteins: int = 4096) -> NDArray[np.float64]:
    """(V,) information accretion in bits: -log2 of the share of proteins with a term among those with all its parents.

    Clark and Radivojac 2013, equation 1, counted as CAFA's ia.py does: one more protein has every term. ``proteins`` are
    taken at a time, for memory.
    """
    size = len(aspect.terms)
    children = aspect.parents.T.astype(np.int32).tocsr()
    parents_V = np.diff(aspect.parents.indptr)
    eligible_V = np.where(parents_V == 0, len(annotations.proteins), 0)
    for start in range(0, len(annotations.proteins), proteins):
        held = annotations.terms[start : start + proteins].astype(np.int32) @ children
        complete = held.indices[held.data == parents_V[held.indices]]
        eligible_V += np.bincount(complete, minlength=size)
    with_term_V = np.bincount(annotations.terms.indices, minlength=size)
    return np.abs(np.log2((1 + with_term_V) / (1 + eligible_V)))


def _rows(path: Path, columns: int) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields, split at blanks as cafaeval does."""
    for number, line in lines_of(path):
        row = line.split()
        if len(row) >= columns:
            if row[0] not in _HEADERS:
                yield number, row
        elif row and row[0] not in _HEADERS:
            raise DataError(f"{path}, line {number}: {columns} columns were expected, got {line.strip()[:60]!r}")


def _gaf(path: Path, evidence: frozenset[str], since: str, before: str) -> Iterator[tuple[int, str, str]]:
    """Line number, protein and term of the annotations that pass (GO Annotation File, format 2.2)."""
    version = ""
    for number, line in lines_of(path):
        if line.startswith("!"):
            version = line.removeprefix(_GAF).strip() if line.startswith(_GAF) else version
            continue
        if version != "2.2":
            raise DataError(f"{path}: is GAF {version or 'of no version'}; 2.2 is read: get or convert the file to it")
        row = line.rstrip("\n").split("\t")
        if len(row) < 15:
            raise DataError(f"{path}, line {number}: GAF 2.2 has 17 columns, got {len(row)}; get the file again")
        date_in = (not since or row[13] >= since) and (not before or row[13] < before)
        if row[6] in evidence and "NOT" not in row[3].split("|") and date_in:
            yield number, row[1], row[4]


def _largest(
    rows: NDArray[np.int32], columns: NDArray[np.int32], scores: NDArray[np.float64]
) -> tuple[NDArray[np.float64], tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """The largest score of each place, and the places."""
    order = np.lexsort((scores, columns, rows))
    rows, columns = rows[order], columns[order]
    last = np.append((np.diff(rows) != 0) | (np.diff(columns) != 0), True)
    return scores[order][last], (rows[last], columns[last])
