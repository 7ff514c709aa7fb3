"""The compressed index, of faiss' own parts: clusters, in them one bit a value (RaBitQ), and fp16 values on disk.

A query is compared by bits with the rows of the nearest clusters; the best of them are scored again by their fp16
values. Bits lie in memory as long as the system keeps their pages, fp16 values are read a row at a time.

Shape legend: n rows, Q queries, p of them that are scored together, W rows of a query that are scored again, K hits of
a query, C channels.
"""

from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import parsing
from esmeray.common.publishing import atomic_file
from esmeray.common.verification import verified
from esmeray.dataset.embeddings.arrays import Arrays, as_float32
from esmeray.dataset.embeddings.formats.base import Values
from esmeray.dataset.embeddings.manifest import ranges
from esmeray.inference.index.index import Candidates, Index
from esmeray.inference.index.metric import MetricName, scores
from esmeray.inference.index.parts import REMEDY, TRAINED_FILE, IndexManifest, PartEntry, open_part

PROBES = 32
SAMPLED = 64
"""Vectors of a cluster by which it is found."""
FEWEST_SAMPLED = 39
"""For which faiss asks."""
_FEWEST = 100
_TIMES = 10
_OF_CLUSTER = 3
"""Rows that are scored again: so many, or so many times the hits, or as many as this part of a cluster has."""
_BLOCK = 16_384
_SCORED_AT_ONCE = 16
"""Queries whose rows are scored together, for a cache; faiss itself is 1.4 times as fast by 512 than by 64."""


def shapes(manifest: IndexManifest, part: PartEntry) -> dict[str, tuple[int, ...]]:
    """The shapes of a part's arrays."""
    channels = (manifest.channels,)
    return {"codes": (part.rows, *channels), "deviations": channels, "centre": channels}


