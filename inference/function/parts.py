"""The parts of a blend: scores of each predictor for some proteins.

In: a run's data and networks, and of the proteins sequences and vectors. Out: for each aspect and part sparse scores,
propagated, so that no term scores above its parents.

Shape legend: N proteins to predict, R records of the run, M annotated proteins of an aspect, V its terms, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from alignment.prefilter import SharedWords
from alignment.scoring import scoring
from alignment.search import Search
from common.errors import DataError
from dataset.embeddings.manifest import parts as ranges
from dataset.embeddings.reader import open_vectors
from dataset.store.reader import Store
from function.composition import composition
from function.predictors import naive, nearest, transferred
from function.propagation import propagate
from inference.embedding.job import run_job
from inference.embedding.request import JobRequest
from inference.function.classifier import load_probabilities
from inference.function.data import AspectData, FunctionData
from inference.function.network import load_network, probabilities
from train_config.embed_schema import EmbedSection
from train_config.function_schema import COMPOSITION, EmbeddingsSection, FunctionConfig
from train_config.schema import IngestSection

Vectors = NDArray[np.float32]
Network: TypeAlias = Callable[[Any], csr_array]
"""From vectors, or of a classifier sequences, to (N, V) probabilities of an aspect, not propagated."""
_AT_ONCE = 1024
"""Proteins whose probabilities are dense."""


def takes_vectors(config: FunctionConfig) -> bool:
    """True where a part needs embeddings."""
    return "neighbours" in config.parts or ("network" in config.parts and config.network.classifier is None)


def vectors_of(store: Store, ids: Sequence[str], settings: EmbeddingsSection, folder: Path) -> Vectors:
    """(N, C) vectors of all records of a store; computed into ``folder``, where they are not yet.

    Raises DataError where the embeddings that the settings name lack a record, or one is not finite.
    """
    if settings.model == COMPOSITION:
        return composition([store.text(record) for record in range(len(store))])
    if settings.store is not None:
        if not folder.is_symlink():
            folder.symlink_to(Path(settings.store).expanduser().absolute())
    else:
        job = EmbedSection(max_length=settings.max_length, long="crop", format="npy")
        source = [str(store.path)]
        run_job(
            JobRequest([settings.model], source, folder, job, IngestSection(), random_weights=settings.random_weights)
        )
    found = open_vectors(folder, "mean")
    places = {name: place for place, name in enumerate(found.ids)}
    if lost := next((name for name in ids if name not in places), None):
        raise DataError(f"{settings.store or folder}: has no embedding of {lost}; embed all sequences of the run")
    return np.concatenate([block_nC for _, block_nC in found.finite_blocks()])[[places[name] for name in ids]]


class Parts:
    """Predictors on the training proteins of a run, or on all its annotated proteins."""

    def __init__(
        self, folder: Path, config: FunctionConfig, data: FunctionData, vectors_RC: Vectors | None, *, training: bool
    ) -> None:
        self.data, self._config, self._training = data, config, training
        self._vectors_RC = vectors_RC
        self._networks = dict(_networks(folder, config, data)) if "network" in config.parts else {}
        if config.parts == ["network"] and not self._networks:
            raise DataError(
                f"{folder}: no term has network.min_count training proteins; train with fewer or other parts"
            )

    def hits(self, texts: Sequence[str]) -> csr_array | None:
        """(N, R) bit scores; None where homology is no part."""
        if "homology" not in self._config.parts:
            return None
        of, found = self._config.homology, []
        for query in map(str.encode, texts):
            candidates = self._words("", query, of.candidates)
            found.append(self._search.hits(query, of.candidates, of.max_evalue, candidates))
        ends, hits = np.cumsum([0, *map(len, found)]), [hit for some in found for hit in some]
        columns = np.array([hit.record for hit in hits], np.int64)
        return csr_array((np.array([hit.bits for hit in hits]), columns, ends), shape=(len(texts), len(self.data.ids)))

    def scores(
        self, name: str, texts: Sequence[str], vectors_NC: Vectors | None, bits: csr_array | None
    ) -> dict[str, csr_array]:
        """(N, V) scores of an aspect by part."""
        one = self.data.aspects[name]
        chosen = self._members(one)
        terms, records = one.terms[chosen], one.records[chosen]
        found = {}
        if "naive" in self._config.parts:
            found["naive"] = naive(terms, len(texts))
        if bits is not None:
            found["homology"] = transferred(csr_array(bits[:, records]), terms)
        if "neighbours" in self._config.parts and vectors_NC is not None and self._vectors_RC is not None:
            of = self._config.neighbours
            mean_C = self._vectors_RC.mean(axis=0)
            near = nearest(vectors_NC - mean_C, self._vectors_RC[records] - mean_C, of.number, of.temperature)
            found["neighbours"] = transferred(near, terms)
        if name in self._networks:
            given: Any = vectors_NC if self._config.network.classifier is None else texts
            blocks = [self._networks[name](given[start:stop]) for start, stop in ranges(len(texts), _AT_ONCE)]
            found["network"] = propagate(vstack(blocks, format="csr"), one.aspect)
        return found

    @cached_property
    def _search(self) -> Search:
        return Search(self.data.store, scoring())

    @cached_property
    def _words(self) -> SharedWords:
        known = [one.records[self._members(one)] for one in self.data.aspects.values()]
        return SharedWords(self.data.store, np.unique(np.concatenate(known)))

    def _members(self, one: AspectData) -> NDArray[np.int64]:
        return np.flatnonzero(one.training | (not self._training))


def _networks(folder: Path, config: FunctionConfig, data: FunctionData) -> Iterator[tuple[str, Network]]:
    for name, one in data.aspects.items():
        if not one.learnt(config.network.min_count).size:
            continue
        if config.network.classifier is not None:
            yield name, load_probabilities(folder, name, one)
        else:
            network = load_network(network_path(folder, name))
            yield name, partial(probabilities, network, terms=len(one.aspect.terms))


def network_path(folder: Path, aspect: str) -> Path:
    """File of an aspect's network."""
    return folder / f"network_{aspect}.safetensors"
