"""Base class of opened indexes.

Shape legend: N rows, Q queries, q queries of a batch, W candidates of a query, K hits of a query, C channels.
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

_OWN_HITS = 2**26
"""Maximum hits in memory while rows of the index are searched in it: all rows may be hits."""


class Candidates(NamedTuple):
    """Candidate rows that contain the hits of queries, each array (q, W).

    Missing rows are -1 with keys and scores of -inf.

    ``keys`` are the values that candidates were selected by, largest first. Candidates of index parts are merged by
    key.
    """

    rows: NDArray[np.int64]
    keys: Values
    scores: Values


class Index(ABC):
    """Vectors that can be searched.

    Attributes:
        folder: the index folder, or the vectors' folder for an index in memory.
        name: the embedding output that it was built from.
        channels: C, as in the embeddings.
        at_once: queries per batch, to limit memory.
    """

    at_once = 512

    def __init__(self, folder: Path, manifest: IndexManifest, parts: Sequence[Arrays], first_row: int = 0) -> None:
        """``first_row``: row number of the first part, which need not be the index's first."""
        self.folder = folder
        self.source: Path | str = folder
        self.manifest = manifest
        self.name = manifest.output
        self.channels = manifest.channels
        self.metric = manifest.metric
        self._parts = parts
        # File states at opening, to detect later changes of mapped files.
        with reading(folder, REMEDY):
            self._files = {path: path.stat() for part in manifest.parts for path in map(folder.joinpath, part.files)}
        # First row of each part, followed by the end of the last part.
        self._firsts = np.cumsum([first_row, *(part.rows for part in manifest.parts)])

    @property
    def count(self) -> int:
        """N."""
        return self.manifest.count

    def __len__(self) -> int:
        return self.count

    def changed(self) -> str:
        """Return a message that names a file truncated or written to since it was opened; '' if there is none.

        Reading a mapped file beyond its new end kills the process (SIGBUS). A file that was replaced or removed is
        safe: open mappings keep the old contents.
        """
        for path, opened in self._files.items():
            with suppress(OSError):
                now = path.stat()
                if os.path.samestat(now, opened) and (
                    (now.st_size, now.st_mtime_ns) != (opened.st_size, opened.st_mtime_ns)
                ):
                    return f"{path}: truncated or modified since the index was opened; {REMEDY}"
        return ""

    def sequences(self, rows_n: NDArray[np.int64]) -> NDArray[np.uint64]:
        """(n, 2) sequence keys of rows; zeros for parts of earlier versions, which lack them."""
        sequences_n2 = np.empty((len(rows_n), 2), np.uint64)
        for part, chosen, rows_of_part in self._by_part(rows_n):
            sequences_n2[chosen] = part["sequences"][rows_of_part]
        return sequences_n2

    def ids(self, rows: NDArray[np.int64] | Sequence[int]) -> list[str]:
        """Ids of rows, in their order."""
        ids = [""] * len(rows)
        with parsing(self.folder, REMEDY):
            for part, chosen, rows_of_part in self._by_part(np.asarray(rows, dtype=np.int64)):
                bounds = part["id_offsets"][rows_of_part[:, None] + [0, 1]]
                for number, (start, stop) in zip(chosen.tolist(), bounds.tolist(), strict=True):
                    if not 0 <= start <= stop <= part["ids"].shape[0]:  # a slice would silently cut it
                        raise ValueError(f"the id of row {rows[number]} is from byte {start} to {stop}")
                    ids[number] = part["ids"][start:stop].tobytes().decode()
        return ids

    def _by_part(self, rows_n: NDArray[np.int64]) -> Iterator[tuple[Arrays, NDArray[np.intp], NDArray[np.int64]]]:
        """Yield arrays, positions in ``rows_n`` and rows in the part, for each part that holds some of the rows."""
        numbers_n = self._firsts.searchsorted(rows_n, side="right") - 1
        for number in np.unique(numbers_n).tolist():
            chosen = np.flatnonzero(numbers_n == number)
            yield self._parts[number], chosen, rows_n[chosen] - self._firsts[number]

    def rows(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """(n,) first row of each id; -1 for unknown ids."""
        hashes_N, order_N = self._sorted_hashes
        hashes_n = hashes_of([name.encode() for name in ids])
        spans = zip(ids, hashes_N.searchsorted(hashes_n), hashes_N.searchsorted(hashes_n, side="right"), strict=True)
        rows = []
        for name, start, stop in spans:
            same_hash = order_N[start:stop].tolist()
            # The id itself is compared, because several ids may share a hash.
            same_id = (row for row, known in zip(same_hash, self.ids(same_hash), strict=True) if known == name)
            rows.append(next(same_id, -1))
        return np.array(rows, dtype=np.int64)

    @cached_property
    def _sorted_hashes(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        hashes_N = np.concatenate([part["id_hashes"][:] for part in self._parts])
        # A stable sort, so that the first of equal ids comes first.
        order_N = np.argsort(hashes_N, kind="stable")
        return hashes_N[order_N], order_N + self._firsts[0]

    @abstractmethod
    def vectors(self, rows_n: NDArray[np.int64]) -> Values:
        """(n, C) fp32 vectors of rows, as they are compared: of length 1 if the metric is cosine."""

    def search(self, queries_QD: Values, top_k: int) -> tuple[NDArray[np.int64], Values]:
        """Return the nearest rows per query, (Q, K) int64, and their scores, (Q, K) fp32.

        Scores are cosines, products or L2 distances.

        ``top_k``: maximum K. Missing rows are -1, at the end. Raises DataError for queries with another number of
        dimensions, and for a query without a score: not finite, or zeros if the metric is cosine.
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
            raise DataError(f"{self.folder}: damaged: a row occurs in several clusters; {REMEDY}")
        return rows_QK, shown(self.metric, scores_QK)

    def own_hits(
        self, rows_n: NDArray[np.int64], top_k: int
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.floating]]]:
        """Yield each of these rows with the rows (K,) and scores (K,) of its hits, nearest first, without itself."""
        size = max(1, min(self.at_once, _OWN_HITS // (top_k + 1)))
        for start, stop in ranges(len(rows_n), size):
            hits_nk, scores_nk = self.search(self.vectors(rows_n[start:stop]), top_k + 1)
            for row, hits_k, scores_k in zip(rows_n[start:stop].tolist(), hits_nk, scores_nk, strict=True):
                # If the row is not among its own hits, there is one hit too many. Missing hits are -1.
                kept = np.flatnonzero((hits_k >= 0) & (hits_k != row))[:top_k]
                yield row, hits_k[kept], scores_k[kept]

    def check(self, queries_QD: Values) -> None:
        """Raise DataError for queries that :meth:`search` rejects."""
        if queries_QD.ndim != 2 or queries_QD.shape[1] != self.channels:
            raise DataError(f"queries have shape {queries_QD.shape}, but the index has {self.channels:,} dimensions")
        wrong_Q, why = unusable(self.metric, queries_QD)
        for is_wrong_Q, problem in (~np.isfinite(queries_QD).all(axis=1), "has NaN or infinity,"), (wrong_Q, why):
            if is_wrong_Q.any():
                raise DataError(f"query {int(is_wrong_Q.argmax())} {problem} so it can't be compared")

    @abstractmethod
    def considered(self, top_k: int) -> int:
        """W for ``top_k`` hits per query."""

    @abstractmethod
    def candidates(self, queries_qC: Values, top_k: int) -> Candidates:
        """Candidates of prepared queries, at most :attr:`at_once` of them."""


def best(rows_n: NDArray[np.int64], scores_n: Values, top_k: int) -> tuple[NDArray[np.int64], Values]:
    """The ``top_k`` rows with the highest scores, in descending order; on a tie the first rows."""
    if len(rows_n) > top_k:
        # Sort only the rows that count. All rows that tie with the last one are kept until then.
        is_high_n = scores_n >= np.partition(scores_n, -top_k)[-top_k]
        rows_n = rows_n[is_high_n]
        scores_n = scores_n[is_high_n]
    order = np.lexsort((rows_n, -scores_n))[:top_k]
    return rows_n[order], scores_n[order]
