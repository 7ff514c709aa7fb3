"""An exact index: the same hits in the same order as a comparison with every vector in fp32, ties by row.

A matrix product gives, per query and group of 64 rows, the largest product, up to an error bound. The groups with the
largest maxima are scored in fp32. Their K-th best score is a threshold. Every group whose maximum plus bound reaches
the threshold is scored too. No other row can be a hit.

The product is in bf16 if the processor has bf16 instructions, otherwise in fp32. For bf16 the mean of the part is
subtracted first: protein vectors have much in common, and errors are relative to the remainder.

Error bound for a row x = c + r of a group with |r| <= radius and bf16 error |r - b(r)| <= residual, by the
Cauchy-Schwarz inequality: |q.x - q.c - p| <= |q - b(q)| radius + |q| residual + rounding of p + sums of C products in
fp32, here and in the score (Higham, Accuracy and Stability of Numerical Algorithms, 2002, chapter 3).

Shape legend: N rows, n rows of a part or a block, G groups, Q queries, K hits of a query, C channels.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esmeray.common.processor import cpu_computes_bf16
from esmeray.dataset.embeddings.arrays import Arrays, as_float32
from esmeray.dataset.embeddings.formats.base import Values
from esmeray.dataset.embeddings.manifest import ranges
from esmeray.inference.index.index import Candidates, Index, best
from esmeray.inference.index.metric import MetricName, norms, scores
from esmeray.inference.index.parts import IndexManifest, Kinds, PartEntry

GROUP = 64
"""Rows per group maximum. Smaller groups cost more to select, larger ones cost more to score."""
_BLOCK = 2048
"""Maximum rows of a product, a multiple of GROUP."""
_RESULTS = 2**17
"""Maximum results of an fp32 product, so that they fit in a core's cache.

