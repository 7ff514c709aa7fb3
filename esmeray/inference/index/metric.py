"""Similarity metrics in fp32 with a fixed summation order.

A score depends only on the query and the row, so equal rows have equal scores. Larger is nearer. For ``l2`` the score
is the negative squared distance until :func:`shown` converts it to the distance.

Shape legend: n vectors, C channels.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from esmeray.dataset.embeddings.formats.base import Values

MetricName = Literal["cosine", "dot", "l2"]

MAX_NORM = 2.0**60
"""Maximum length of a vector with finite products in fp32."""


def unusable(metric: MetricName, vectors_nC: Values) -> tuple[NDArray[np.bool_], str]:
    """(n,) vectors that have no score, and the reason."""
    norms_n = norms(vectors_nC)
    if metric == "cosine":
        return norms_n == 0, "is a vector of zeros, which has no cosine,"
    return norms_n > MAX_NORM, f"is longer than {MAX_NORM:.3g}, so that a product is infinite,"


def prepared(metric: MetricName, vectors_nC: Values) -> Values:
    """Vectors as they are compared, C-contiguous. For cosine they have length 1, so that the cosine is the product."""
    if metric == "cosine":
        vectors_nC = (vectors_nC / norms(vectors_nC)[:, None]).astype(np.float32)
    return np.ascontiguousarray(vectors_nC, dtype=np.float32)


def norms(vectors_nC: Values) -> NDArray[np.float64]:
    """(n,) lengths in fp64, because the square of an fp32 value may overflow or underflow in fp32."""
    return np.linalg.norm(vectors_nC.astype(np.float64), axis=1)


def scores(metric: MetricName, rows_nC: Values, query_C: Values) -> Values:
    """(n,) scores of prepared rows with a prepared query."""
    # einsum sums the channels of each row in order, while BLAS chooses its order by the number of rows.
    if metric == "l2":
        differences_nC = rows_nC - query_C
        return -np.einsum("nc,nc->n", differences_nC, differences_nC)
    return np.einsum("nc,c->n", rows_nC, query_C)


def shown(metric: MetricName, scores_nK: Values) -> Values:
    """Scores in the user's units: cosine, dot product, or L2 distance."""
    return np.sqrt(np.maximum(-scores_nK, 0)) if metric == "l2" else scores_nK
