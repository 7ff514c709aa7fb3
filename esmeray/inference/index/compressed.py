"""A compressed index built from faiss components: clusters, one bit per value (RaBitQ), and fp16 values on disk.

A query is compared by bits with the rows of the nearest clusters. The best rows are scored again with their fp16
values. Each part has its own lists. A cluster's bits are merged in memory when a query first needs them. fp16 values
are read row by row.

Shape legend: n rows, Q queries, p queries that are scored together, P clusters of a query, W rows that are scored again
per query, K hits of a query, C channels.
"""

import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError, parsing
from esmeray.common.publishing import atomic_file, verified, writing
from esmeray.dataset.embeddings.arrays import Arrays, CheckedFile
from esmeray.dataset.embeddings.formats.base import Values
from esmeray.dataset.embeddings.manifest import ranges
from esmeray.inference.index.index import Candidates, Index
from esmeray.inference.index.metric import MAX_NORM, MetricName, scores
from esmeray.inference.index.parts import REMEDY, TRAINED_FILE, IndexManifest, Kinds, PartEntry, open_part

PROBES = 32
_MIN_ROWS = 100
_TIMES = 10
_OF_CLUSTER = 3
"""Number of rows that are scored again: the maximum of three values.

These are ``_MIN_ROWS``, ``_TIMES`` times the hits, and the rows of a cluster divided by ``_OF_CLUSTER``.
"""
_BLOCK = 16_384
_SCORED_AT_ONCE = 16
"""Queries whose rows are scored together, to stay in a cache. faiss itself is 1.4 times as fast with 512 as with 64."""


def kinds(manifest: IndexManifest, part: PartEntry) -> Kinds:
    """Dtypes and shapes of a part's arrays."""
    channels = ("float32", (manifest.channels,))
    return {"codes": ("float16", (part.rows, manifest.channels)), "deviations": channels, "centre": channels}


@contextmanager
def _faiss_writer(path: Path) -> Iterator[Any]:
    """Yield a writer of faiss for a new file. Python writes it: faiss (1.15) raises RuntimeError on a full disk."""
    with writing(path), atomic_file(path) as building, building.open("wb") as file:
        yield faiss.PyCallbackIOWriter(file.write)  # type: ignore[attr-defined]


def train(path: Path, metric: MetricName, sample_nC: Values, lists: int) -> None:
    """Write an index without rows, with clusters trained on a sample of prepared vectors."""
    index = _untrained(metric, sample_nC.shape[1], lists)
    index.train(sample_nC)
    with _faiss_writer(path) as writer:
        faiss.write_index(index, writer)


def _untrained(metric: MetricName, channels: int, lists: int) -> Any:
    kind = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
    # A random rotation first: otherwise the bits of channels with different variances would carry different weights.
    return faiss.index_factory(channels, f"RR{channels},IVF{lists},RaBitQ", kind)


def _read_trained(path: Path, manifest: IndexManifest) -> Any:
    """Read the index of :func:`train`. Raises DataError for any other index, which faiss would read too."""
    with parsing(verified(path), REMEDY, SystemError), ExitStack() as restored:
        # Limited to the file size before allocation, because the file itself states the length of its vectors.
        restored.callback(faiss.set_deserialization_vector_byte_limit, faiss.get_deserialization_vector_byte_limit())
        faiss.set_deserialization_vector_byte_limit(path.stat().st_size)
        # Memory-mapped, so that faiss does not open lists that are in another file.
        index: Any = faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
        rotation, clusters, centroids = _pieces(index)
        if (
            _described(index) != _described(_untrained(manifest.metric, manifest.channels, 1))
            or (index.is_trained, index.ntotal, clusters.ntotal) != (True, 0, 0)
            or (rotation.A.size(), centroids.ntotal) != (manifest.channels**2, clusters.nlist)
            # Written so that NaN is rejected too. No value of an orthonormal matrix exceeds 1, except by rounding.
            or not abs(faiss.vector_to_array(rotation.A)).max() <= 1.001
            or not abs(centroids.reconstruct_n()).max() <= MAX_NORM
        ):
            raise ValueError(f"not the clusters of a {manifest.metric} index with {manifest.channels:,} channels")
    return index


def _pieces(index: Any) -> tuple[Any, Any, Any]:
    """Rotation, clusters, and the centroid index, all inside the index."""
    clusters: Any = faiss.downcast_index(index.index)
    return faiss.downcast_VectorTransform(index.chain.at(0)), clusters, faiss.downcast_index(clusters.quantizer)


