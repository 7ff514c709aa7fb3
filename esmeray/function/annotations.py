"""Annotations, predicted scores and term weights, read from files into matrices.

In: GAF, and tables of ids and words (terms, evidence codes, aspects, numbers), plain or compressed; comments (``!`` and
``#``), a header, and CAFA's lines without a protein are skipped. Out: sparse matrices of proteins by terms for each
aspect, with annotations propagated to the ancestors. ``unknown`` decides about terms that are not in the ontology and
predicted proteins without annotation: refuse them, or leave them out and count them.

Shape legend: N proteins, V terms of an aspect.
"""

import logging
import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from esmeray.common.arguments import checked_arguments
from esmeray.common.errors import DataError
from esmeray.common.text import counted
from esmeray.dataset.identifiers import match_ids, without_database
from esmeray.dataset.section import GafDate
from esmeray.dataset.table import MISSING, numbered_lines
from esmeray.function.ontology import Aspect, Ontology

log = logging.getLogger(__name__)

Unknown: TypeAlias = Literal["refuse", "ignore"]
EXPERIMENTAL = ("EXP", "IDA", "IPI", "IMP", "IGI", "IEP", "TAS", "IC", "HTP", "HDA", "HMP", "HGI", "HEP")
"""Experimental evidence codes, single and high-throughput, and the two curator codes (TAS, IC) that CAFA accepts
too."""
EVIDENCE = frozenset(
    (*EXPERIMENTAL, *"NAS ND ISS ISO ISA ISM IGC IBA IBD IKR IMR IRD RCA IEA NR".split())  # noqa: SIM905
)
"""All evidence codes of GO."""
_LABELS = EVIDENCE | {"F", "P", "C", "MF", "BP", "CC", "MFO", "BPO", "CCO", "1", "1.0", "1.00", "1.000"}
"""Words that may follow a term: evidence codes, GO's aspect names in addition to the ontology's own, and a score of 1.
Any other score marks a predicted or an absent term."""
_NUMBER = re.compile(r"\+?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|inf", re.ASCII | re.IGNORECASE)
_TERM = re.compile(r"[A-Za-z]\w*:\S+")
_OTHERS = {
    "GPAD": r"!\s*gpad?-version|(?:[^\t]*\t){5}\s*ECO:",
    "GPI": r"!\s*gpi-version",
    "GAF in an unsupported version": r"!\s*gaf-version(?!:?\s*(?:1\.0|2\.[0-2])\s*$)",
}
"""First lines of unsupported formats. GAF 1.0 to 2.2 have the same columns: before 2.2 the fourth is often empty or
NOT, and 1.0 lacks the last two."""
_OTHER = re.compile("|".join(f"({pattern})" for pattern in _OTHERS.values()), re.IGNORECASE)
_NOT = re.compile(r"\bNOT\b", re.IGNORECASE)
_JOINED = str.maketrans(";,|\"'[]", "       ")
"""Translation table to blanks: separators of terms, and quotes and brackets around a field."""
_BLANKS = re.compile(r"[\s,;]+")
_HEADER = re.compile(r"[^\d:]+")
_CAFA = {"AUTHOR", "MODEL", "KEYWORDS", "ACCURACY", "END"}
"""First words of lines in CAFA's files that name no protein."""


class Row(NamedTuple):
    """A line: its number, its id, and the words after it. ``date`` (YYYYMMDD) is None if the format has no dates."""

    number: int
    id: str
    words: list[str]
    date: str | None = None


@dataclass(frozen=True)
class Annotations:
    """Annotated proteins of one aspect: N ids in file order, and (N, V) bool terms including all ancestors."""

    proteins: tuple[str, ...]
    terms: csr_array

    def of(self, proteins: Sequence[str]) -> csr_array:
        """Return the rows of these proteins, matching any spelling of their ids; rows are empty without annotation."""
        matches = match_ids(proteins, self.proteins, "the proteins", "the annotated proteins", share=0)
        rows = {protein: row for row, protein in enumerate(self.proteins)}
        with_empty = vstack([self.terms, csr_array((1, self.terms.shape[1]), dtype=bool)], format="csr")
        return with_empty[np.array([rows.get(matches.get(protein, ""), len(rows)) for protein in proteins], np.int64)]


