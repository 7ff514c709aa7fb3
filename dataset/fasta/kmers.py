"""k-mers of sequences as numbers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def kmers(residues: NDArray[np.uint8], groups: Sequence[str], k: int) -> NDArray[np.int64]:
    """Number of each k-mer of a sequence in ASCII whose letters are all of a group; groups are the digits."""
    codes = np.full(256, -(len(groups) ** k), np.int64)
    for digit, group in enumerate(groups):
        codes[np.frombuffer(group.encode(), np.uint8)] = digit
    coded, count = codes[residues], max(0, len(residues) - k + 1)
    numbers = np.zeros(count, np.int64)
    for place in range(k):
        numbers = numbers * len(groups) + coded[place : place + count]
    return numbers[numbers >= 0]
