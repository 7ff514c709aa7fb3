"""The Gene Ontology, or another one in OBO format, as arrays, and scores propagated along it.

In: an OBO file, plain or compressed. Out: an :class:`Aspect` for each namespace, with the relations is_a and part_of
inside it. Relations to another namespace and obsolete terms are left out; an alternative id stands for its term.

Shape legend: V terms of an aspect, N proteins, B proteins of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, eye_array, vstack
from xopen import xopen

from esmeray.common.errors import DataError
from esmeray.common.text import did_you_mean
from esmeray.dataset.fasta.locate import DECOMPRESSION_ERRORS

Method: TypeAlias = Literal["max", "fill"]
Step: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""(P,) terms of one level that have children, (E,) these parent by parent, and (P,) where those of each start."""
BLOCK = 256
"""Proteins at a time: the scores of 25,000 terms then take 6 MB as bytes."""


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


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line of a file, plain or compressed. Raises DataError where it can't be read."""
    try:
        with xopen(path, encoding="utf-8", threads=0) as file:
            yield from enumerate(file, 1)
    except (*DECOMPRESSION_ERRORS, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from error


def read_ontology(path: Path) -> Ontology:
    """Read an OBO file.

    Raises DataError for a file that is no OBO, was cut off, defines a term twice, or has cyclic relations.

    >>> ontology = esmeray.read_ontology(Path("go.obo"))
    >>> [*ontology.aspects]
    ['molecular_function', 'biological_process', 'cellular_component']
    """
    terms: dict[str, dict[str, list[str]]] = {}
    obsolete = set()
    for stanza in _stanzas(path):
        term = stanza.get("id", [""])[0]
        if stanza.get("is_obsolete", [""])[0].startswith("true"):
            obsolete.add(term)  # remembered: a relation to it is left out, one to an unknown term is damage
            continue
        if not term or "namespace" not in stanza:
            raise DataError(f"{path}: term {term!r} has no namespace: the file may be cut off; get it again")
        # Repeats that say the same are common in files put together from parts of a release.
        if _read_of(stanza) != _read_of(terms.setdefault(term, stanza)):
            raise DataError(f"{path}: term {term} is defined twice, differently; remove one")
    if not terms:
        raise DataError(f"{path}: holds no terms; an ontology in OBO format was expected")
    edges: dict[str, list[tuple[str, str]]] = {stanza["namespace"][0]: [] for stanza in terms.values()}
    alternatives: dict[str, str] = {}
    for term, stanza in terms.items():
        namespace = stanza["namespace"][0]
        for parent in _parents(stanza):
            if parent not in terms and parent not in obsolete:
                raise DataError(
                    f"{path}: {parent}, a parent of {term}, is not in the file: it may be cut off; get it again"
                )
            # Aspects are evaluated apart, so that a relation between two of them carries no score.
            if parent in terms and terms[parent]["namespace"][0] == namespace:
                edges[namespace].append((term, parent))
        for other in stanza.get("alt_id", []):
            if other in terms or alternatives.get(other, term) != term:
                raise DataError(
                    f"{path}: {other}, an alternative id of {term}, is a term or that of another; remove one"
                )
            alternatives[other] = term
    ids = {name: [term for term in terms if terms[term]["namespace"][0] == name] for name in edges}
    return Ontology({name: _aspect(path, name, ids[name], edges[name]) for name in edges}, alternatives)


def _stanzas(path: Path) -> Iterator[dict[str, list[str]]]:
    """Values by key of each ``[Term]``.

    Our own, in nineteen statements: obonet (1.3) takes 3.0 s to read GO of 2013, which are 1.0 s here with the matrices
    made of it; goatools (1.6) takes 0.7 s, and brings statsmodels, openpyxl and pydot.
    """
    stanza: dict[str, list[str]] | None = None  # none in the header and in a [Typedef], whose lines are passed over
    line = "\n"
    for number, line in lines_of(path):
        text = line.strip()
        if text.startswith("["):
            if stanza is not None:
                yield stanza
            stanza = {} if text == "[Term]" else None
        elif stanza is not None and text and not text.startswith("!"):
            key, colon, value = text.partition(":")
            if not colon:
                raise DataError(f"{path}, line {number}: {text[:40]!r} is no 'key: value' of OBO; get the file again")
            stanza.setdefault(key, []).append(value.strip())
    # Before the last stanza is given: a term whose line is cut off would be another term.
    if not line.endswith("\n"):
        raise DataError(f"{path}: ends inside a line: the file is cut off; get it again")
    if stanza is not None:
        yield stanza


def _read_of(stanza: dict[str, list[str]]) -> tuple[list[str], ...]:
    """All that counts of a term."""
    return stanza["namespace"], _parents(stanza), stanza.get("alt_id", [])


def _parents(stanza: dict[str, list[str]]) -> list[str]:
    relations = [f"is_a {parent}" for parent in stanza.get("is_a", [])] + stanza.get("relationship", [])
    # Of the other relations (regulates ...) none hands annotations up. After the parent come qualifiers and comments.
    words = [relation.split()[:2] for relation in relations]
    return [pair[1] for pair in words if len(pair) == 2 and pair[0] in ("is_a", "part_of")]


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
