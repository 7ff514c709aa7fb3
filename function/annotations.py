"""Files of proteins and their terms: annotations, predicted scores, weights of terms.

In: CAFA's TSV (protein, term and, of predictions, a score) or GAF 2.2, plain or compressed. Out: sparse matrices of
proteins by terms for each aspect, annotations propagated to the ancestors. A term that is not in the ontology, or a
predicted protein without annotation, is refused or ignored, as ``unknown`` says.

Shape legend: N proteins, V terms of an aspect.
"""

import logging
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from esmeray.common.errors import DataError
from esmeray.common.text import counted
from esmeray.dataset.table import numbered_lines
from esmeray.function.ontology import Aspect, Ontology

log = logging.getLogger(__name__)

Unknown: TypeAlias = Literal["refuse", "ignore"]
_Row: TypeAlias = tuple[int, list[str]]
EXPERIMENTAL = ("EXP", "IDA", "IPI", "IMP", "IGI", "IEP", "TAS", "IC", "HTP", "HDA", "HMP", "HGI", "HEP")
"""Evidence codes of experiments, single and high-throughput, and the two of curators that CAFA takes with them."""
_GAF = "!gaf-version:"
_HEADERS = {"AUTHOR", "MODEL", "KEYWORDS", "ACCURACY", "END", "EntryID"}
"""First words of lines of CAFA's files that are no annotations."""


@dataclass(frozen=True)
class Annotations:
    """Annotated proteins of one aspect: N ids, as they first appear, and (N, V) bool terms, with all ancestors."""

    proteins: tuple[str, ...]
    terms: csr_array

    def of(self, proteins: Sequence[str]) -> csr_array:
        """Rows of these proteins; empty ones for those without annotation."""
        rows = {protein: row for row, protein in enumerate(self.proteins)}
        with_empty = vstack([self.terms, csr_array((1, self.terms.shape[1]), dtype=bool)], format="csr")
        return with_empty[np.array([rows.get(protein, len(rows)) for protein in proteins], np.int64)]


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
    ``before``. Raises DataError for a file that can't be read so, or where no annotation is left.

    >>> truth = esmeray.read_annotations(Path("truth.tsv"), ontology)
    >>> truth[name].terms.shape == (len(truth[name].proteins), len(ontology.aspects[name].terms))
    True
    """
    is_gaf = next((line for _, line in numbered_lines(path)), "").startswith("!")  # a TSV has no comments
    rows = _gaf(path, frozenset(evidence), since, before) if is_gaf else _rows(path, 2)
    ids: dict[str, dict[str, int]] = {name: {} for name in ontology.aspects}
    # Arrays of C integers: 4 bytes a number, where a list keeps an object of each.
    pairs = {name: (array("i"), array("i")) for name in ontology.aspects}
    for _, row, name, column in _Lines(path, ontology, unknown, aspect).located(rows, 1):
        pairs[name][0].append(ids[name].setdefault(row[0], len(ids[name])))
        pairs[name][1].append(column)
    made = {}
    for name in [name for name in ontology.aspects if ids[name]]:  # one that no line names is not there
        shape = len(ids[name]), len(ontology.aspects[name].terms)
        leaves = csr_array((np.ones(len(pairs[name][0]), bool), pairs[name]), shape=shape)
        # Of bool, where repeats and several ways to an ancestor add up to True.
        made[name] = Annotations(tuple(ids[name]), leaves @ ontology.aspects[name].ancestors)
    if not made:
        raise DataError(f"{path}: no annotation is left; check terms, evidence codes and dates")
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

    >>> proteins = {name: annotations.proteins for name, annotations in truth.items()}
    >>> scores = esmeray.read_scores(Path("predictions.tsv"), ontology, proteins)
    >>> scores[name].shape == truth[name].terms.shape
    True
    """
    ids = {name: {protein: row for row, protein in enumerate(names)} for name, names in proteins.items()}
    # A protein may be annotated in one aspect alone: its predictions in the others are nobody's mistake.
    everyone = frozenset().union(*ids.values())
    triples: dict[str, list[array[Any]]] = {name: [array("i"), array("i"), array("d")] for name in ids}
    lines = _Lines(path, ontology, unknown, aspect)
    for number, row, name, column in lines.located(_rows(path, 3), 1):
        score = lines.number(number, row[2], "score", 1.0)  # first, so that a bad one is refused of any protein
        if row[0] not in everyone:
            lines.miss(number, f"the protein {row[0]!r} has no annotation to evaluate it by")
        elif row[0] in ids.get(name, ()):
            for values, value in zip(triples[name], (ids[name][row[0]], column, score), strict=True):
                values.append(value)
    shapes = {name: (len(ids[name]), len(ontology.aspects[name].terms)) for name in ids}
    return {name: _largest(columns, shapes[name]) for name, columns in triples.items() if columns[0]}


def read_accretion(path: Path, ontology: Ontology, unknown: Unknown = "refuse") -> dict[str, NDArray[np.float64]]:
    """(V,) information accretion of each aspect's terms, in bits, from a TSV of term and value; 0 for missing terms.

    Infinite values and those of alternative ids count as 0, as in cafaeval. Raises DataError for a value below 0.
    """
    made = {name: np.zeros(len(aspect.terms)) for name, aspect in ontology.aspects.items()}
    lines = _Lines(path, ontology, unknown)
    for number, row, name, column in lines.located(_rows(path, 2), 0):
        value = lines.number(number, row[1], "information accretion", math.inf)
        if row[0] not in ontology.alternatives and value < math.inf:
            made[name][column] = value
    return made


