"""Exact Smith-Waterman search against a sequence store, with affine gaps.

parasail (Daily 2016) computes the scores without the GIL, so that threads use all cores. Alignments are traced for the
best hits only, one at a time, at one byte per pair of residues.

A prefilter selects the records to align exactly. ``SharedWords`` ranks by shared 4-mers, weighted by rarity.
``EmbeddingNeighbours`` ranks by the cosine of embeddings written by ``esmeray embed run``. Both lose hits (numbers in
docs/function.md); neither changes a score. A prefilter is called with an id, a sequence and a number M, and returns
(M,) ascending records, or fewer if there are fewer.

Shape legend: N records of the store, M records that a prefilter selects, W distinct words of a record, C channels, A
columns of an alignment, B of them without a gap.
"""

import ctypes
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import parasail
from numpy.typing import NDArray
from scipy.sparse import csr_array

from esmeray.alignment.scoring import Scoring
from esmeray.common import compiled_code
from esmeray.common.errors import DataError
from esmeray.common.processor import usable_cpus
from esmeray.dataset.embeddings.reader import open_vectors
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS, kmers
from esmeray.dataset.fasta.records import keys_of
from esmeray.dataset.store.reader import Store

_WORD = 4
_WORDS = len(AMINO_ACIDS) ** _WORD


class SharedWords:
    """Inverted index of the 4-mers of all or some records of a store.

    It takes 5 bytes per residue, and 20 while it is built.
    """

    def __init__(self, store: Store, records: NDArray[np.int64] | None = None) -> None:
        self._chosen_N = np.arange(len(store)) if records is None else records
        words = [_distinct_words(store.sequence(record)) for record in self._chosen_N.tolist()]
        all_words = np.concatenate([np.empty(0, np.int32), *words])  # the empty array is for an empty store
        # int32, because int64 starts would give int64 indices, at twice the memory.
        starts_N = np.cumsum([0, *map(len, words)], dtype=np.int32 if len(all_words) < 2**31 else np.int64)
        by_record = csr_array((np.ones(len(all_words), bool), all_words, starts_N), shape=(len(words), _WORDS))
        self._records_of_words = by_record.T.tocsr()
        counts = np.diff(self._records_of_words.indptr)
        # Squared: a shared word counts once in the query's vector and once in the record's.
        self._weights = np.log((1 + len(words)) / np.maximum(1, counts)) ** 2
        # Approximate norm of the records' vectors: few words occur twice in a protein.
        self._norms_N = np.sqrt(np.maximum(1, store.lengths[self._chosen_N]))

    def __call__(self, query_id: str, query: bytes, count: int) -> NDArray[np.int64]:
        """Return the records that share most words with the query, weighted as in the cosine of tf-idf vectors."""
        words_W = _distinct_words(np.frombuffer(query.upper(), np.uint8))
        shared_N = self._records_of_words[words_W].T @ self._weights[words_W]
        return self._chosen_N[_largest(shared_N / self._norms_N, count)]


class EmbeddingNeighbours:
    """Mean embeddings of a store and of the queries, matched by id; 4 bytes per value in memory."""

    def __init__(self, store: Store, vectors: Path, queries: Path) -> None:
        self._queries = open_vectors(queries)
        embedded = open_vectors(vectors)
        self._queries.refuse_other_space(embedded)
        if [store.id(record) for record in range(len(store))] != embedded.ids:
            raise DataError(f"{vectors}: its proteins or their order differ from {store.path}; embed the store")
        records_N = np.arange(len(store))
        embedded.refuse_other_sequences(records_N, store.sequence_keys(records_N), store.path)
        self._vectors_NC = np.concatenate([_unit(block_nC) for _, block_nC in embedded.finite_blocks()])

    def __call__(self, query_id: str, query: bytes, count: int) -> NDArray[np.int64]:
        """Return the records with the largest cosines. Raises DataError for a query without a vector."""
        if query_id not in self._queries.numbers:
            raise DataError(f"{self._queries.source}: no vector for query {query_id!r}; embed the queries")
        number_1 = np.array([self._queries.numbers[query_id]])
        self._queries.refuse_other_sequences(number_1, keys_of([query]), "align.queries")
        return _largest(self._vectors_NC @ _unit(self._queries[query_id][None])[0], count)