@checked_arguments
def read_annotations(
    path: Path,
    ontology: Ontology,
    *,
    proteins: Sequence[str] | Set[str] | None = None,
    aspect: str | None = None,
    unknown: Unknown = "refuse",
    evidence: Sequence[str] | Set[str] = EXPERIMENTAL,
    since: GafDate = "",
    before: GafDate = "",
) -> dict[str, Annotations]:
    """Read the annotations of each aspect in the file, propagated; ``aspect`` selects a single one.

    GAF rows are kept if they have one of these evidence codes and no NOT, and a date (YYYYMMDD) from ``since`` up to
    but excluding ``before``. Rows of a table are filtered in the same way if it has evidence codes. ``proteins``
    restricts the result to these ids; the file may spell them in another way (:mod:`esmeray.dataset.identifiers`). Rows
    left out are counted by reason in the log. Raises DataError for an unreadable file, or if no annotation is left.

    >>> truth = esmeray.read_annotations(Path("truth.tsv"), ontology)
    >>> truth[name].terms.shape == (len(truth[name].proteins), len(ontology.aspects[name].terms))
    True
    """
    ids: dict[str, int] = {}
    # Arrays of C integers: 4 bytes per number, whereas a list keeps an object for each.
    pairs = {name: (array("i"), array("i")) for name in ontology.aspects}
    lines = _Lines(path, ontology, unknown, aspect)
    for row in lines.read(annotation_rows):
        for name, column in lines.annotated(row, evidence, since, before):
            pairs[name][0].append(ids.setdefault(row.id, len(ids)))
            pairs[name][1].append(column)
    # A date range may select few annotations, so a low share of matching ids is no sign of wrong ids.
    share = 0 if since or before else 0.5
    # A file may spell a protein in two ways: its first id stands for both.
    own = {without_database(protein): protein for protein in reversed(ids)}.values()
    matches = match_ids(ids, own if proteins is None else proteins, path, "the sequences", share=share)
    if len(matches) < len(ids):
        log.warning("%s: %s without a sequence left out", path, counted(len(ids) - len(matches), "protein{s}"))
    matched = [matches.get(protein, "") for protein in ids]
    annotations = {}
    for name, (numbers, columns) in pairs.items():
        rows: dict[str, int] = {}
        # A bool matrix, in which repeats, isoforms of a protein and several ways to an ancestor add up to True.
        entries = [
            (rows.setdefault(matched[number], len(rows)), column)
            for number, column in zip(numbers, columns, strict=True)
            if matched[number]
        ]
        if entries:  # aspects without annotations are left out
            shape = len(rows), len(ontology.aspects[name].terms)
            leaves = csr_array((np.ones(len(entries), bool), np.array(entries).T), shape=shape)
            annotations[name] = Annotations(tuple(rows), leaves @ ontology.aspects[name].ancestors)
    if not annotations:
        raise DataError(f"{path}: no annotations left; check terms, evidence codes and dates")
    return annotations


@checked_arguments
def read_scores(
    path: Path,
    ontology: Ontology,
    proteins: Mapping[str, Sequence[str]],
    *,
    aspect: str | None = None,
    unknown: Unknown = "refuse",
) -> dict[str, csr_array]:
    """Read (N, V) float64 scores of these proteins for each aspect that has some, not propagated.

    Ids of the file match other spellings of a protein's id (:mod:`esmeray.dataset.identifiers`), one for each protein.
    If a protein and term have several scores, the largest counts. Rows left out are counted by reason in the log.
    Raises DataError for a score outside 0 to 1, or if fewer than half of the ids match.

    >>> proteins = {name: annotations.proteins for name, annotations in truth.items()}
    >>> scores = esmeray.read_scores(Path("predictions.tsv"), ontology, proteins)
    >>> scores[name].shape == truth[name].terms.shape
    True
    """
    numbers = {name: {protein: row for row, protein in enumerate(names)} for name, names in proteins.items()}
    # A protein may be annotated in one aspect only: predictions for it in other aspects are no error.
    everyone = frozenset().union(*numbers.values())
    # The file is read twice. The id nearest to a protein is known only at its end, and scores of other proteins,
    # perhaps most of a competition's file, should not stay in memory.
    ids = dict.fromkeys(row.id for row in table_rows(path, ontology.positions))
    matches = match_ids(ids, everyone, path, "the annotated proteins", once=True)
    triples: dict[str, list[array[Any]]] = {name: [array("i"), array("i"), array("d")] for name in numbers}
    lines = _Lines(path, ontology, unknown, aspect)
    for row in lines.read(table_rows):
        score = lines.number(row, 1, "score", 1.0)  # first, so that a bad score of any protein is refused
        for name, column in lines.located(row, row.words[0]):
            if row.id not in matches:
                lines.miss(
                    row, f"the protein {row.id!r} has no annotation to evaluate against", "lines for other proteins"
                )
            elif matches[row.id] in numbers.get(name, ()):
                for values, value in zip(triples[name], (numbers[name][matches[row.id]], column, score), strict=True):
                    values.append(value)
    return {
        name: _largest(columns, (len(numbers[name]), len(ontology.aspects[name].terms)))
        for name, columns in triples.items()
        if columns[0]
    }


