"""Nested labels: a.b.c is of the group a.b.c at level 0, of a.b at level 1, of a at level 2.

Shape legend: C labels, L levels.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from esmeray.dataset.targets import IGNORED_TARGET


def level_ids(labels: Sequence[str], levels: int) -> NDArray[np.int64]:
    """(C, L) number of the group of each label at each level; IGNORED_TARGET where it has no such level."""
    ids_CL = np.full((len(labels), levels), IGNORED_TARGET, dtype=np.int64)
    for level in range(levels):
        known = [index for index, label in enumerate(labels) if label and label.count(".") >= level]
        shortened = [labels[index].rsplit(".", level)[0] for index in known]
        ids_CL[known, level] = np.unique(shortened, return_inverse=True)[1]
    return ids_CL
