"""The parts of a blend: scores of each predictor for some proteins, sparse and propagated, so that no term scores above
its parents.

Shape legend: N proteins to predict, R records of the run, M annotated proteins of an aspect, V its terms, K terms that
are learnt, of all aspects, C channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from esmeray.alignment.prefilter import SharedWords
from esmeray.alignment.scoring import scoring
from esmeray.alignment.search import Search
from esmeray.dataset.embeddings.manifest import parts as ranges
from esmeray.dataset.labels.label_space import LabelSpace
from esmeray.function.ontology import propagate
from esmeray.function.predictors import naive, nearest, pruned, transferred
from esmeray.function.proteins import AspectData, FunctionData
from esmeray.function.vectors import Vectors
from esmeray.inference.classifier import ClassifierPipeline
from esmeray.tasks.terms.export import load_vector_classifier
from esmeray.tasks.terms.section import TermsSection

Network = tuple[LabelSpace, Callable[[Sequence[str], Vectors | None], NDArray]]
"""The K terms that are learnt, and from sequences and vectors to (N, K) probabilities."""
_AT_ONCE = 1024
"""Proteins whose probabilities are dense."""


def takes_vectors(terms: TermsSection) -> bool:
    return "neighbours" in terms.parts or ("network" in terms.parts and terms.network == "vectors")


def open_network(export: Path, terms: TermsSection) -> Network:
    """The network that a run exported. Raises DataError where it is damaged."""
    if terms.network == "backbone":
        pipeline = ClassifierPipeline.load(export)
        return pipeline.label_space, lambda texts, _: pipeline.predict(texts).probabilities
    model = load_vector_classifier(export)

    @torch.inference_mode()
    def probabilities(texts: Sequence[str], vectors_NC: Vectors | None) -> NDArray:
        return model.head(model.input_scale(torch.from_numpy(vectors_NC))).sigmoid().numpy()

    return model.label_space, probabilities


@dataclass
class Parts:
    """Predictors on the training proteins of a run, or on all its annotated proteins."""

    export: Path
    terms: TermsSection
    data: FunctionData
    vectors: Vectors | None
    training: bool

    def __post_init__(self) -> None:
        self._network = open_network(self.export, self.terms) if "network" in self.terms.parts else None

    def hits(self, texts: Sequence[str]) -> csr_array | None:
        """(N, R) bit scores; None where homology is no part."""
        if "homology" not in self.terms.parts:
            return None
        homology, rows = self.terms.homology, []
        for query in map(str.encode, texts):
            candidates = self._words("", query, homology.candidates)
            rows.append(self._search.hits(query, homology.candidates, homology.max_evalue, candidates))
        ends, hits = np.cumsum([0, *map(len, rows)]), [hit for row in rows for hit in row]
        columns = np.array([hit.record for hit in hits], np.int64)
        return csr_array((np.array([hit.bits for hit in hits]), columns, ends), shape=(len(texts), len(self.data.ids)))

    def learnt(self, texts: Sequence[str], vectors_NC: Vectors | None) -> dict[str, csr_array]:
        """(N, V) probabilities of each aspect that has terms which the network knows; none where it is no part."""
        if self._network is None:
            return {}
        space, probabilities = self._network
        blocks = []
        for start, stop in ranges(len(texts), _AT_ONCE):
            vectors_nC = None if vectors_NC is None else vectors_NC[start:stop]
            blocks.append(pruned(csr_array(probabilities(texts[start:stop], vectors_nC).astype(float))))
        scores = csr_array(vstack(blocks, format="csr")) if blocks else csr_array((0, len(space.names)))
        columns = {term: column for column, term in enumerate(space.names)}
        learnt = {}
        for name, aspect in self.data.aspects.items():
            places = [place for place, term in enumerate(aspect.aspect.terms) if term in columns]
            if places:
                chosen = csr_array(scores[:, [columns[aspect.aspect.terms[place]] for place in places]])
                shape = len(texts), len(aspect.aspect.terms)
                spread = csr_array((chosen.data, np.array(places)[chosen.indices], chosen.indptr), shape=shape)
                learnt[name] = propagate(spread, aspect.aspect)
        return learnt

    def scores(
        self, name: str, vectors_NC: Vectors | None, bits: csr_array | None, learnt: csr_array | None, queries: int
    ) -> dict[str, csr_array]:
        """(N, V) scores of an aspect by part, of what :meth:`hits` and :meth:`learnt` gave for these proteins."""
        aspect = self.data.aspects[name]
        members = self._members(aspect)
        terms, records = aspect.terms[members], aspect.records[members]
        scores = {}
        if "naive" in self.terms.parts:
            scores["naive"] = naive(terms, queries)
        if bits is not None:
            scores["homology"] = transferred(csr_array(bits[:, records]), terms)
        if "neighbours" in self.terms.parts and vectors_NC is not None and self.vectors is not None:
            settings = self.terms.neighbours
            mean_C = self.vectors.mean(axis=0)
            near = nearest(vectors_NC - mean_C, self.vectors[records] - mean_C, settings.number, settings.temperature)
            scores["neighbours"] = transferred(near, terms)
        if learnt is not None:
            scores["network"] = learnt
        return scores

    @cached_property
    def _search(self) -> Search:
        return Search(self.data.store, scoring())

    @cached_property
    def _words(self) -> SharedWords:
        known = [aspect.records[self._members(aspect)] for aspect in self.data.aspects.values()]
        return SharedWords(self.data.store, np.unique(np.concatenate(known)))

    def _members(self, aspect: AspectData) -> NDArray[np.int64]:
        return np.flatnonzero(aspect.training | (not self.training))
