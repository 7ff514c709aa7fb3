"""The Gene Ontology, or another one in OBO format, as arrays, and scores propagated along it.

In: an OBO file, plain or compressed, read by obonet. Out: an :class:`Aspect` for each namespace, with the relations
is_a and part_of inside it. Relations to another namespace and obsolete terms are left out; an alternative id stands for
its term.

Shape legend: V terms of an aspect, N proteins, B proteins of a block.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from obonet.read import get_sections
from scipy.sparse import csr_array, eye_array, vstack

from esmeray.common.errors import DataError
from esmeray.common.text import did_you_mean
from esmeray.dataset.table import numbered_lines

Method: TypeAlias = Literal["max", "fill"]
Step: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""(P,) terms of one level that have children, (E,) these parent by parent, and (P,) where those of each start."""
_Definition: TypeAlias = tuple[str, list[str], list[str]]
"""Namespace, parents and alternative ids of a term: all that counts of it."""
BLOCK = 256
"""Proteins at a time: the scores of 25,000 terms then take 6 MB as bytes."""
_UPWARDS = ("is_a", "part_of", "BFO:0000050")
"""Relations that hand annotations up; the last is part_of in files that are converted from OWL."""
_STANZA = re.compile(r"\[\w+\]")
_CLAUSE = re.compile(
    r"(?:id|namespace|alt_id|is_a):\s*[^\s!{]|relationship:\s*\S+\s+[^\s!{]"
    r"|(?!(?:id|namespace|alt_id|is_a|relationship):)[^:]+:"
)
"""A key and a value; what is read has one."""
_CUT_OFF = ": the file may be cut off; get it again"


@dataclass(frozen=True)
class Aspect:
    """One namespace of an ontology.

    Attributes:
        terms: V ids, each after its parents.
        levels: (V,) int64 longest way to a term without parents; ascending.
        parents: (V, V) bool, a row's columns are the parents of its term.
    """

    name: str
    terms: tuple[str, ...]
    levels: NDArray[np.int64]
    parents: csr_array

    @cached_property
    def ancestors(self) -> csr_array:
        """(V, V) bool, a row's columns are its term and all above it: the closure of ``parents``, by squaring."""
        reached = self.parents + eye_array(len(self.terms), dtype=bool, format="csr")
        # Each squaring doubles the length of the ways, so that a few do where steps up would need one a level.
        while (further := reached @ reached).nnz > reached.nnz:
            reached = further
        return reached

    @cached_property
    def steps(self) -> list[Step]:
        """Levels from the deepest to the top, each with the children of its terms."""
        children = self.parents.T.tocsr()
        steps = []
        # From below: when a level is reached, all its children, which are on deeper levels, are done.
        for level in range(int(self.levels[-1]) - 1, -1, -1):
            low, high = np.searchsorted(self.levels, [level, level + 1])
            # Terms without children are left out: reduceat gives an empty segment its successor's first value.
            terms = low + np.flatnonzero(np.diff(children.indptr[low : high + 1]))
            first, last = children.indptr[[low, high]]
            steps.append((terms, children.indices[first:last], children.indptr[terms] - first))
        return steps


@dataclass(frozen=True)
class Ontology:
    """Aspects by name, and the term of each alternative id."""

    aspects: dict[str, Aspect]
    alternatives: dict[str, str] = field(default_factory=dict)

    @cached_property
    def positions(self) -> dict[str, tuple[str, int]]:
        """Aspect and column in it of each term and alternative id."""
        columns = {
            term: (name, column) for name, aspect in self.aspects.items() for column, term in enumerate(aspect.terms)
        }
        return columns | {other: columns[term] for other, term in self.alternatives.items()}

    def aspect(self, name: str) -> Aspect:
        """The aspect of this name. Raises DataError where there is none."""
        if name not in self.aspects:
            known = ", ".join(self.aspects)
            raise DataError(f"the ontology has no aspect {name!r}{did_you_mean(name, self.aspects)}; it has {known}")
        return self.aspects[name]


