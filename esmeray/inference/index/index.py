"""An opened index of any kind.

Shape legend: N rows, Q queries, q those of a batch, W candidates of a query, K hits of a query, C channels.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError, parsing, reading
from esmeray.dataset.embeddings.arrays import Arrays
from esmeray.dataset.embeddings.formats.base import Values
from esmeray.dataset.embeddings.manifest import ranges
from esmeray.dataset.fasta.records import hashes_of
from esmeray.inference.index.metric import prepared, shown, unusable
from esmeray.inference.index.parts import REMEDY, IndexManifest

_OWN = 256
"""Rows of the index that are searched at once in the rest of it, for memory: all rows may be hits."""

Hits = tuple[NDArray[np.int64], Values]
"""(Q, K) rows, the nearest first, and (Q, K) scores."""


class Candidates(NamedTuple):
    """Rows among which the hits of queries are, each (q, W); -1 where there are no more, with keys and scores of -inf.

    ``keys`` are those by which they were chosen, the largest first: candidates of parts of an index are merged by them.
    """

    rows: NDArray[np.int64]
    keys: Values
    scores: Values


class Index(ABC):
    """Vectors that are searched.

    Attributes:
        folder: where it lies, or the vectors of which it was made in memory.
        name: the output that it was made of.
        channels: C, as embeddings have it.
        at_once: queries of a batch, for memory.
    """

    at_once = 512

    def __init__(self, folder: Path, manifest: IndexManifest, parts: Sequence[Arrays], first_row: int = 0) -> None:
        """``first_row``: of the parts, which may be some of an index."""
        self.folder = folder
        self.source: Path | str = folder
        self.manifest = manifest
        self.name = manifest.output
        self.channels = manifest.channels
        self.metric = manifest.metric
        self._parts = parts
        # As they are now, for whoever maps them.
        with reading(folder, REMEDY):
            self._files = {path: path.stat() for part in manifest.parts for path in map(folder.joinpath, part.files)}
        # Row of the first of each part, numbered through; the last is that behind all.
        self._firsts = np.cumsum([first_row, *(part.rows for part in manifest.parts)])

    @property
    def count(self) -> int:
        """N."""
        return self.manifest.count

    def __len__(self) -> int:
        return self.count

    def changed(self) -> str:
        """Name a file that was truncated, or written to, since it was opened; '' for none.

        Reading a mapped file behind its new end kills the process (SIGBUS). One that was replaced or removed stays as
        it was for whoever has it open.
        """
        for path, opened in self._files.items():
            with suppress(OSError):
                now = path.stat()
                if os.path.samestat(now, opened) and (
                    (now.st_size, now.st_mtime_ns) != (opened.st_size, opened.st_mtime_ns)
                ):
                    return f"{path}: truncated, or written to, since the index was opened; {REMEDY}"
        return ""

    def sequences(self, rows_n: NDArray[np.int64]) -> NDArray[np.uint64]:
        """(n, 2) keys of the sequences of rows; zeros for parts of earlier versions, which have none."""
        sequences_n2 = np.empty((len(rows_n), 2), np.uint64)
        for part, chosen, rows_of_part in self._by_part(rows_n):
            sequences_n2[chosen] = part["sequences"][rows_of_part]
        return sequences_n2

    def ids(self, rows: NDArray[np.int64] | Sequence[int]) -> list[str]:
        """The ids of rows, in their order."""
        ids = [""] * len(rows)
        with parsing(self.folder, REMEDY):
            for part, chosen, rows_of_part in self._by_part(np.asarray(rows, dtype=np.int64)):
                bounds = part["id_offsets"][rows_of_part[:, None] + [0, 1]]
                for number, (start, stop) in zip(chosen.tolist(), bounds.tolist(), strict=True):
                    if not 0 <= start <= stop <= part["ids"].shape[0]:  # which a slice would cut without a word
                        raise ValueError(f"the id of row {rows[number]} is from byte {start} to {stop}")
                    ids[number] = part["ids"][start:stop].tobytes().decode()
        return ids

    def _by_part(self, rows_n: NDArray[np.int64]) -> Iterator[tuple[Arrays, NDArray[np.intp], NDArray[np.int64]]]:
        """Each part that has some of the rows: its arrays, which of ``rows_n`` these are, and their rows in it."""
        numbers_n = self._firsts.searchsorted(rows_n, side="right") - 1
        for number in np.unique(numbers_n).tolist():
            chosen = np.flatnonzero(numbers_n == number)
            yield self._parts[number], chosen, rows_n[chosen] - self._firsts[number]

    def rows(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """(n,) the first row of each id; -1 where there is none."""
        hashes_N, order_N = self._sorted_hashes
        hashes_n = hashes_of([name.encode() for name in ids])
        spans = zip(ids, hashes_N.searchsorted(hashes_n), hashes_N.searchsorted(hashes_n, side="right"), strict=True)
        rows = []
        for name, start, stop in spans:
            same_hash = order_N[start:stop].tolist()
            # The id itself is compared: several ids may have one hash.
            same_id = (row for row, known in zip(same_hash, self.ids(same_hash), strict=True) if known == name)
            rows.append(next(same_id, -1))
        return np.array(rows, dtype=np.int64)

    @cached_property
    def _sorted_hashes(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        hashes_N = np.concatenate([part["id_hashes"][:] for part in self._parts])
        # Stable, so that of equal ids the first comes first.
        order_N = np.argsort(hashes_N, kind="stable")
        return hashes_N[order_N], order_N + self._firsts[0]

    @abstractmethod
    def vectors(self, rows_n: NDArray[np.int64]) -> Values:
        """(n, C) fp32 of rows, as they are compared: of length 1 where the measure is the cosine."""

    def search(self, queries_QD: Values, top_k: int) -> Hits:
        """The nearest rows of each query, (Q, K) int64, and scores, (Q, K) fp32: cosines, products or L2 distances.

        ``top_k``: K at most; rows that there are not are -1, at the end. Raises DataError for queries of other
        dimensions, and for one without a score: not finite, or of zeros where the measure is the cosine.
        """
        self.check(queries_QD)
        problem = self.changed()
        if problem:
            raise DataError(problem)
        rows_QK = np.full((len(queries_QD), min(top_k, self.count)), -1, dtype=np.int64)
        scores_QK = np.full(rows_QK.shape, -np.inf, dtype=np.float32)
        for start, stop in ranges(len(queries_QD), self.at_once):
            candidates = self.candidates(prepared(self.metric, queries_QD[start:stop]), rows_QK.shape[1])
            for number, (rows, scores) in enumerate(zip(candidates.rows, candidates.scores, strict=True), start):
                rows_QK[number], scores_QK[number] = best(rows, scores, rows_QK.shape[1])
        sorted_QK = np.sort(rows_QK, axis=1)
        if ((sorted_QK[:, 1:] == sorted_QK[:, :-1]) & (sorted_QK[:, 1:] >= 0)).any():
            raise DataError(f"{self.folder}: damaged: a row is in several clusters; {REMEDY}")
        return rows_QK, shown(self.metric, scores_QK)

    def own_hits(
        self, rows_n: NDArray[np.int64], top_k: int
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.floating]]]:
        """Each of these rows with the rows (K,) and scores (K,) of its hits, the nearest first, without itself."""
        for start, stop in ranges(len(rows_n), _OWN):
            hits_nk, scores_nk = self.search(self.vectors(rows_n[start:stop]), top_k + 1)
            for row, hits_k, scores_k in zip(rows_n[start:stop].tolist(), hits_nk, scores_nk, strict=True):
                # Where the row itself is not among them there is one too many; -1 where there are fewer.
                kept = np.flatnonzero((hits_k >= 0) & (hits_k != row))[:top_k]
                yield row, hits_k[kept], scores_k[kept]

    def check(self, queries_QD: Values) -> None:
        """Refuse what :meth:`search` refuses."""
        if queries_QD.ndim != 2 or queries_QD.shape[1] != self.channels:
            raise DataError(f"queries of shape {queries_QD.shape}: the index has {self.channels:,} dimensions")
        wrong_Q, why = unusable(self.metric, queries_QD)
        for is_wrong_Q, problem in (~np.isfinite(queries_QD).all(axis=1), "has NaN or infinity"), (wrong_Q, why):
            if is_wrong_Q.any():
                raise DataError(f"query {int(is_wrong_Q.argmax())} {problem} and can't be compared")

    @abstractmethod
    def considered(self, top_k: int) -> int:
        """W, of so many hits of a query."""

    @abstractmethod
    def candidates(self, queries_qC: Values, top_k: int) -> Candidates:
        """The candidates of prepared queries, at most :attr:`at_once`."""


def best(rows_n: NDArray[np.int64], scores_n: Values, top_k: int) -> tuple[NDArray[np.int64], Values]:
    """The ``top_k`` rows of the highest scores, in their order; of equal scores the first rows."""
    if len(rows_n) > top_k:
        # Sorting the few that count is what costs least; all that equal the last one stay in until then.
        is_high_n = scores_n >= np.partition(scores_n, -top_k)[-top_k]
        rows_n = rows_n[is_high_n]
        scores_n = scores_n[is_high_n]
    order = np.lexsort((rows_n, -scores_n))[:top_k]
    return rows_n[order], scores_n[order]