def read_accretion(path: Path, ontology: Ontology, unknown: Unknown = "refuse") -> dict[str, NDArray[np.float64]]:
    """Read (V,) information accretion in bits for each aspect from a TSV of term and value; missing terms have 0.

    Infinite values and values of alternative ids count as 0, as in cafaeval. Raises DataError for a value below 0.
    """
    accretion = {name: np.zeros(len(aspect.terms)) for name, aspect in ontology.aspects.items()}
    lines = _Lines(path, ontology, unknown)
    for row in lines.read(table_rows):
        value = lines.number(row, 0, "information accretion", math.inf)
        for name, column in lines.located(row, row.id):
            if row.id not in ontology.alternatives and value < math.inf:
                accretion[name][column] = value
    return accretion


def read_terms(path: Path, ontology: Ontology, unknown: Unknown = "refuse") -> dict[str, NDArray[np.bool_]]:
    """Return a (V,) bool mask for each aspect of the terms that a file lists, one or more per line."""
    listed = {name: np.zeros(len(aspect.terms), bool) for name, aspect in ontology.aspects.items()}
    lines = _Lines(path, ontology, unknown)
    for row in lines.read(table_rows):
        for name, column in lines.annotated(row._replace(words=[row.id, *filter(None, row.words)])):
            listed[name][column] = True
    return listed


def information_accretion(annotations: Annotations, aspect: Aspect, proteins: int = 4096) -> NDArray[np.float64]:
    """Return (V,) information accretion in bits: -log2 P(term | all its parents), estimated over the proteins.

    Clark and Radivojac 2013, counted as CAFA's ia.py (claradepaolis/InformationAccretion) does, with a pseudocount of
    one protein that has every term. ``proteins`` is the number of proteins per block, which bounds memory.
    """
    size = len(aspect.terms)
    children = aspect.parents.T.astype(np.int32).tocsr()  # not bool: the product counts parents
    parents_V = np.diff(aspect.parents.indptr)
    # A root has no parents, so every protein is eligible.
    eligible_V = np.where(parents_V == 0, len(annotations.proteins), 0)
    for start in range(0, len(annotations.proteins), proteins):
        held = annotations.terms[start : start + proteins].astype(np.int32) @ children
        eligible_V += np.bincount(held.indices[held.data == parents_V[held.indices]], minlength=size)
    with_term_V = np.bincount(annotations.terms.indices, minlength=size)
    return np.abs(np.log2((1 + with_term_V) / (1 + eligible_V)))  # abs: -log2(1) is -0.0, which would appear in a file


def annotation_rows(path: Path, known: Container[str]) -> Iterator[Row]:
    """Yield rows of GAF, with the term, its evidence code and, if it has one, NOT; or rows of a table.

    ``known``: terms of the ontology. Raises DataError for other formats and versions, by their name.
    """
    is_gaf = False
    for number, line in numbered_lines(path):
        other = None if is_gaf else _OTHER.match(line)
        if other:
            name = [*_OTHERS][int(other.lastindex or 1) - 1]
            raise DataError(f"{path}: is {name} ({line[:20].strip()!r}); download the same annotations as GAF 2")
        cells = [cell.strip() for cell in line.split("\t")]
        # GAF without its version line is recognised by its columns.
        is_gaf = is_gaf or line[:4].lower() == "!gaf" or (len(cells) >= 15 and cells[12].startswith("taxon:"))
        if not line.strip() or line[0] in "!#":
            continue
        if not is_gaf:
            yield from table_rows(path, known)
            return
        if len(cells) < 15:
            raise DataError(
                f"{path}, line {number}: expected the 17 columns of GAF, found {len(cells)}; download the file again"
            )
        words = [cells[4], cells[6].upper(), *["NOT"] * bool(_NOT.search(cells[3]))]
        yield Row(number, cells[1], words, cells[13].replace("-", ""))


def table_rows(path: Path, known: Container[str]) -> Iterator[Row]:
    """Yield the rows of a table: an id, then words.

    The id ends at the first tab or blank, or, in a line without tabs, at a comma or semicolon. Words are separated by
    tabs, blanks, ``;``, ``,`` or ``|``. The first line is a header if it has no known term and no digit or colon, which
    ids of proteins and terms have.
    """
    is_first = True
    for number, line in numbered_lines(path):
        if not line or line[0] in "!#" or line.isspace():
            continue
        record_id, *rest = line.split(None, 1) if "\t" in line else _BLANKS.split(line.strip(), 1)
        words = " ".join(rest).translate(_JOINED).split()
        is_text = record_id in _CAFA or (is_first and _HEADER.fullmatch(line) is not None)
        is_first = is_first and record_id in _CAFA
        if not is_text or any(word in known for word in (record_id, *words)):
            # An empty second column means a protein without terms, as in UniProt's tables.
            record_id = "" if line[0] == "\t" else record_id.strip(' "')
            yield Row(number, record_id, words or [""] * ("\t" in line))