def num_lists(rows: int, most_sampled: int) -> int:
    """Clusters of so many rows, found by a sample of at most ``most_sampled``."""
    # 4 sqrt(N) is faiss's advice; fewer where a cluster would have less than the 39 vectors that it asks for.
    return max(1, min(int(4 * rows**0.5), min(rows, most_sampled) // FEWEST_SAMPLED))


def train(path: Path, metric: MetricName, sample_nC: Values, lists: int) -> None:
    """Write an index without rows, whose clusters are those of a sample of prepared vectors."""
    kind = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
    channels = sample_nC.shape[1]
    # A random rotation first: bits of channels that differ in size would be worth different amounts.
    index = faiss.index_factory(channels, f"RR{channels},IVF{lists},RaBitQ", kind)
    index.train(sample_nC)
    with atomic_file(path) as building:
        faiss.write_index(index, str(building))


def write_lists(path: Path, trained: Path, vectors_nC: Values, first_row: int) -> None:
    """Write the lists of a part's vectors, whose rows begin with ``first_row``, by the clusters of a file."""
    index = faiss.read_index(str(trained))
    for start, stop in ranges(len(vectors_nC), _BLOCK):
        index.add_with_ids(vectors_nC[start:stop], np.arange(first_row + start, first_row + stop))
    with atomic_file(path) as building:
        writer = faiss.FileIOWriter(str(building))
        clusters: Any = faiss.extract_index_ivf(index)
        faiss.write_InvertedLists(clusters.invlists, writer)
        del writer  # which closes the file


def compressed_arrays(vectors_nC: Values) -> Arrays:
    """Arrays kept of a part's prepared vectors, beside the lists."""
    # Less the mean, which near rows share, and by the channel's deviation, so that values of any size fit. In fp16: by
    # int8 a tenth of the ten nearest are others, where vectors are as near as those of mutants.
    centre_C = vectors_nC.mean(axis=0, dtype=np.float64).astype(np.float32)
    deviations_C = vectors_nC.std(axis=0)
    deviations_C[deviations_C == 0] = 1
    codes_nC = np.empty(vectors_nC.shape, np.float16)
    largest = np.finfo(np.float16).max
    for start, stop in ranges(len(vectors_nC), _BLOCK):
        rest_bC = (vectors_nC[start:stop] - centre_C) / deviations_C
        codes_nC[start:stop] = rest_bC.clip(-largest, largest)
    return {"codes": codes_nC, "deviations": deviations_C, "centre": centre_C}


class CompressedIndex(Index):
    """See the module."""

    def __init__(
        self, folder: Path, manifest: IndexManifest, rows: int, first_row: int = 0, probes: int | None = None
    ) -> None:
        """``rows``: of the whole index, of which ``manifest`` may have some parts."""
        parts = [open_part(folder, part, shapes(manifest, part)) for part in manifest.parts]
        super().__init__(folder, manifest, parts, first_row)
        trained = verified(folder / TRAINED_FILE)
        with parsing(trained, REMEDY):
            self._index = faiss.read_index(str(trained))
        lists: Any = faiss.InvertedListsPtrVector()  # type: ignore[attr-defined]  # its stubs lack it
        self._kept: list[Any] = [lists]  # faiss holds pointers alone
        for part in manifest.parts:
            path = verified(part.path(folder, ".lists"))
            with parsing(path, REMEDY):
                self._kept.append(faiss.read_InvertedLists(faiss.FileIOReader(str(path)), faiss.IO_FLAG_MMAP))
            lists.push_back(self._kept[-1])
        # One list of all parts for each cluster: parts need not be searched one after the other.
        stacked = faiss.HStackInvertedLists(lists.size(), lists.data())
        self._kept.append(stacked)
        clusters = faiss.extract_index_ivf(self._index)
        clusters.replace_invlists(stacked, False)
        clusters.nprobe = probes or PROBES
        self._cluster_rows = rows // clusters.nlist
        clusters.ntotal = self._index.ntotal = self.count

    def vectors(self, rows_n: NDArray[np.int64]) -> Values:
        vectors_nC = np.empty((len(rows_n), self.channels), np.float32)
        for part, chosen, rows in self._by_part(rows_n):
            values = as_float32(part["codes"][rows])
            values *= part["deviations"]
            values += part["centre"]
            if self.metric == "cosine":  # lengths are known: of near rows most of what fp16 confuses is their rounding
                values /= np.sqrt(np.einsum("nc,nc->n", values, values))[:, None]
            vectors_nC[chosen] = values
        return vectors_nC

    def considered(self, top_k: int) -> int:
        # The more rows a cluster has, the nearer are those that bits confuse: of ten million vectors as near as mutants
        # are, 1,860 a cluster, a hundred held 0.82 of the ten nearest and 632 held 0.98, at 0.87 times the speed.
        return min(self.count, max(_FEWEST, _TIMES * top_k, self._cluster_rows // _OF_CLUSTER))

    def candidates(self, queries_qC: Values, top_k: int) -> Candidates:
        estimates_qW, rows_qW = self._index.search(queries_qC, self.considered(top_k))
        is_row_qW = rows_qW >= 0  # -1: the clusters have no more
        # Of L2 they are squared distances.
        keys_qW = np.where(is_row_qW, -estimates_qW if self.metric == "l2" else estimates_qW, -np.inf)
        scores_qW = np.full(rows_qW.shape, -np.inf, np.float32)
        for first, last in ranges(len(rows_qW), _SCORED_AT_ONCE):
            is_row_pW = is_row_qW[first:last]
            # Of several queries at once, part by part: a read for each would cost more than the bytes.
            vectors = self.vectors(rows_qW[first:last][is_row_pW])
            of_queries = np.split(vectors, is_row_pW.sum(axis=1).cumsum()[:-1])
            for number, vectors_wC in enumerate(of_queries, first):
                scores_qW[number, is_row_qW[number]] = scores(self.metric, vectors_wC, queries_qC[number])
        return Candidates(rows_qW, keys_qW, scores_qW)