def _described(index: Any) -> tuple[Any, ...]:
    """Properties that define the meaning of a code, without the trained values."""
    rotation, clusters, centroids = _pieces(index)
    return (
        *(index.chain.size(), type(rotation), type(clusters), isinstance(centroids, faiss.IndexFlat)),
        *(rotation.d_in, rotation.d_out, rotation.have_bias, clusters.d, centroids.d, clusters.code_size),
        *(clusters.metric_type, centroids.metric_type, clusters.by_residual, clusters.qb),
    )


def write_lists(path: Path, trained: Path, vectors_nC: Values, first_row: int) -> None:
    """Write the lists of a part's vectors, using a trained file. Rows are numbered from ``first_row``."""
    index = faiss.read_index(str(trained))
    for start, stop in ranges(len(vectors_nC), _BLOCK):
        index.add_with_ids(vectors_nC[start:stop], np.arange(first_row + start, first_row + stop))
    clusters: Any = faiss.extract_index_ivf(index)
    with _faiss_writer(path) as writer:
        faiss.write_InvertedLists(clusters.invlists, writer)


def compressed_arrays(vectors_nC: Values) -> Arrays:
    """Arrays stored for a part's prepared vectors, in addition to the lists."""
    # Values are centred, because near rows share the mean, and divided by the channel's deviation, so that values of
    # any size fit. fp16 instead of int8: with int8 a tenth of the ten nearest differ for vectors as close as mutants'
    # vectors.
    centre_C = vectors_nC.mean(axis=0, dtype=np.float64).astype(np.float32)
    deviations_C = vectors_nC.std(axis=0)
    deviations_C[deviations_C == 0] = 1
    codes_nC = np.empty(vectors_nC.shape, np.float16)
    largest = np.finfo(np.float16).max
    for start, stop in ranges(len(vectors_nC), _BLOCK):
        codes_nC[start:stop] = ((vectors_nC[start:stop] - centre_C) / deviations_C).clip(-largest, largest)
    return {"codes": codes_nC, "deviations": deviations_C, "centre": centre_C}


def _dequantized(codes_nC: NDArray[np.float16]) -> Values:
    """Convert finite fp16 to fp32, five times as fast as NumPy (2.4), which converts values one by one."""
    # Shift exponent and fraction to their fp32 positions, and keep the sign of the int32. Then correct the exponent
    # bias.
    bits_nC = codes_nC.view(np.int16).astype(np.int32) << 13 & -0x70002000
    return bits_nC.view(np.float32) * np.float32(2.0 ** (127 - 15))


def _open_lists(path: Path, rows: int, clusters: int, code_size: int) -> tuple[CheckedFile, Any]:
    """Open the lists of a part, memory-mapped. Only the list sizes are verified here.

    Raises DataError for lists of another kind, number, code size or number of rows.
    """
    with parsing(path, REMEDY, SystemError):
        content = CheckedFile(path)
        header = content.content[:32].tobytes()
        kind = b"ilar" + struct.pack("<QQ", clusters, code_size)
        header_bytes = 32 + 8 * int.from_bytes(header[24:], "little")  # with the size of each list
        # faiss trusts the header and would read beyond the codes. After the codes are ids of 8 bytes.
        if header[:20] != kind or len(content.content) != header_bytes + rows * (code_size + 8):
            raise ValueError(f"not {rows:,} rows in {clusters:,} lists with {code_size} bytes per row")
        content.check_range(0, header_bytes)
        lists: Any = faiss.read_InvertedLists(faiss.FileIOReader(str(path)), faiss.IO_FLAG_MMAP)
        return content, faiss.downcast_InvertedLists(lists)


