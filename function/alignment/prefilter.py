"""Prefilters of a search: the records that are worth an exact alignment with a query.

``SharedWords`` ranks by words of three residues, of which related proteins share more than their lengths explain;
``EmbeddingNeighbours`` by the cosine of embeddings that ``python -m tools embed`` made. Both lose hits, in numbers that
docs/function.md gives; neither changes a score.

Shape legend: N records, M candidates, W distinct words of a record, C channels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from dataset.embeddings.reader import open_vectors
from dataset.fasta.alphabet import AMINO_ACIDS
from dataset.store.reader import Store

_WORD = 3
_LETTERS = len(AMINO_ACIDS)
_WORDS = _LETTERS**_WORD
_CODES = np.full(256, _WORDS, np.int32)
_CODES[np.frombuffer(AMINO_ACIDS.encode(), np.uint8)] = np.arange(_LETTERS)
"""Of a letter; those that are no amino acid give words beyond the last, which are left out."""


class Prefilter(Protocol):
    """Candidates of a query."""

    def __call__(self, query_id: str, query: bytes, count: int) -> NDArray[np.int64]:
        """(M,) at most ``count`` records, ascending."""


class SharedWords:
    """An index of the words of a store; 4 bytes a residue, and 16 while it is made."""

    def __init__(self, store: Store) -> None:
        words = [_distinct_words(store.sequence(record)) for record in range(len(store))]
        self._counts_N = np.array([len(one) for one in words], np.int64)
        all_words = np.concatenate([np.empty(0, np.int16), *words])
        self._records = np.repeat(np.arange(len(store), dtype=np.int32), self._counts_N)
        self._records = self._records[np.argsort(all_words, kind="stable")]
        self._ends = np.bincount(all_words, minlength=_WORDS).cumsum()

    def __call__(self, query_id: str, query: bytes, count: int) -> NDArray[np.int64]:
        """Records by the words that they share with the query, less the number expected, in standard deviations."""
        words_W = _distinct_words(np.frombuffer(query.upper(), np.uint8))
        parts = [self._records[self._ends[word - 1] if word else 0 : self._ends[word]] for word in words_W.tolist()]
        shared_N = np.bincount(np.concatenate([np.empty(0, np.int32), *parts]), minlength=len(self._counts_N))
        expected_N = self._counts_N * (len(words_W) / _WORDS)
        return _largest((shared_N - expected_N) / np.sqrt(expected_N + 1), count)


class EmbeddingNeighbours:
    """Vectors of a store and of the queries, one a protein, matched to them by id; 4 bytes a value in memory."""

    def __init__(self, store: Store, vectors: Path, queries: Path) -> None:
        self._queries, records = open_vectors(queries), open_vectors(vectors)
        self._numbers = {name: number for number, name in enumerate(self._queries.ids)}
        if self._queries.channels != records.channels:
            raise DataError(f"{queries}: {self._queries.channels:,} channels, and {vectors} has {records.channels:,}")
        if [store.id(record) for record in range(len(store))] != records.ids:
            raise DataError(f"{vectors}: its proteins are not those of {store.path} in their order; embed the store")
        self._vectors_NC = np.concatenate([_unit(block_nC) for _, block_nC in records.finite_blocks()])

    def __call__(self, query_id: str, query: bytes, count: int) -> NDArray[np.int64]:
        """Records of the largest cosines. Raises DataError for a query without a vector."""
        if query_id not in self._numbers:
            raise DataError(f"{self._queries.folder}: has no protein {query_id!r}; embed the queries")
        vector_1C = _unit(self._queries[self._numbers[query_id]][None])
        return _largest(self._vectors_NC @ vector_1C[0], count)


def _distinct_words(letters: NDArray[np.uint8]) -> NDArray[np.int16]:
    """(W,) the words of a sequence, ascending."""
    codes = _CODES[letters]
    words = np.zeros(max(0, len(codes) - _WORD + 1), np.int32)
    for place in range(_WORD):
        words = words * _LETTERS + codes[place : place + len(words)]
    return np.unique(words[words < _WORDS]).astype(np.int16)


def _largest(values_N: NDArray, count: int) -> NDArray[np.int64]:
    """(M,) places of the largest values, ascending; of equal ones the first."""
    return np.sort(np.argsort(-values_N, kind="stable")[:count])


def _unit(vectors_nC: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors of length 1; those of zeros stay."""
    return vectors_nC / np.maximum(np.linalg.norm(vectors_nC, axis=1, keepdims=True), 1e-30)
