"""The Gene Ontology, or another one in OBO format, as arrays; score propagation along it.

In: an OBO file, plain or compressed, read by obonet. Out: an :class:`Aspect` for each namespace, with the relations
is_a and part_of inside it. Relations to another namespace and obsolete terms are left out; an alternative id is mapped
to its term.

Shape legend: V terms of an aspect, N proteins, B proteins of a block.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from obonet.read import get_sections
from scipy.sparse import csr_array, eye_array, vstack

from esmeray.common.arguments import checked_arguments
from esmeray.common.errors import DataError, did_you_mean
from esmeray.dataset.table import numbered_lines

Method: TypeAlias = Literal["max", "fill"]
BLOCK = 256
"""Proteins per block: the scores of 25,000 terms then take 6 MB as bytes."""
_UPWARDS = ("is_a", "part_of", "BFO:0000050")
"""Relations that propagate annotations upwards; the last is part_of in files converted from OWL."""
_LINE = re.compile(r"!|\[\w+\]|[^:]+:")
"""A comment, the start of a stanza, or a key with its value."""
_CUT_OFF = ": the file may be truncated; download it again"


@dataclass(frozen=True)
class Aspect:
    """One namespace of an ontology.

    Attributes:
        terms: V ids, each after its parents.
        levels: (V,) int64 length of the longest path to a term without parents; ascending.
        parents: (V, V) bool; the columns of a row are the parents of its term.
    """

    name: str
    terms: tuple[str, ...]
    levels: NDArray[np.int64]
    parents: csr_array

    @cached_property
    def ancestors(self) -> csr_array:
        """(V, V) bool; the columns of a row are its term and its ancestors: the transitive closure of ``parents``."""
        reached = self.parents + eye_array(len(self.terms), dtype=bool, format="csr")
        # Each squaring doubles the path length: a few squarings replace one step per level.
        while (further := reached @ reached).nnz > reached.nnz:
            reached = further
        return reached

    @cached_property
    def steps(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
        """Levels from the deepest to the top, each with the children of its terms.

        A level has (P,) terms that have children, (E,) their children grouped by parent, and (P,) start of each group.
        """
        children = self.parents.T.tocsr()
        steps = []
        # Bottom-up: all children of a level are on deeper levels, which are done.
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
        """Aspect of each term and alternative id, and its column in the aspect."""
        columns = {
            term: (name, column) for name, aspect in self.aspects.items() for column, term in enumerate(aspect.terms)
        }
        return columns | {other: columns[term] for other, term in self.alternatives.items()}

    def aspect(self, name: str) -> Aspect:
        """Return the aspect of this name. Raises DataError if there is none."""
        if name not in self.aspects:
            known = ", ".join(self.aspects)
            raise DataError(
                f"the ontology has no aspect {name!r}{did_you_mean(name, self.aspects)}; available: {known}"
            )
        return self.aspects[name]


@checked_arguments
def read_ontology(path: Path) -> Ontology:
    """Read an OBO file, plain or compressed. A term without a namespace belongs to the file's default namespace.

    Raises DataError for a file that is not OBO, was cut off, defines a term twice, or has cyclic relations.

    >>> ontology = esmeray.read_ontology(Path("go.obo"))
    >>> [*ontology.aspects]
    ['molecular_function', 'biological_process', 'cellular_component']
    """
    stanzas, default = _stanzas(path)
    # Namespace, parents and alternative ids of a term: all fields that are compared and used.
    terms: dict[str, tuple[str, list[str], list[str]]] = {}
    obsolete = set()
    for stanza in stanzas:
        term = stanza.get("id", "")
        namespace = stanza.get("namespace") or default
        if not term or not namespace:
            raise DataError(
                f"{path}: term {term!r} has no id, or no namespace although the header has no default{_CUT_OFF}"
            )
        definition = (namespace, _parents(stanza), sorted({*stanza.get("alt_id", [])}))
        if stanza.get("is_obsolete", "").lower() == "true":
            obsolete.add(term)  # a relation to an obsolete term is left out, one to an unknown term is an error
        # Identical repeats are common in files put together from parts of a release.
        elif definition != terms.setdefault(term, definition):
            raise DataError(f"{path}: term {term} has two different definitions; remove one")
    if not terms:
        raise DataError(f"{path}: contains no terms; expected an ontology in OBO format")
    parents_of: dict[str, dict[str, list[str]]] = {namespace: {} for namespace, *_ in terms.values()}
    alternatives: dict[str, str] = {}
    for term, (namespace, parents, others) in terms.items():
        lost = [parent for parent in parents if parent not in terms and parent not in obsolete]
        if lost:
            raise DataError(
                f"{path}: {lost[0]}, a parent of {term}, is not in the file: the file may be truncated, or "
                "import another one; download the complete ontology"
            )
        # Aspects are evaluated separately: a relation between two of them propagates no score.
        parents_of[namespace][term] = [parent for parent in parents if terms.get(parent, ("",))[0] == namespace]
        for other in others:
            if other in terms or alternatives.get(other, term) != term:
                raise DataError(
                    f"{path}: {other}, an alternative id of {term}, is also a term or an alternative id of "
                    "another term; remove one"
                )
            alternatives[other] = term
    return Ontology({name: _aspect(path, name, parents_of[name]) for name in parents_of}, alternatives)


def _stanzas(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the ``[Term]`` stanzas by key, and the namespace of terms that name none."""
    lines = ["!"]  # a header for obonet if the file has none
    for number, line in numbered_lines(path):
        text = line.strip()
        if text and not _LINE.match(text):
            raise DataError(
                f"{path}, line {number}: {text[:40]!r} is not a 'key: value' line of OBO; download the file again"
            )
        # obonet 1.3 ends a stanza at any blank line, and reads a stanza after a comment as the header.
        if text and text[0] != "!":
            lines.append(text)
    header, *stanzas = re.split(r"\n(?=\[)", "\n".join(lines))
    of_terms = [stanza for stanza in stanzas if stanza.startswith("[Term]")]
    # read_obo would merge terms with the same id.
    _, terms, _, keys = get_sections(iter("\n\n".join([header, *of_terms]).split("\n")))
    default = keys.get("default-namespace", [""])[-1]
    if not any("namespace" in term for term in terms):
        default = default or keys.get("ontology", "")  # as in MONDO's file, which has no namespaces at all
    if terms and _is_cut(terms, default, lines[-1]):
        raise DataError(f"{path}: ends inside term {terms[-1].get('id', '')!r}{_CUT_OFF}")
    return terms, default


