"""Term scores from annotated proteins, and their blend.

In: annotations, and the similarity of each query to the annotated proteins. Out: sparse scores in which no term scores
above its parents. This holds because annotations are propagated and every predictor here is a weighted mean of them
with non-negative weights.

Shape legend: N queries, M annotated proteins, V terms of an aspect, C channels, P parts of a blend.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.sparse import csr_array, diags_array

LEAST = 5e-4
"""Smallest score kept: smaller ones would be written as 0.000."""


def naive(terms: csr_array, queries: int) -> csr_array:
    """Return (N, V) term frequencies among the annotated proteins (M, V), the same for all queries."""
    share_V = np.bincount(terms.indices, minlength=terms.shape[1]) / max(1, terms.shape[0])
    # Pruned as a row, before it is repeated: most terms are rare, and each query would store them all.
    return csr_array(np.ones((queries, 1))) @ pruned(csr_array(share_V[None]))


def transferred(weights: csr_array, terms: csr_array) -> csr_array:
    """Return (N, V) annotation transfer: a term's share of a query's total weight.

    ``weights`` (N, M) are of queries and annotated proteins, ``terms`` (M, V) the annotations. With bit scores this is
    the best simple baseline of the CAFA benchmarks (sum of bit scores; DiamondScore of Kulmanov and Hoehndorf 2020). A
    query without neighbours has no scores.
    """
    total_N = weights.sum(axis=1)
    shares = diags_array(np.divide(1, total_N, out=np.zeros(len(total_N)), where=total_N > 0)) @ weights
    return pruned(shares @ terms.astype(float))


def nearest(queries_NC: NDArray, annotated_MC: NDArray, neighbours: int, temperature: float) -> csr_array:
    """Return (N, M) weights exp(cosine / temperature), relative to the largest, of the nearest k proteins by cosine."""
    from sklearn.neighbors import NearestNeighbors  # imported here: it takes a second

    number = min(neighbours, len(annotated_MC))
    index = NearestNeighbors(n_neighbors=number, algorithm="brute", metric="cosine").fit(annotated_MC)
    distance_Nk, nearest_Nk = index.kneighbors(queries_NC)
    # Relative to the largest: at a low temperature the exponentials could overflow or vanish.
    weights_Nk = np.exp((distance_Nk.min(axis=1, keepdims=True) - distance_Nk.astype(float)) / temperature)
    ends = np.arange(len(queries_NC) + 1) * number
    return csr_array((weights_Nk.ravel(), nearest_Nk.ravel(), ends), shape=(len(queries_NC), len(annotated_MC)))


def pruned(scores: csr_array) -> csr_array:
    """Remove scores below :data:`LEAST`."""
    scores.data[scores.data < LEAST] = 0
    scores.eliminate_zeros()
    return scores


def blended(parts: Mapping[str, csr_array], weights: Mapping[str, float]) -> csr_array:
    """Return the (N, V) weighted sum of the parts (N, V), at most 1."""
    first, *_ = parts.values()
    summed = csr_array(sum((weights[name] * scores for name, scores in parts.items()), csr_array(first.shape)))
    summed.data = np.minimum(summed.data, 1)  # fitted weights need not add up to 1
    return pruned(summed)


def fit_blend(parts: Mapping[str, csr_array], terms: csr_array, accretion_V: NDArray[np.float64]) -> dict[str, float]:
    """Return the non-negative least-squares weights with which the sum of the parts (N, V) fits the terms (N, V).

    A term weighs 1 plus its information accretion. Solved on the (P, P) products of the parts (Lawson and Hanson 1974),
    which avoids dense matrices.
    """
    root_V = diags_array(np.sqrt(1 + accretion_V))
    scaled = [csr_array(scores @ root_V) for scores in parts.values()]
    truth = csr_array(terms.astype(float) @ root_V)
    products_PP = np.array([[scores.multiply(other).sum() for other in scaled] for scores in scaled])
    with_truth_P = np.array([scores.multiply(truth).sum() for scores in scaled])
    # With L L^T the products, the least squares of L^T w = L^-1 b have the same solution as the parts themselves. Parts
    # that are alike or empty need the small diagonal to be factorised; it is relative to the size of the products.
    factor_PP = np.linalg.cholesky(products_PP + 1e-9 * (1 + np.trace(products_PP)) * np.eye(len(scaled)))
    weights_P, _ = nnls(factor_PP.T, np.linalg.solve(factor_PP, with_truth_P))
    return dict(zip(parts, weights_P.tolist(), strict=True))
