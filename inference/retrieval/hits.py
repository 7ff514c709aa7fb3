"""Hits of proteins of an index in the rest of it, and the proteins that are asked for.

Shape legend: n queries, K hits of one.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.dataset.embeddings.manifest import parts as ranges
from esmeray.dataset.table import numbered_lines
from esmeray.inference.index.index import Index

_BLOCK = 256
"""Queries at once, for memory: all rows of an index may be hits."""


def own_hits(
    index: Index, rows_n: NDArray[np.int64], top_k: int
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.floating]]]:
    """Each row with the rows (K,) and scores (K,) of its hits, the nearest first, without itself."""
    for start, stop in ranges(len(rows_n), _BLOCK):
        hits_nk, scores_nk = index.search(index.vectors(rows_n[start:stop]), top_k + 1)
        for row, hits_k, scores_k in zip(rows_n[start:stop].tolist(), hits_nk, scores_nk, strict=True):
            # Where the row itself is not among them there is one too many; -1 where there are fewer.
            kept = np.flatnonzero((hits_k >= 0) & (hits_k != row))[:top_k]
            yield row, hits_k[kept], scores_k[kept]


def chosen(path: Path | None, numbers: Mapping[str, int], labels: Path) -> NDArray[np.int64]:
    """(n,) numbers of the ids in a file, one a line, or of all with a label; DataError for one that has none."""
    if not numbers:
        raise DataError(f"{labels}: has none of the ids that are searched, or no label of them")
    if path is None:
        return np.array(list(numbers.values()))
    wanted = []
    for line, text in numbered_lines(path):
        name = text.strip()
        if name and name not in numbers:
            raise DataError(f"{path}, line {line}: {name!r} is not there, or has no label; leave it out")
        if name:
            wanted.append(numbers[name])
    return np.array(wanted, dtype=np.int64)