def read_terms(path: Path, ontology: Ontology, unknown: Unknown = "refuse") -> dict[str, NDArray[np.bool_]]:
    """(V,) bool of each aspect: the terms that a file lists, one a line."""
    made = {name: np.zeros(len(aspect.terms), bool) for name, aspect in ontology.aspects.items()}
    for _, _, name, column in _Lines(path, ontology, unknown).located(_rows(path, 1), 0):
        made[name][column] = True
    return made


def information_accretion(annotations: Annotations, aspect: Aspect, proteins: int = 4096) -> NDArray[np.float64]:
    """(V,) information accretion in bits: -log2 of the share of proteins with a term among those with all its parents.

    Clark and Radivojac 2013, counted as CAFA's ia.py (claradepaolis/InformationAccretion) does: one more protein has
    every term. ``proteins`` are taken at a time, for memory.
    """
    size = len(aspect.terms)
    children = aspect.parents.T.astype(np.int32).tocsr()  # not bool: the product counts parents
    parents_V = np.diff(aspect.parents.indptr)
    # A root has no parents, so that any protein has all of them.
    eligible_V = np.where(parents_V == 0, len(annotations.proteins), 0)
    for start in range(0, len(annotations.proteins), proteins):
        held = annotations.terms[start : start + proteins].astype(np.int32) @ children
        eligible_V += np.bincount(held.indices[held.data == parents_V[held.indices]], minlength=size)
    with_term_V = np.bincount(annotations.terms.indices, minlength=size)
    return np.abs(np.log2((1 + with_term_V) / (1 + eligible_V)))  # abs: -log2(1) is -0.0, which a file would show


class _Lines:
    """Lines of a file with their terms' positions; unknown terms are refused, or ignored and counted."""

    def __init__(self, path: Path, ontology: Ontology, unknown: Unknown, aspect: str | None = None) -> None:
        self._path, self._ontology, self._unknown = path, ontology, unknown
        self._aspect = None if aspect is None else ontology.aspect(aspect).name
        self._ignored = 0

    def located(self, rows: Iterator[_Row], field: int) -> Iterator[tuple[int, list[str], str, int]]:
        """Line number, fields, and aspect and column of the term in a field."""
        for number, row in rows:
            aspect, column = self._ontology.positions.get(row[field], ("", -1))
            if column < 0:
                self.miss(number, f"the term {row[field]!r} is not in the ontology, or obsolete")
            elif self._aspect not in (None, aspect):
                # Whatever ``unknown`` says: the term is known, and the file is not the one that was meant.
                problem = f"{row[field]} is a term of {aspect}, and only {self._aspect} was asked for"
                raise DataError(f"{self._path}, line {number}: {problem}; remove the other aspects")
            else:
                yield number, row, aspect, column
        if self._ignored:  # one line at the end, where a release of other terms may have a million
            log.warning("%s: %s with unknown terms or proteins ignored", self._path, counted(self._ignored, "line{s}"))

    def miss(self, number: int, problem: str) -> None:
        """Count a line that is ignored, or refuse it."""
        if self._unknown == "refuse":
            raise DataError(f"{self._path}, line {number}: {problem}; mend it, or set unknown to ignore")
        self._ignored += 1

    def number(self, line: int, text: str, name: str, highest: float) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= highest:  # NaN is neither
            raise DataError(f"{self._path}, line {line}: the {name} {text!r} is not a number from 0 to {highest:g}")
        return value


def _rows(path: Path, columns: int) -> Iterator[_Row]:
    """Line number and fields, split at blanks as cafaeval does."""
    for number, line in numbered_lines(path):
        row = line.split()
        if row and row[0] not in _HEADERS:
            if len(row) < columns:
                raise DataError(f"{path}, line {number}: {columns} columns were expected, got {line.strip()[:60]!r}")
            yield number, row


def _gaf(path: Path, evidence: frozenset[str], since: str, before: str) -> Iterator[_Row]:
    """Line number, protein and term of the annotations that pass (GO Annotation File, format 2.2)."""
    version = ""
    for number, line in numbered_lines(path):
        row = line.split("\t")
        if line.startswith("!"):
            version = line.removeprefix(_GAF).strip() if line.startswith(_GAF) else version
        # Other versions have these columns too, with other contents: nothing else would reveal them.
        elif version != "2.2":
            raise DataError(f"{path}: is GAF {version or 'of no version'}; 2.2 is read: get or convert the file to it")
        elif len(row) < 15:
            raise DataError(f"{path}, line {number}: GAF 2.2 has 17 columns, got {len(row)}; get the file again")
        elif row[6] in evidence and "NOT" not in row[3].split("|") and since <= row[13] < (before or "99999999"):
            yield number, [row[1], row[4]]


def _largest(triples: "list[array[Any]]", shape: tuple[int, int]) -> csr_array:
    rows, columns, scores = map(np.asarray, triples)
    order = np.lexsort((scores, columns, rows))
    rows, columns = rows[order], columns[order]
    # The last of each pair, which is its largest; SciPy itself would add repeats up.
    last = np.append((np.diff(rows) != 0) | (np.diff(columns) != 0), True)
    return csr_array((scores[order][last], (rows[last], columns[last])), shape=shape)
