"""Parts of a blend: sparse scores of each predictor, propagated so that no term scores above its parents.

Shape legend: N proteins to predict, R records of the run, M annotated proteins of an aspect, V terms of an aspect, K
learnt terms of all aspects, C channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array, vstack

from esmeray.alignment.scoring import scoring
from esmeray.alignment.search import Search, SharedWords
from esmeray.dataset.embeddings.manifest import ranges
from esmeray.dataset.targets import LabelSpace
from esmeray.function.ontology import propagate
from esmeray.function.predictors import naive, nearest, pruned, transferred
from esmeray.function.proteins import AspectData, FunctionData
from esmeray.function.ranker import Candidates, candidates
from esmeray.function.vectors import Vectors
from esmeray.inference.classifier import ClassifierPipeline
from esmeray.tasks.terms.model import load_vector_classifier
from esmeray.tasks.terms.section import TermsSection


class Queries(NamedTuple):
    """Inputs of the parts for N proteins. Inputs that no part reads are None or empty.

    Attributes:
        lengths: (N,) residues.
        vectors: (N, C) embeddings.
        bits: (N, R) bit scores.
        learnt: (N, V) network probabilities by aspect.
    """

    lengths: NDArray[np.int64]
    vectors: Vectors | None
    bits: csr_array | None
    learnt: dict[str, csr_array]


Network = tuple[LabelSpace, Callable[[Sequence[str], Vectors | None], NDArray]]
"""The K learnt terms, and a function from sequences and vectors to (N, K) probabilities."""
CANDIDATES = 500
"""Annotated proteins to align to each query: those that share the most 4-mers, as in align's prefilter kmer."""
MAX_EVALUE = 1e-3
NEIGHBOURS = 10
"""Number of nearest proteins to take terms from."""
TEMPERATURE = 0.05
"""Temperature of the weights: a neighbour has weight exp(cosine / temperature)."""
_AT_ONCE = 1024
"""Proteins per block of dense probabilities."""


def takes_vectors(terms: TermsSection) -> bool:
    return "neighbours" in terms.parts or ("network" in terms.parts and terms.network == "vectors")


def open_network(export: Path, terms: TermsSection) -> Network:
    """Open the network that a run exported. Raises DataError if it is damaged."""
    if terms.network == "backbone":
        # Uncalibrated, as when the ranker was fitted.
        pipeline = ClassifierPipeline.load(export, calibrated=False)
        return pipeline.label_space, lambda texts, _: pipeline.predict_clean(texts).probabilities
    model = load_vector_classifier(export)

    @torch.inference_mode()
    def probabilities(texts: Sequence[str], vectors_NC: Vectors | None) -> NDArray:
        return model.head(model.input_scale(torch.from_numpy(vectors_NC))).sigmoid().numpy()

    return model.label_space, probabilities