class _Lines:
    """Parser of the words in a file's rows; unknown terms and proteins are refused, or left out and counted."""

    def __init__(self, path: Path, ontology: Ontology, unknown: Unknown, aspect: str | None = None) -> None:
        self._path, self._ontology, self._unknown = path, ontology, unknown
        self._aspect = None if aspect is None else ontology.aspect(aspect).name
        self._labels = _LABELS | {name.upper() for name in ontology.aspects}
        self._left_out: Counter[str] = Counter()

    def read(self, rows_of: Callable[[Path, Container[str]], Iterator[Row]]) -> Iterator[Row]:
        """Yield the file's rows, then log the numbers left out."""
        yield from rows_of(self._path, self._ontology.positions)
        if self._left_out:  # one line at the end: with a different ontology release there may be a million
            log.warning(
                "%s: left out: %s",
                self._path,
                ", ".join(f"{reason}: {number:,}" for reason, number in self._left_out.items()),
            )

    def annotated(
        self, row: Row, evidence: Collection[str] = EVIDENCE, since: str = "", before: str = ""
    ) -> list[tuple[str, int]]:
        """Return aspect and column of each term of a row that passes the filters."""
        self._expect(row, 1)
        if row.date is None and (since or before):
            raise self._refusal(row, "tables have no dates; give a GAF file, or remove the dates")
        words = {word.upper() for word in row.words}
        date = row.date or ""
        reasons = {
            "lines without terms": row.words[0] in MISSING,
            # Dates compare as text; an annotation without a date is outside every range.
            "annotations outside the dates": not since <= date < (before or "99999999"),
            "annotations with NOT": "NOT" in words,
            "annotations with other evidence codes": words & EVIDENCE and words.isdisjoint(evidence),
        }
        holding = [reason for reason, holds in reasons.items() if holds]
        if holding:
            self._left_out[holding[0]] += 1
            return []
        return [position for place, word in enumerate(row.words) for position in self._terms(row, place, word)]

    def _terms(self, row: Row, place: int, word: str) -> list[tuple[str, int]]:
        """Return aspect and column of a term; empty for words that CAFA's files put after a term."""
        if place and word.upper() in self._labels:
            return []
        if place and word not in self._ontology.positions and not _TERM.fullmatch(word):
            raise self._refusal(row, f"{word!r} is not a term, aspect, evidence code or score of 1; remove its column")
        return self.located(row, word)

    def located(self, row: Row, term: str) -> list[tuple[str, int]]:
        """Return aspect and column of a term; empty if it is unknown and left out."""
        aspect, column = self._ontology.positions.get(term, ("", -1))
        if column < 0:
            self.miss(row, f"the term {term!r} is obsolete or not in the ontology", "unknown terms")
            return []
        if self._aspect not in (None, aspect):
            # Refused whatever ``unknown`` says: the term is known, so this is probably the wrong file.
            problem = f"{term} belongs to {aspect}, but only {self._aspect} was requested; remove the other aspects"
            raise self._refusal(row, problem)
        return [(aspect, column)]

    def number(self, row: Row, place: int, name: str, highest: float) -> float:
        """Return the number at a position of a row's words; only an aspect may follow it."""
        self._expect(row, place + 1, *row.words[place + 1 :])
        text = row.words[place]
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
        if not 0 <= value <= highest:  # NaN is neither
            raise self._refusal(row, f"the {name} {text!r} is not a number from 0 to {highest:g}")
        return value

    def _expect(self, row: Row, words: int, *others: str) -> None:
        if row.id in MISSING or len(row.words) < words or any(word.upper() not in self._labels for word in others):
            shown = " ".join((row.id, *row.words))[:60]
            raise self._refusal(row, f"expected {words + 1} columns, found {shown!r}")

    def _refusal(self, row: Row, problem: str) -> DataError:
        return DataError(f"{self._path}, line {row.number}: {problem}")

    def miss(self, row: Row, problem: str, reason: str) -> None:
        """Count a row as left out, or refuse it."""
        if self._unknown == "refuse":
            raise self._refusal(row, f"{problem}; correct it, or set unknown to ignore")
        self._left_out[reason] += 1


def _largest(triples: "list[array[Any]]", shape: tuple[int, int]) -> csr_array:
    rows, columns, scores = map(np.asarray, triples)
    order = np.lexsort((scores, columns, rows))
    rows, columns = rows[order], columns[order]
    # Keep the last of each pair, which is its largest; SciPy itself would sum duplicates.
    last = np.append((np.diff(rows) != 0) | (np.diff(columns) != 0), True)
    return csr_array((scores[order][last], (rows[last], columns[last])), shape=shape)
