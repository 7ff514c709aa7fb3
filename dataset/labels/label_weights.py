"""Weights of the C labels of a label space in the loss, from a file."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from dataset.labels.label_space import LabelSpace
from dataset.labels.values import weight
from dataset.table import numbered_lines


def read_label_weights(path: Path, space: LabelSpace) -> NDArray[np.float32]:
    """(C,) float32 weights from a TSV of label and weight, 1 for labels that it lacks.

    Raises DataError where the file can't be read, names a label twice or one that the label space does not hold, or has
    a weight that is no finite number of 0 or more.
    """
    codes = {name: code for code, name in enumerate(space.names)}
    weights_C = np.ones(len(codes), dtype=np.float32)
    for number, line in numbered_lines(path.expanduser()):
        name, _, value = line.partition("\t")
        try:
            weights_C[codes.pop(name.strip())] = weight(value)
        except KeyError:
            problem = "stands there twice" if name.strip() in space.names else "is not among the training records'"
            raise DataError(f"{path}, line {number}: the label {name!r} {problem}; remove the line") from None
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
    return weights_C