def read_ontology(path: Path) -> Ontology:
    """Read an OBO file, plain or compressed. A term without a namespace belongs to the file's default namespace.

    Raises DataError for a file that is no OBO, was cut off, defines a term twice, or has cyclic relations.

    >>> ontology = esmeray.read_ontology(Path("go.obo"))
    >>> [*ontology.aspects]
    ['molecular_function', 'biological_process', 'cellular_component']
    """
    terms: dict[str, _Definition] = {}
    obsolete = set()
    for term, definition in _terms(path):
        if definition is None:
            obsolete.add(term)  # remembered: a relation to it is left out, one to an unknown term is damage
        # Repeats that say the same are common in files put together from parts of a release.
        elif definition != terms.setdefault(term, definition):
            raise DataError(f"{path}: term {term} is defined twice, differently; remove one")
    if not terms:
        raise DataError(f"{path}: holds no terms; an ontology in OBO format was expected")
    edges: dict[str, list[tuple[str, str]]] = {namespace: [] for namespace, *_ in terms.values()}
    alternatives: dict[str, str] = {}
    for term, (namespace, parents, others) in terms.items():
        for parent in parents:
            if parent not in terms and parent not in obsolete:
                raise DataError(
                    f"{path}: {parent}, a parent of {term}, is not in the file: the file may be cut off, or lack what "
                    "it imports; get it whole"
                )
            # Aspects are evaluated apart, so that a relation between two of them carries no score.
            if parent in terms and terms[parent][0] == namespace:
                edges[namespace].append((term, parent))
        for other in others:
            if other in terms or alternatives.get(other, term) != term:
                raise DataError(
                    f"{path}: {other}, an alternative id of {term}, is a term or that of another; remove one"
                )
            alternatives[other] = term
    ids = {name: [term for term in terms if terms[term][0] == name] for name in edges}
    return Ontology({name: _aspect(path, name, ids[name], edges[name]) for name in edges}, alternatives)


def _terms(path: Path) -> Iterator[tuple[str, _Definition | None]]:
    """Id and definition of each term, in the order of the file; no definition of an obsolete term."""
    _, stanzas, _, header = get_sections(_lines_of_terms(path))  # not read_obo, which merges terms of one id
    if stanzas and _is_cut(stanzas):
        raise DataError(f"{path}: ends inside term {stanzas[-1].get('id', '')!r}{_CUT_OFF}")
    default = header.get("default-namespace", [""])[-1]
    if not any(stanza.get("namespace") for stanza in stanzas):
        default = default or header.get("ontology", "")  # as in MONDO's file, which has no namespaces at all
    for stanza in stanzas:
        term = stanza.get("id", "")
        namespace = stanza.get("namespace") or default
        if not term or not namespace:
            raise DataError(f"{path}: term {term!r} has no id or no namespace, and the header no default{_CUT_OFF}")
        is_obsolete = stanza.get("is_obsolete", "false").lower() == "true"
        yield term, None if is_obsolete else (namespace, _parents(stanza), stanza.get("alt_id", []))


def _is_cut(stanzas: list[dict[str, Any]]) -> bool:
    """Test for a last term that a download left incomplete: an id alone, or no namespace, or the start of one.

    Most downloads that ended early lack a term's parent, which is refused anyway.
    """
    *others, last = stanzas
    namespace = last.get("namespace", "")
    names = {stanza.get("namespace", "") for stanza in others}
    return len(last) < 2 or (namespace not in names and any(name.startswith(namespace) for name in names))