def _is_cut(terms: list[dict[str, Any]], default: str, last_line: str) -> bool:
    """Test for a last term that a download left incomplete: an open quote, only an id, or part of a namespace.

    Most truncated downloads lack a term's parent, which is refused anyway.
    """
    *others, last = terms
    namespaces = {term.get("namespace", default) for term in others}
    start = last.get("namespace", "")
    is_new = (start or default) not in namespaces
    is_open = last_line.replace('\\"', "").count('"') % 2 == 1
    return is_open or len(last) < 2 or (is_new and any(name.startswith(start) for name in namespaces))


def _parents(stanza: dict[str, list[str]]) -> list[str]:
    relations = [f"is_a {parent}" for parent in stanza.get("is_a", [])] + stanza.get("relationship", [])
    # Other relations (regulates ...) propagate no annotations. Qualifiers may follow the parent; a truncated line has
    # no parent.
    words = [[*relation.split(), ""][:2] for relation in relations]
    return sorted({parent for relation, parent in words if relation in _UPWARDS})


def _aspect(path: Path, name: str, parents_of: dict[str, list[str]]) -> Aspect:
    """Return the aspect with terms sorted by level, within a level in file order: deterministic for a file."""
    levels: dict[str, int] = {}
    try:
        for term in TopologicalSorter(parents_of).static_order():
            levels[term] = 1 + max((levels[parent] for parent in parents_of[term]), default=-1)
    except CycleError as error:
        circle = " to ".join(error.args[1])
        raise DataError(f"{path}: is_a and part_of of {name} form a cycle: {circle}; remove one of them") from error
    terms = sorted(parents_of, key=levels.__getitem__)
    index = {term: number for number, term in enumerate(terms)}
    pairs = [(index[term], index[parent]) for term in terms for parent in parents_of[term]]
    rows, columns = np.array(pairs, np.int64).reshape(-1, 2).T
    parents = csr_array((np.ones(len(pairs), bool), (rows, columns)), shape=(len(terms), len(terms)))
    return Aspect(name, tuple(terms), np.array([levels[term] for term in terms], np.int64), parents)


def propagate(scores: csr_array, aspect: Aspect) -> csr_array:
    """Return (N, V) scores in which an ancestor has at least the largest score below it; any dtype, not below 0.

    Works level by level on blocks of a few hundred proteins, which keeps the dense part small.
    """
    blocks = []
    for start in range(0, scores.shape[0], BLOCK):
        block_VB = dense(scores[start : start + BLOCK])
        propagate_dense(block_VB, aspect, "max")
        blocks.append(csr_array(block_VB.T))
    return vstack(blocks, format="csr") if blocks else scores.copy()


def dense(rows: csr_array) -> NDArray[Any]:
    """Return (B, V) rows as dense (V, B): a term's scores are contiguous, since propagation works on whole terms."""
    return rows.T.toarray(order="C")


def propagate_dense(scores_VB: NDArray[Any], aspect: Aspect, method: Method) -> None:
    """Propagate scores to the ancestors in place, as cafaeval 1.3 does; 0 means no score.

    ``max`` gives a term the largest score of itself and its descendants. ``fill`` gives it the largest score of its
    children, themselves filled, if its own is 0.
    """
    for terms, children, starts in aspect.steps:
        below = np.maximum.reduceat(scores_VB[children], starts, axis=0)  # one call per level
        own = scores_VB[terms]
        scores_VB[terms] = np.maximum(own, below) if method == "max" else np.where(own == 0, below, own)