Measured with a million vectors of 320 values on AMD Zen 3: for 512 queries, 86 queries/s with 256 rows and 68 with
2,048. For 32 queries and fewer, the maximum number of rows is fastest.
"""
_MAXIMA = 2**26
"""Maximum number of group maxima in memory."""
_GROUPS_AT_ONCE = 1024
_FP32 = 2.0**-24
"""Relative rounding error of fp32."""
_PRODUCT = 2.0**-8 / (1 - 2.0**-8)
"""Error of a product rounded to bf16, relative to the result."""
_SMALLEST = 2.0**-126
"""Smallest normal fp32 number. Processors may flush smaller numbers to zero."""


def kinds(manifest: IndexManifest, part: PartEntry) -> Kinds:
    """Dtypes and shapes of a part's arrays."""
    groups = ("float32", (-(-part.rows // GROUP),))
    squares: Kinds = {"half_squares": ("float32", (part.rows,))} if manifest.metric == "l2" else {}
    return squares | {
        "vectors": ("float32", (part.rows, manifest.channels)),
        "filter": ("uint16", (part.rows, manifest.channels)),
        "centre": ("float32", (manifest.channels,)),
        "radii": groups,
        "residuals": groups,
    }


def exact_arrays(metric: MetricName, vectors_nC: Values, with_filter: bool = True) -> Arrays:
    """Arrays stored for a part's prepared vectors; without the filter if only fp32 is used."""
    centre_C = vectors_nC.mean(axis=0, dtype=np.float64).astype(np.float32)
    arrays: dict[str, NDArray] = {"vectors": vectors_nC, "centre": centre_C}
    if with_filter:
        arrays["filter"] = np.empty(vectors_nC.shape, np.uint16)
    groups = -(-len(vectors_nC) // GROUP)
    arrays |= {"radii": np.zeros(groups, np.float32), "residuals": np.zeros(groups, np.float32)}
    if metric == "l2":
        arrays["half_squares"] = (norms(vectors_nC) ** 2 / 2).astype(np.float32)
    for start, stop in ranges(len(vectors_nC), _BLOCK):
        rest_nC = vectors_nC[start:stop].astype(np.float64) - centre_C
        narrow_nC = as_bf16(rest_nC.astype(np.float32))
        firsts = np.arange(0, stop - start, GROUP)
        of_block = slice(start // GROUP, start // GROUP + len(firsts))
        for name, norms_n in ("radii", norms(rest_nC)), ("residuals", norms(rest_nC - as_float32(narrow_nC))):
            # Rounded up, because a bound may be larger but not smaller.
            arrays[name][of_block] = np.maximum.reduceat(norms_n, firsts) * (1 + 4 * _FP32)
        if with_filter:
            arrays["filter"][start:stop] = narrow_nC
    return arrays


def as_bf16(values: Values) -> NDArray[np.uint16]:
    """Convert finite values to bf16 as uint16, rounding to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class ExactIndex(Index):
    """An exact index, as described in the module."""

    def __init__(
        self,
        folder: Path,
        manifest: IndexManifest,
        parts: Sequence[Arrays],
        first_row: int = 0,
        bf16: bool | None = None,
    ) -> None:
        """``bf16``: compute products in bf16. Default: if the processor has bf16 instructions."""
        super().__init__(folder, manifest, parts, first_row)
        self._bf16 = cpu_computes_bf16() if bf16 is None else bf16
        sizes = [len(part["radii"]) for part in parts]
        self._first_groups = np.cumsum([0, *sizes])
        self._part_of_G = np.repeat(np.arange(len(parts)), sizes)
        self._radii_G = np.concatenate([part["radii"] for part in parts]).astype(np.float64)
        centres = [float(np.linalg.norm(part["centre"].astype(np.float64))) for part in parts]
        self._norms_G = self._radii_G + np.array(centres)[self._part_of_G]
        # A product and a score have C roundings each.
        self._errors_G = (2 * self.channels + 16) * _FP32 * self._norms_G
        if self._bf16:
            self._errors_G += np.concatenate([part["residuals"] for part in parts])
        self.at_once = max(1, min(self.at_once, _MAXIMA // int(self._first_groups[-1])))

    def vectors(self, rows_n: NDArray[np.int64]) -> Values:
        vectors_nC = np.empty((len(rows_n), self.channels), np.float32)
        for part, chosen, rows in self._by_part(rows_n):
            vectors_nC[chosen] = part["vectors"][rows]
        return vectors_nC

    def considered(self, top_k: int) -> int:
        return min(top_k, self.count)

    def candidates(self, queries_qC: Values, top_k: int) -> Candidates:
        top_k = self.considered(top_k)
        rows_qK = np.empty((len(queries_qC), top_k), np.int64)
        scores_qK = np.empty((len(queries_qC), top_k), np.float32)
        wide = _tensor(queries_qC)
        narrow = wide.bfloat16() if self._bf16 else wide
        maxima_qG = self._maxima(queries_qC, narrow)
        first_qK = maxima_qG.topk(min(top_k, maxima_qG.shape[1]), dim=1, sorted=False).indices.numpy()
        norms_q = norms(queries_qC)
        lost_q = norms(queries_qC - narrow.float().numpy())
        for number, (query_C, maxima_G) in enumerate(zip(queries_qC, maxima_qG.numpy(), strict=True)):
            first = first_qK[number]
            rows, values = best(*self._scored(first, query_C), top_k)
            # K hits are known now, because K groups or all rows have been scored.
            is_left_G = self._upper(maxima_G, norms_q[number], lost_q[number]) >= values[-1]
            is_left_G[first] = False
            left = np.flatnonzero(is_left_G)
            # If very many rows are as near, they are scored in pieces to limit memory.
            for start, stop in ranges(len(left), _GROUPS_AT_ONCE):
                more_rows, more_values = self._scored(left[start:stop], query_C)
                rows, values = best(np.append(rows, more_rows), np.append(values, more_values), top_k)
            rows_qK[number] = rows
            scores_qK[number] = values
        return Candidates(rows_qK, scores_qK, scores_qK)

    def _maxima(self, queries_qC: Values, narrow_qC: Any) -> Any:
        """(q, G) largest product per group, rounded up; for l2, minus half of the row's squared norm."""
        import torch

        narrow_Cq = narrow_qC.T.contiguous()
        maxima_Gq = torch.empty((int(self._first_groups[-1]), len(queries_qC)))
        rows_at_once = _BLOCK if self._bf16 else min(_BLOCK, -(-_RESULTS // len(queries_qC) // GROUP) * GROUP)
        for first_group, part in zip(self._first_groups.tolist(), self._parts, strict=False):
            rows_nC = _tensor(part["filter"]).view(torch.bfloat16) if self._bf16 else _tensor(part["vectors"])
            common_q = torch.from_numpy(queries_qC @ part["centre"])
            for start, stop in ranges(len(rows_nC), rows_at_once):
                # Rows are the first axis, so that a maximum over 64 rows reads whole cache lines.
                products_nq = rows_nC[start:stop] @ narrow_Cq
                if self.metric == "l2":
                    products_nq = products_nq.float() - _tensor(part["half_squares"][start:stop])[:, None]
                if len(products_nq) % GROUP:  # at the end of a part
                    padding = (0, 0, 0, -len(products_nq) % GROUP)
                    products_nq = torch.nn.functional.pad(products_nq, padding, value=-np.inf)
                groups_gq = products_nq.view(-1, GROUP, products_nq.shape[1]).amax(dim=1).float()
                if self._bf16:
                    groups_gq = groups_gq + groups_gq.abs() * _PRODUCT + common_q
                group = first_group + start // GROUP
                maxima_Gq[group : group + len(groups_gq)] = groups_gq
        return maxima_Gq.T.contiguous()

    def _upper(self, maxima_G: Values, norm: float, lost: float) -> NDArray[np.float64]:
        """(G,) upper bounds of scores per group. ``norm``: the query's norm; ``lost``: norm of its bf16 error."""
        upper_G = maxima_G + norm * self._errors_G
        upper_G += _SMALLEST * self.channels * (1 + norm + float(self._norms_G.max()))
        if self._bf16:
            upper_G += lost * self._radii_G
        if self.metric == "l2":
            # The value rounded to bf16 was larger by half of the squared norm.
            upper_G += self._norms_G**2 / 2 * (_PRODUCT if self._bf16 else 0)
            upper_G += (self.channels + 16) * _FP32 * (norm + self._norms_G) ** 2
            return 2 * upper_G - norm**2
        return upper_G

    def _scored(self, groups: NDArray[np.intp], query_C: Values) -> tuple[NDArray[np.int64], Values]:
        """Rows and scores of whole groups."""
        rows = []
        values = []
        for group in groups.tolist():
            number = self._part_of_G[group]
            part = self._parts[number]
            start = (group - int(self._first_groups[number])) * GROUP
            # Slices, so that only scored rows are read from the mapped file.
            block_nC = part["vectors"][start : start + GROUP]
            values.append(scores(self.metric, block_nC, query_C))
            first = int(self._firsts[number]) + start
            rows.append(np.arange(first, first + len(block_nC)))
        return np.concatenate(rows), np.concatenate(values)


def _tensor(array: NDArray) -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # the tensor is only read
        return torch.from_numpy(array)