def _lines_of_terms(path: Path) -> Iterator[str]:
    """Lines of the header and of each ``[Term]``, with a blank line before each.

    obonet 1.3 ends a stanza at any blank line, and takes one that follows a comment for the header.
    """
    yield "!"  # for obonet, a header that is empty
    is_read = True
    text = ""
    for number, line in numbered_lines(path):
        text = line.strip()
        if _STANZA.match(text):
            is_read = text.startswith("[Term]")
            yield ""
        elif text and text[0] != "!" and not _CLAUSE.match(text):
            raise DataError(f"{path}, line {number}: {text[:40]!r} is no 'key: value' of OBO; get the file again")
        if is_read and text and text[0] != "!":
            yield text
    if text.replace('\\"', "").count('"') % 2:
        raise DataError(f"{path}: ends inside a quoted text{_CUT_OFF}")


def _parents(stanza: dict[str, list[str]]) -> list[str]:
    relations = [f"is_a {parent}" for parent in stanza.get("is_a", [])] + stanza.get("relationship", [])
    # Of the other relations (regulates ...) none hands annotations up. After the parent may come qualifiers.
    words = [relation.split()[:2] for relation in relations]
    return [parent for relation, parent in words if relation in _UPWARDS]


def _aspect(path: Path, name: str, ids: list[str], edges: list[tuple[str, str]]) -> Aspect:
    """Terms sorted by their level, which is found from the roots down."""
    index = {term: number for number, term in enumerate(ids)}
    pairs = np.array([(index[term], index[parent]) for term, parent in edges], np.int64).reshape(-1, 2)
    parents = csr_array((np.ones(len(pairs), bool), (pairs[:, 0], pairs[:, 1])), shape=(len(ids), len(ids)))
    children = parents.T.tocsr()
    waits_for_V = np.diff(parents.indptr)
    levels_V = np.full(len(ids), -1, np.int64)
    reached = np.flatnonzero(waits_for_V == 0)
    while reached.size:
        levels_V[reached] = levels_V.max() + 1
        below = children[reached].indices
        # A term follows its last parent: its level is that of the longest way, not of the first that reaches it.
        waits_for_V = waits_for_V - np.bincount(below, minlength=len(ids))
        reached = np.unique(below[waits_for_V[below] == 0])
    if (levels_V < 0).any():  # terms of a circle wait for each other, and what is below waits for them
        term = ids[int(levels_V.argmin())]
        raise DataError(f"{path}: is_a and part_of of {name} run in a circle at or above {term}; remove one of them")
    order = np.argsort(levels_V, kind="stable")  # within a level the file's order, so that a file gives one matrix
    return Aspect(name, tuple(ids[number] for number in order), levels_V[order], parents[order][:, order].tocsr())


def propagate(scores: csr_array, aspect: Aspect) -> csr_array:
    """(N, V) scores, not below 0, of any type, of which an ancestor has the largest below it.

    Terms are taken level by level, for some hundred proteins at a time, which keeps the dense part small.
    """
    blocks = []
    for start in range(0, scores.shape[0], BLOCK):
        block_VB = dense(scores[start : start + BLOCK])
        propagate_dense(block_VB, aspect, "max")
        blocks.append(csr_array(block_VB.T))
    return vstack(blocks, format="csr") if blocks else scores.copy()


def dense(rows: csr_array) -> NDArray[Any]:
    """(V, B) of (B, V): a term's scores lie beside each other, since propagation takes whole terms."""
    return rows.T.toarray(order="C")


def propagate_dense(scores_VB: NDArray[Any], aspect: Aspect, method: Method) -> None:
    """Propagate scores, 0 where there is none, to the ancestors, in place, as cafaeval 1.3 does.

    ``max`` gives a term the largest score of itself and its descendants. ``fill`` gives it the largest of its children,
    themselves filled, where its own is 0.
    """
    for terms, children, starts in aspect.steps:
        below = np.maximum.reduceat(scores_VB[children], starts, axis=0)  # one call a level, not one a term
        own = scores_VB[terms]
        scores_VB[terms] = np.maximum(own, below) if method == "max" else np.where(own == 0, below, own)