def _distinct_words(letters: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return the (W,) distinct words of a sequence, ascending."""
    return np.unique(kmers(letters, AMINO_ACIDS, _WORD)).astype(np.int32)


def _largest(values_N: NDArray, count: int) -> NDArray[np.int64]:
    """Return (M,) indices of the largest values, ascending; ties go to the first."""
    return np.sort(np.argsort(-values_N, kind="stable")[:count])


def _unit(vectors_nC: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return vectors scaled to length 1; zero vectors stay zero."""
    return vectors_nC / np.maximum(np.linalg.norm(vectors_nC, axis=1, keepdims=True), 1e-30)


_AT_ONCE = 256
"""Maximum number of records per piece of work of a thread."""
_PARASAIL = parasail.bindings_v2._lib
"""parasail's C library; parasail 1.3.4 has no public name for it."""


class Hit(NamedTuple):
    """A record and its score with a query; bits and E-value are NaN if BLAST has no constants for the scoring."""

    record: int
    score: int
    bits: float
    evalue: float


class Search:
    """Search in all records of a store, on all cores that this process may use.

    ``scores``: function from a query to the (N,) scores of all records. It replaces parasail, for example on a GPU.
    """

    def __init__(
        self, store: Store, scoring: Scoring, *, scores: Callable[[bytes], NDArray[np.int32]] | None = None
    ) -> None:
        if store.is_text:
            raise DataError(f"{store.path}: is a store of texts, which can't be aligned; give a store of proteins")
        self.store, self.scoring = store, scoring
        self._threads = usable_cpus()
        self._all_scores = scores
        self._residues = int(store.lengths.sum(dtype=np.int64))
        self._pool = ThreadPoolExecutor(self._threads)  # starts threads lazily

    def hits(
        self, query: bytes, count: int = 10, evalue: float = 10.0, records: NDArray[np.int64] | None = None
    ) -> list[Hit]:
        """Return at most ``count`` hits with E-values up to ``evalue`` and scores above 0, by score, then by record.

        The limit applies if BLAST has constants for the scoring. ``records``: (M,) ascending records to score in place
        of all. Raises DataError for a letter that is not a residue.
        """
        statistics = self.scoring.statistics
        scores = self.scores(query, records)
        candidates = np.flatnonzero(scores > 0)
        chosen = candidates if records is None else records[candidates]
        scores = scores[candidates]
        # Order depends on record and score only; bits and E-values are reported, and stay NaN without constants.
        bits = evalues = np.full(len(scores), np.nan)
        if statistics is not None:
            lengths = self.store.lengths[chosen]
            bits = statistics.bits(scores)
            evalues = statistics.evalues(scores, len(query), lengths, self._residues, self.scoring.first)
        kept = np.flatnonzero(~(evalues > evalue))  # NaN passes, since no limit applies without constants
        # Sorted by score, not by E-value, which depends on the record's length: equal scores stay in the store's order.
        best = kept[np.lexsort((chosen[kept], -scores[kept]))[:count]]
        columns = (chosen[best], scores[best], bits[best], evalues[best])
        return [Hit(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def scores(self, query: bytes, records: NDArray[np.int64] | None = None) -> NDArray[np.int32]:
        """Return the (M,) scores of these records, or (N,) of all."""
        if records is None:
            if self._all_scores is not None:
                return self._all_scores(query)
            records = np.arange(len(self.store))
        known = self.scoring.known(query)
        if not known:  # parasail does not accept an empty query
            return np.zeros(len(records), np.int32)
        # The profile depends on the query only: all threads share one.
        profile = parasail.profile_create_sat(known, self.scoring.matrix)
        # Four pieces per thread balance records of different lengths; more pieces if one would exceed the maximum.
        count = max(1, min(4 * self._threads, len(records)), -(-len(records) // _AT_ONCE))
        return np.concatenate(
            list(self._pool.map(lambda piece: self._scores(profile, piece), np.array_split(records, count)))
        )

    def alignment(self, query: bytes, hit: Hit) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Return (A, 2) positions of aligned residues in the query and the record, from 0; -1 in a gap.

        Also return the (B, 2) rows without a gap, and the number of them with identical residues. If several alignments
        have the best score, one of them is returned.
        """
        known = self.scoring.known(query), self.scoring.known(self.store.sequence(hit.record).tobytes())
        gaps = self.scoring.first, self.scoring.gap_extend
        cigar = parasail.sw_trace_striped_sat(*known, *gaps, self.scoring.matrix).cigar
        runs = re.findall(r"(\d+)(\D)", cigar.decode.decode())
        kinds = np.repeat([kind for _, kind in runs], [int(number) for number, _ in runs])
        is_residue = np.stack([kinds != "D", kinds != "I"], axis=1)
        trace = np.where(is_residue, is_residue.cumsum(axis=0) - 1 + [cigar.beg_query, cigar.beg_ref], -1)
        # parasail 1.3.4 reports an unaligned prefix of either sequence as a gap if the alignment starts the other one.
        trace = trace[(trace >= 0).all(axis=1).argmax() :]
        paired = trace[(trace >= 0).all(axis=1)]
        texts = query.upper(), self.store.sequence(hit.record).tobytes()
        letters = [np.frombuffer(text, np.uint8)[paired[:, side]] for side, text in enumerate(texts)]
        return trace, paired, int((letters[0] == letters[1]).sum())

    def row(self, query_id: str, query: bytes, hit: Hit) -> str:
        """Return a hit as a line of BLAST's output format 6, whose positions are 1-based and inclusive."""
        trace, paired, same = self.alignment(query, hit)
        gaps = trace < 0
        # A gap opens at a column whose predecessor has no gap on the same side; gaps of both sides may be adjacent.
        opened = int(gaps[0].sum() + (gaps[1:] & ~gaps[:-1]).sum())
        ends = paired[[0, -1]].T.ravel() + 1
        values = [query_id, self.store.id(hit.record), f"{100 * same / len(trace):.3f}", len(trace), len(paired) - same]
        return "\t".join(map(str, [*values, opened, *ends, f"{hit.evalue:.3g}", f"{hit.bits:.1f}"]))

    def _scores(self, profile: parasail.Profile, records: NDArray[np.int64]) -> NDArray[np.int32]:
        lengths = self.store.lengths[records].astype(np.int64)
        # Concatenated: one translation and one call for the whole piece.
        letters = self.scoring.known(b"".join(self.store.windows(records, np.zeros_like(records), lengths)))
        gaps = (self.scoring.first, self.scoring.gap_extend)
        ends = lengths.cumsum()
        scores = np.zeros(len(records), np.int32)
        library = compiled_code.load(Path(__file__).with_name("scores.cpp"))
        if library is None:
            for index, end in enumerate(ends.tolist()):
                scores[index] = parasail.sw_striped_profile_sat(
                    profile, letters[end - lengths[index] : end], *gaps
                ).score
        else:
            # parasail's functions are passed as pointers, which avoids linking with its library.
            functions = (_PARASAIL.parasail_sw_striped_profile_sat, _PARASAIL.parasail_result_free)
            library.esmeray_alignment_scores(
                *(ctypes.cast(pointer, ctypes.c_void_p) for pointer in (*functions, profile.pointer)),
                letters,
                ctypes.c_void_p(ends.ctypes.data),
                ctypes.c_int64(len(records)),
                *gaps,
                ctypes.c_void_p(scores.ctypes.data),
            )
        return scores
