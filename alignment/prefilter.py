"""Prefilters of a search: the records that are worth an exact alignment with a query.

``SharedWords`` ranks by 4-mers, of which related proteins share more and rarer ones;
``EmbeddingNeighbours`` by the cosine of embeddings that ``esmeray embed run`` made. Both lose hits, in numbers that
docs/function.md gives; neither changes a score. Called with an id, a sequence and a number M, they give (M,) records,
ascending, of few ones fewer.

Shape legend: N records, M candidates, W distinct words of a record, C channels.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.dataset.embeddings.reader import open_vectors
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS, kmers
from esmeray.dataset.fasta.records import hashes_of
from esmeray.dataset.store.reader import Store

_WORD = 4
_WORDS = len(AMINO_ACIDS) ** _WORD


class SharedWords:
    """An index of the words of all or some records of a store; 4 bytes a residue, and 16 while it is made."""

    def __init__(self, store: Store, records: NDArray[np.int64] | None = None) -> None:
        self._chosen_N = np.arange(len(store)) if records is None else records
        words = [_distinct_words(store.sequence(record)) for record in self._chosen_N.tolist()]
        all_words = np.concatenate([np.empty(0, np.int32), *words])  # an empty store has an index too
        records = np.repeat(np.arange(len(words), dtype=np.int32), list(map(len, words)))
        # Records by word: those of word w are [starts[w], starts[w + 1]). Stable, so that each run ascends.
        self._records = records[np.argsort(all_words, kind="stable")]
        counts = np.bincount(all_words, minlength=_WORDS)
        self._starts = np.append(0, counts.cumsum())
        # Squared: a shared word counts once in the query's vector and once in the record's.
        self._weights = np.log((1 + len(words)) / np.maximum(1, counts)) ** 2
        # Near the norms of the records' vectors: few words of a protein stand in it twice.
        self._norms_N = np.sqrt(np.maximum(1, store.lengths[self._chosen_N]))

    def __call__(self, query_id: str, query: bytes, count: int) -> NDArray[np.int64]:
        """Records by the words that they share with the query, weighted as in the cosine of tf-idf vectors."""
        words_W = _distinct_words(np.frombuffer(query.upper(), np.uint8))
        runs_W = [self._records[self._starts[word] : self._starts[word + 1]] for word in words_W.tolist()]
        records = np.concatenate([np.empty(0, np.int32), *runs_W])
        weights = np.repeat(self._weights[words_W], list(map(len, runs_W)))
        shared_N = np.bincount(records, weights, minlength=len(self._chosen_N))
        return self._chosen_N[_largest(shared_N / self._norms_N, count)]


class EmbeddingNeighbours:
    """Vectors of a store and of the queries, one a protein, matched to them by id; 4 bytes a value in memory."""

    def __init__(self, store: Store, vectors: Path, queries: Path) -> None:
        self._queries, records = open_vectors(queries), open_vectors(vectors)
        self._queries.refuse_other_space(records)
        if [store.id(record) for record in range(len(store))] != records.ids:
            raise DataError(f"{vectors}: its proteins are not those of {store.path} in their order; embed the store")
        records.refuse_other_sequences(np.arange(len(store)), store.lengths, store.sequence_hashes, store.path)
        self._vectors_NC = np.concatenate([_unit(block_nC) for _, block_nC in records.finite_blocks()])

    def __call__(self, query_id: str, query: bytes, count: int) -> NDArray[np.int64]:
        """Records of the largest cosines. Raises DataError for a query without a vector."""
        if query_id not in self._queries.numbers:
            raise DataError(f"{self._queries.source}: has no protein {query_id!r}; embed the queries")
        number_1 = np.array([self._queries.numbers[query_id]])
        self._queries.refuse_other_sequences(number_1, np.array([len(query)]), hashes_of([query]), "align.queries")
        vector_1C = _unit(self._queries[query_id][None])
        return _largest(self._vectors_NC @ vector_1C[0], count)


def _distinct_words(letters: NDArray[np.uint8]) -> NDArray[np.int32]:
    """(W,) the words of a sequence, ascending."""
    return np.unique(kmers(letters, AMINO_ACIDS, _WORD)).astype(np.int32)


def _largest(values_N: NDArray, count: int) -> NDArray[np.int64]:
    """(M,) indices of the largest values, ascending; of equal ones the first."""
    return np.sort(np.argsort(-values_N, kind="stable")[:count])


def _unit(vectors_nC: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors of length 1; those of zeros stay."""
    return vectors_nC / np.maximum(np.linalg.norm(vectors_nC, axis=1, keepdims=True), 1e-30)