class CompressedIndex(Index):
    """A compressed index, as described in the module."""

    def __init__(
        self, folder: Path, manifest: IndexManifest, rows: int, first_row: int = 0, probes: int | None = None
    ) -> None:
        """``rows``: number of rows of the whole index; ``manifest`` may hold only some of its parts."""
        parts = [open_part(folder, part, kinds(manifest, part), by_blocks=True) for part in manifest.parts]
        for part in parts:
            part.update({name: part[name][:] for name in ("deviations", "centre")})  # needed by each query
        super().__init__(folder, manifest, parts, first_row)
        self._trained = _read_trained(folder / TRAINED_FILE, manifest)  # owns the objects below
        self._rotation, self._clusters, _ = _pieces(self._trained)
        nlist = self._clusters.nlist
        self._part_lists = [
            _open_lists(part.path(folder, ".lists"), part.rows, nlist, self._clusters.code_size)
            for part in manifest.parts
        ]
        # faiss' own stack of lists (1.15) copies a cluster's bits per query, which takes a third of the time with three
        # parts.
        self._lists: Any = faiss.ArrayInvertedLists(nlist, self._clusters.code_size)
        self._clusters.replace_invlists(self._lists, False)
        self._is_loaded = np.zeros(nlist, bool)
        self._loading = threading.Lock()
        self._clusters.nprobe = min(probes or PROBES, nlist)
        self._cluster_rows = rows // nlist

    def vectors(self, rows_n: NDArray[np.int64]) -> Values:
        vectors_nC = np.empty((len(rows_n), self.channels), np.float32)
        for part, chosen, rows in self._by_part(rows_n):
            codes = part["codes"][rows]
            if (codes.view(np.uint16) & 0x7C00 == 0x7C00).any():  # would become finite
                raise DataError(f"{self.folder}: damaged: codes contain NaN or infinity; {REMEDY}")
            values = _dequantized(codes)
            values *= part["deviations"]
            values += part["centre"]
            if self.metric == "cosine":  # restore length 1, to remove the largest error of fp16 between near rows
                values /= np.sqrt(np.einsum("nc,nc->n", values, values))[:, None]
            vectors_nC[chosen] = values
        return vectors_nC

    def _load(self, clusters_n: NDArray[np.int64]) -> None:
        """Load the lists of clusters that are not in memory yet."""
        with self._loading:
            for cluster in clusters_n[~self._is_loaded[clusters_n]].tolist():
                sizes = [lists.list_size(cluster) for _, lists in self._part_lists]
                # Allocated at once, because a list that grows part by part would take twice the memory.
                self._lists.resize(cluster, sum(sizes))
                first = 0
                for number, ((content, lists), size) in enumerate(zip(self._part_lists, sizes, strict=True)):
                    if size:
                        # The codes, followed by ids of 8 bytes.
                        content.check_range(lists.lists.at(cluster).offset, size * (lists.code_size + 8))
                        entries = lists.get_ids(cluster), lists.get_codes(cluster)
                        rows = np.unique(faiss.rev_swig_ptr(entries[0], size))
                        if len(rows) < size or rows[0] < self._firsts[number] or rows[-1] >= self._firsts[number + 1]:
                            raise DataError(f"{self.folder}: damaged: a list contains rows outside its part; {REMEDY}")
                        self._lists.update_entries(cluster, first, size, *entries)
                        first += size
                self._is_loaded[cluster] = True

    def considered(self, top_k: int) -> int:
        # The larger a cluster, the more near rows its bits confuse. Measured with ten million vectors as close as
        # mutants' vectors (1,860 per cluster): 100 rows contained 0.82 of the ten nearest; 632 contained 0.98, at 0.87
        # times the speed.
        return min(self.count, max(_MIN_ROWS, _TIMES * top_k, self._cluster_rows // _OF_CLUSTER))

    def candidates(self, queries_qC: Values, top_k: int) -> Candidates:
        rotated_qC = self._rotation.apply(queries_qC)
        distances_qP, clusters_qP = self._clusters.quantizer.search(rotated_qC, self._clusters.nprobe)
        self._load(np.unique(clusters_qP))
        estimates_qW, rows_qW = self._clusters.search_preassigned(
            rotated_qC, self.considered(top_k), clusters_qP, distances_qP
        )
        is_row_qW = rows_qW >= 0  # -1: the clusters have no more rows
        # For L2 the estimates are squared distances.
        keys_qW = np.where(is_row_qW, -estimates_qW if self.metric == "l2" else estimates_qW, -np.inf)
        scores_qW = np.full(rows_qW.shape, -np.inf, np.float32)
        for first, last in ranges(len(rows_qW), _SCORED_AT_ONCE):
            is_row_pW = is_row_qW[first:last]
            # Several queries at once, part by part, because a separate read per query would cost more than the bytes.
            of_queries = np.split(self.vectors(rows_qW[first:last][is_row_pW]), is_row_pW.sum(axis=1).cumsum()[:-1])
            for number, vectors_wC in enumerate(of_queries, first):
                scores_qW[number, is_row_qW[number]] = scores(self.metric, vectors_wC, queries_qC[number])
        if not (scores_qW < np.inf).all():  # infinite or NaN
            raise DataError(f"{self.folder}: damaged: vectors whose products are infinite; {REMEDY}")
        return Candidates(rows_qW, keys_qW, scores_qW)