@dataclass
class Parts:
    """Predictors that use a run's training proteins, or all of its annotated proteins."""

    export: Path
    terms: TermsSection
    data: FunctionData
    vectors: Vectors | None
    training: bool

    def queries(self, texts: Sequence[str], vectors_NC: Vectors | None) -> Queries:
        """Compute the inputs of :meth:`scores`, once for all aspects: search and network don't depend on the aspect."""
        return Queries(
            np.array([*map(len, texts)], np.int64), vectors_NC, self._hits(texts), self._learnt(texts, vectors_NC)
        )

    def _hits(self, texts: Sequence[str]) -> csr_array | None:
        """(N, R) bit scores; None if homology is not a part."""
        if "homology" not in self.terms.parts:
            return None
        rows = []
        for query in map(str.encode, texts):
            # Only records that share words with the query are aligned: aligning all costs many times as much.
            shared = self._words("", query, CANDIDATES)
            rows.append(self._search.hits(query, CANDIDATES, MAX_EVALUE, shared))
        ends = np.cumsum([0, *map(len, rows)])
        hits = [hit for row in rows for hit in row]
        return csr_array(
            (np.array([hit.bits for hit in hits]), np.array([hit.record for hit in hits], np.int64), ends),
            shape=(len(texts), len(self.data.ids)),
        )

    def _learnt(self, texts: Sequence[str], vectors_NC: Vectors | None) -> dict[str, csr_array]:
        """(N, V) probabilities by aspect, for aspects with terms that the network knows; empty if it is not a part."""
        if self._network is None:
            return {}
        space, probabilities = self._network
        # Dense for one block at a time and pruned immediately: of thousands of terms few are likely.
        blocks = []
        for start, stop in ranges(len(texts), _AT_ONCE):
            vectors_nC = None if vectors_NC is None else vectors_NC[start:stop]
            dense_nV = probabilities(texts[start:stop], vectors_nC).astype(float)
            blocks.append(pruned(csr_array(dense_nV)))
        scores = csr_array(vstack(blocks, format="csr")) if blocks else csr_array((0, len(space.names)))
        columns = {term: column for column, term in enumerate(space.names)}
        learnt = {}
        for name, aspect in self.data.aspects.items():
            terms = aspect.aspect.terms
            known = [(columns[term], index) for index, term in enumerate(terms) if term in columns]
            if known:
                # A matrix product moves the columns of the network's terms to their columns in the aspect.
                selected_KV = csr_array((np.ones(len(known)), np.transpose(known)), shape=(len(columns), len(terms)))
                # The network does not learn rare terms; those that are parents of learnt terms get their children's
                # scores.
                learnt[name] = propagate(csr_array(scores @ selected_KV), aspect.aspect)
        return learnt

    def scores(self, name: str, queries: Queries, rows: Any = slice(None)) -> dict[str, csr_array]:
        """(N, V) scores of an aspect by part, for the given rows of the queries."""
        aspect = self.data.aspects[name]
        members = self._members(aspect)
        terms, records = aspect.terms[members], aspect.records[members]
        scores = {}
        if "naive" in self.terms.parts:
            scores["naive"] = naive(terms, len(queries.lengths[rows]))
        if queries.bits is not None:
            scores["homology"] = transferred(csr_array(queries.bits[rows][:, records]), terms)
        if "neighbours" in self.terms.parts and queries.vectors is not None and self.vectors is not None:
            # Vectors of one model share a large mean. Without centering, every cosine would be near 1.
            mean_C = self.vectors.mean(axis=0)
            known_MC = self.vectors[records] - mean_C
            near = nearest(queries.vectors[rows] - mean_C, known_MC, NEIGHBOURS, TEMPERATURE)
            scores["neighbours"] = transferred(near, terms)
        if name in queries.learnt:
            scores["network"] = csr_array(queries.learnt[name][rows])
        return scores

    def candidates(
        self, name: str, queries: Queries, scores: dict[str, csr_array], blend: csr_array, rows: Any = slice(None)
    ) -> Candidates:
        """Proteins and terms for the ranker, from the results of :meth:`scores` and their blend."""
        aspect = self.data.aspects[name]
        near, terms = self._near(name, queries, rows), aspect.terms[self._members(aspect)]
        return candidates(scores, blend, near, terms, aspect.aspect, aspect.accretion)

    def similarity(self, name: str, queries: Queries, rows: Any = slice(None)) -> tuple[NDArray, NDArray]:
        """(V,) frequency of the terms of an aspect, and (N,) bits per residue of the best hit, for sets."""
        aspect = self.data.aspects[name]
        terms = aspect.terms[self._members(aspect)]
        frequency_V = np.bincount(terms.indices, minlength=terms.shape[1]) / terms.shape[0]
        return frequency_V, self._near(name, queries, rows).max(axis=1).toarray().ravel()

    def _near(self, name: str, queries: Queries, rows: Any) -> csr_array:
        """(N, M) bits per residue of the hits among the annotated proteins of an aspect; empty without homology."""
        records = self.data.aspects[name].records[self._members(self.data.aspects[name])]
        lengths_N = queries.lengths[rows]
        if queries.bits is None:
            return csr_array((len(lengths_N), len(records)))
        # Normalized by length: about 2 bits per residue is the protein itself, whatever its length.
        return csr_array(diags_array(1 / lengths_N) @ queries.bits[rows][:, records])

    @cached_property
    def _network(self) -> Network | None:
        return open_network(self.export, self.terms) if "network" in self.terms.parts else None

    @cached_property
    def _search(self) -> Search:
        return Search(self.data.store, scoring())

    @cached_property
    def _words(self) -> SharedWords:
        return SharedWords(
            self.data.store,
            np.unique(np.concatenate([aspect.records[self._members(aspect)] for aspect in self.data.aspects.values()])),
        )

    def _members(self, aspect: AspectData) -> NDArray[np.int64]:
        # Weights are fitted on parts that know training proteins only. Predictions use all annotated proteins.
        return np.flatnonzero(aspect.training | (not self.training))
