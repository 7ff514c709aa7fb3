"""Scores of terms propagated to their ancestors.

In: scores of proteins by terms, 0 where there is none. Out: the same with a score for each ancestor, so that a term
never scores above its parents (``max``), or with new scores only where there was none (``fill``), both as in cafaeval
1.3. Terms are taken level by level, for some hundred proteins at a time, which keeps the dense part small.

Shape legend: N proteins, V terms, B proteins of a block.
"""

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from function.ontology import Aspect

Method: TypeAlias = Literal["max", "fill"]
BLOCK = 256
"""Proteins at a time: the scores of 25,000 terms then take 6 MB as bytes."""


def propagate(scores: csr_array, aspect: Aspect, method: Method = "max") -> csr_array:
    """Propagate (N, V) scores, not below 0, of any type. Returns a new matrix of that type."""
    blocks = []
    for start in range(0, scores.shape[0], BLOCK):
        block_VB = dense(scores[start : start + BLOCK])
        propagate_dense(block_VB, aspect, method)
        blocks.append(csr_array(block_VB.T))
    return vstack(blocks, format="csr") if blocks else scores.copy()


def dense(rows: csr_array) -> NDArray[Any]:
    """(V, B) of (B, V): a term's scores lie beside each other."""
    return rows.T.toarray(order="C")


def propagate_dense(scores_VB: NDArray[Any], aspect: Aspect, method: Method) -> None:
    """Propagate in place.

    ``max`` gives a term the largest score of itself and its descendants. ``fill`` gives it the largest of its children,
    themselves filled, where its own is 0.
    """
    for terms, children, starts in aspect.steps:
        below = np.maximum.reduceat(scores_VB[children], starts, axis=0)
        own = scores_VB[terms]
        scores_VB[terms] = np.maximum(own, below) if method == "max" else np.where(own == 0, below, own)
