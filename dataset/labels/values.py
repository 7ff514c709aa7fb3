"""One value of a file to one label, part or weight, refused by a ValueError where it is none."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.dataset.labels.label_space import LabelSpace
from esmeray.dataset.section import LabelsSection
from esmeray.dataset.table import Table, numbered_lines

Label = str | list[str] | tuple[float, ...]

_PARTS = {
    **dict.fromkeys(("train", "training"), "training"),
    **dict.fromkeys(("valid", "validation", "val", "dev"), "validation"),
    "test": "test",
}
_TRUTHS = {"0": 0.0, "0.0": 0.0, "false": 0.0, "1": 1.0, "1.0": 1.0, "true": 1.0}
_NOT_A_NUMBER = "nan"
_MEND_LABEL = f"mend it, or write {_NOT_A_NUMBER} in its place and give --data.labels.missing_labels skip"


def label_reader(labels: LabelsSection) -> Callable[[Sequence[Any]], Label | None]:
    """A function that makes a label of the values of one record, one for each of ``labels.label_columns``.

    A name (multiclass, binary), a list of names (multilabel in one column), letters (per_residue), or numbers with NaN
    where one is missing (regression, multilabel with a column for each class). None where the label is missing.
    """
    columns = labels.label_columns
    # Chosen once: a file may have millions of records.
    if labels.kind == "regression":
        return lambda values: _numbers(values, columns, _finite)
    if labels.kind == "multilabel" and len(columns) > 1:
        return lambda values: _numbers(values, columns, _truth)
    if labels.kind == "multilabel":
        return lambda values: _names(values[0], labels.separator)
    if labels.kind == "per_residue":
        return lambda values: text_of(values[0]).strip() or None
    return lambda values: _name(values[0])


def text_of(value: Any) -> str:
    """A value of a table as text, empty where it is missing; raises ValueError for bytes, lists and structures."""
    if isinstance(value, str):
        return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    # Python would write them as text, too, and a model learn their brackets.
    if isinstance(value, bytes | list | dict | tuple):
        raise ValueError(f"a text is needed, not {type(value).__name__}")
    return str(value)


def labels_by_id(path: Path, id_column: str, label_column: str, section: str) -> dict[str, str]:
    """Labels of a table as text, empty where there is none; the columns are settings of the section.

    Raises DataError for a table that can't be read, or repeats an id.
    """
    columns = Table(path, {id_column: f"{section}.id_column", label_column: f"{section}.label_column"}).columns()
    ids = [text_of(value) for value in columns[id_column]]
    repeated = [record_id for record_id, count in Counter(ids).items() if count > 1]
    if repeated:
        raise DataError(f"{path}: id {repeated[0]!r} repeats; leave one row of it")
    return dict(zip(ids, map(text_of, columns[label_column]), strict=True))


def number(value: Any) -> float:
    """A value as a number, NaN where it is missing; raises ValueError where it is none."""
    if isinstance(value, bool | int | float | Decimal):
        return float(value)
    text = text_of(value).strip()
    try:
        # Python takes '1_000' for a number, which no table means.
        return math.nan if not text else float(text.replace("_", "?"))
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def weight(value: Any) -> float:
    """A value as the weight of a record; raises ValueError where it is no finite number of 0 or more."""
    try:
        weighed = number(value)
    except ValueError:
        weighed = math.nan
    if not 0 <= weighed < math.inf:
        raise ValueError(f"the weight {value!r} is no finite number of 0 or more; give one")
    return weighed


def group(value: Any) -> str:
    """A value as the name of a group; raises ValueError where it is missing."""
    name = text_of(value).strip()
    if not name:
        raise ValueError("the group is missing; complete it, or give the record a group of its own")
    return name


def part(value: Any) -> str:
    """A value of the split column as training, validation or test; raises ValueError where it names none of them."""
    text = text_of(value).strip()
    try:
        return _PARTS[text.lower()]
    except KeyError:
        raise ValueError(f"the split {text!r} is not known; write one of {', '.join(_PARTS)}") from None


def _name(value: Any) -> str | None:
    name = text_of(value).strip()
    return None if name.lower() in ("", _NOT_A_NUMBER) else name


def _names(value: Any, separator: str) -> list[str] | None:
    # A list, of Parquet, may be empty: no name is a label there, and missing in a text.
    if isinstance(value, list | tuple):
        return sorted({text_of(name).strip() for name in value} - {""})
    text = _name(value)
    if text is None:
        return None
    return sorted({name.strip() for name in text.split(separator)} - {""}) or None


def _numbers(values: Sequence[Any], columns: Sequence[str], read: Callable[[Any], float]) -> tuple[float, ...] | None:
    # A record with some of its numbers can be learnt from, one without any can't.
    numbers = []
    for value, column in zip(values, columns, strict=True):
        try:
            numbers.append(read(value))
        except ValueError as error:
            raise ValueError(f"column {column!r}: {error}; {_MEND_LABEL}") from error
    return None if all(map(math.isnan, numbers)) else tuple(numbers)


def _finite(value: Any) -> float:
    finite = number(value)
    if math.isinf(finite):
        raise ValueError("an infinite number can't be learnt")
    return finite


def _truth(value: Any) -> float:
    text = text_of(value).strip().lower()
    if text in ("", _NOT_A_NUMBER):
        return math.nan
    try:
        return _TRUTHS[text]
    except KeyError:
        raise ValueError(f"{value!r} is neither 0 nor 1, which multilabel columns hold") from None


def read_label_weights(path: Path, space: LabelSpace) -> NDArray[np.float32]:
    """(C,) float32 weights from a TSV of label and weight, 1 for labels that it lacks.

    Raises DataError where the file can't be read, or a line names no label, one twice, or has no weight.
    """
    # Taken out as they are met, so that a name that comes twice is missing the second time.
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
