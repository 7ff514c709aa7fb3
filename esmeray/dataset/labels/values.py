"""Parse a value of a file as a label, part, weight or group. Invalid values raise ValueError."""

import ast
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError, expanded
from esmeray.dataset.identifiers import match_ids
from esmeray.dataset.section import LabelsSection
from esmeray.dataset.table import Table, is_missing, numbered_lines
from esmeray.dataset.targets import LabelSpace

Label = str | list[str] | tuple[float, ...]
Value = TypeVar("Value")

_PARTS = {
    **dict.fromkeys(("train", "training"), "training"),
    **dict.fromkeys(("valid", "validation", "val", "dev"), "validation"),
    "test": "test",
}
_TRUTHS = {
    **dict.fromkeys(("0", "0.0", "false", "f", "no", "n"), 0.0),
    **dict.fromkeys(("1", "1.0", "true", "t", "yes", "y"), 1.0),
}
_MEND_LABEL = "correct it, or replace it with nan and give --data.labels.missing_labels skip"
_LIST = re.compile(r"""\s*(?:\[.*\]|\{.*\}|\((?:.*,.*)?\)|(?:frozen)?set\(.*\)|(["']).*\1)\s*""", re.DOTALL)
_NUMPY = re.compile(r"""["']\s+["']""")
"""Separator between names in a printed NumPy array, which Python would concatenate to one string."""


def label_reader(labels: LabelsSection) -> Callable[[Sequence[Any]], Label | None]:
    """Return a function that makes a record's label from its values, one per column of ``labels.label_columns``.

    A label is:

    - a name (multiclass, binary),
    - a list of names (multilabel in one column),
    - letters (per_residue),
    - numbers, with NaN for a missing one (regression, multilabel with a column per class),
    - None if it is missing.
    """
    columns = labels.label_columns
    # The kind is resolved once, because a file may have millions of records.
    if labels.kind == "regression":
        return lambda values: _numbers(values, columns, finite)
    if labels.kind == "multilabel" and len(columns) > 1:
        return lambda values: _numbers(values, columns, _truth)
    if labels.kind == "multilabel":
        return SeparatedNames(labels.separator, labels.not_missing)
    if labels.kind == "per_residue":
        return lambda values: _letters(values[0], labels.not_missing)
    return lambda values: _name(values[0], labels.not_missing)


def text_of(value: Any) -> str:
    """Return a value of a table as text, empty if it is missing; raises ValueError for bytes, lists and structures."""
    if isinstance(value, str):
        return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    # str() would accept them, too, and a model would learn their brackets.
    if isinstance(value, bytes | list | dict | tuple):
        raise ValueError(f"expected text, found {type(value).__name__}")
    return str(value)


def read_values(
    path: Path, column: str, values: Iterable[Any], read: Callable[[Any], Value], first_row: int = 1
) -> list[Value]:
    """Return the values of a table's column as ``read`` returns them. Raises DataError if it refuses one."""
    parsed = []
    for row, value in enumerate(values, first_row):
        try:
            parsed.append(read(value))
        except ValueError as error:
            raise DataError(f"{path}, row {row}, column {column!r}: {error}; correct it") from None
    return parsed


def labels_by_id(
    path: Path, label_column: str, section: str = "", not_missing: Collection[str] = (), id_column: str | None = None
) -> dict[str, str]:
    """Return the labels of a table by id, as text; a missing label is empty.

    ``label_column`` and ``id_column`` (default: ``id``) are settings of ``section``, if there is one, for messages.

    Raises DataError if the table can't be read, or an id is missing or repeats.
    """
    ids = id_column or "id"
    wanted = {
        ids: f"{section}.id_column" if id_column else "",
        label_column: f"{section}.label_column" if section else "",
    }
    columns = Table(path, wanted, not_missing).columns()
    texts = {column: read_values(path, column, columns[column], text_of) for column in wanted}
    labels: dict[str, str] = {}
    for row, values in enumerate(zip(texts[ids], texts[label_column], strict=True), 1):
        name, label = map(str.strip, values)
        if not name:
            raise DataError(f"{path}, row {row}: column {ids!r} is empty; add an id, or remove the row")
        if name in labels:
            raise DataError(f"{path}, row {row}: duplicate id {name!r}; keep one of the rows")
        labels[name] = label
    return labels


def labels_of(ids: Iterable[str], labels: Mapping[str, str], source: object, labels_source: object) -> dict[str, str]:
    """Return the labels of ``ids`` of ``source``, matched to the ids of a table; ids without a label are left out.

    Raises DataError as :func:`~esmeray.dataset.identifiers.match_ids`.
    """
    matches = match_ids(ids, labels, source, labels_source)
    return {record_id: labels[name] for record_id, name in matches.items() if labels[name]}


def finite(value: Any) -> float:
    """Return a value as a number, NaN if it is missing; raises ValueError if it is not a number or infinite."""
    if isinstance(value, bool | int | float | Decimal):
        number = float(value)
    else:
        number = _parsed(text_of(value).strip())
    if math.isinf(number):
        raise ValueError("the number is infinite")
    return number


def _parsed(text: str) -> float:
    try:
        # float() accepts '1_000', which is not a number in tables.
        return math.nan if is_missing(text) else float(text.replace("_", "?"))
    except ValueError:
        raise ValueError(f"{text!r} is not a number{' (use a decimal point)' if ',' in text else ''}") from None


def group(value: Any) -> str:
    """Return a value as the name of a group; raises ValueError if it is missing."""
    name = text_of(value).strip()
    if not name:
        raise ValueError("the group is missing; fill it in, or give the record a group of its own")
    return name


def split_part(value: Any, validation: Any = None) -> str:
    """Return training, validation or test from a value of the split column.

    ``validation`` is FLIP's second column: a true value turns training into validation. Raises ValueError for unknown
    values.
    """
    text = text_of(value).strip()
    if text.lower() not in _PARTS:
        raise ValueError(f"unknown split {text!r}; use one of {', '.join(_PARTS)}")
    name = _PARTS[text.lower()]
    is_held_out = _truth(validation, "column 'validation' (if it is not a split, rename it): ") == 1
    return "validation" if is_held_out and name == "training" else name


def _letters(value: Any, keep: Collection[str]) -> str | None:
    # Not stripped, because a blank is a letter of DSSP.
    letters = text_of(value)
    return None if is_missing(letters, keep) else letters


def _name(value: Any, keep: Collection[str]) -> str | None:
    name = _letters(value, keep)
    return None if name is None else name.strip()


class SeparatedNames:
    """Reader of a multilabel target in one value: names with a separator between them, or a list.

    It remembers all separated names, to detect a wrong separator.
    """

    def __init__(self, separator: str, keep: Collection[str]) -> None:
        self._separator = separator
        self._keep = keep
        self._names: set[str] = set()
        self._has_several = False

    def __call__(self, values: Sequence[Any]) -> list[str] | None:
        """Return the names of one record; None if the value or a name is missing. Raises ValueError for a bad list."""
        value = _as_list(values[0]) if isinstance(values[0], str) else values[0]
        # An empty list (Parquet) is a label without names; an empty text is a missing label.
        if isinstance(value, list | tuple | set):
            listed = [_name(name, self._keep) for name in value]
            return None if None in listed else _distinct([*filter(None, listed)])
        names = _distinct([name.strip() for name in text_of(value).split(self._separator) if name.strip()])
        if not names or any(is_missing(name, self._keep) for name in names):
            return None
        self._names.update(names)
        self._has_several |= len(names) > 1
        return names

    def doubt(self) -> str | None:
        """Return why a name may be several names; None if some records have two names and no name looks like more."""
        names = sorted(self._names)
        # The second group also occurs inside names, so it is considered only if no record has several names.
        marks = "|,\t/;&+" + ("" if self._has_several else ": _-")
        joined = [
            (name, mark)
            for mark in marks
            for name in names
            if mark in name and (mark == "|" or self._names.issuperset(map(str.strip, name.split(mark))))
        ]
        if not joined and not self._has_several:
            # Suggest the first of these separators that occurs, otherwise report the first name without a suggestion.
            joined = [(name, mark) for mark in (",", "\t", "/", "") for name in names if mark in name]
        if not joined:
            return None
        name, mark = joined[0]
        fits = f"no record has several names separated by {self._separator!r}"
        if mark:
            quoted = "$'\\t'" if mark == "\t" else f"'{mark}'"
            fits = f"if {mark!r} separates names, give --data.labels.separator {quoted}"
        return (
            f"{name!r:.100} is read as a single multilabel name; {fits}; if it is a single name, write it as a "
            'list, ["NAME"], or set data.labels.kind to multiclass'
        )


def _distinct(names: list[str]) -> list[str]:
    distinct = sorted(set(names))
    if len(distinct) < len(names) and _TRUTHS.keys() >= set(map(str.lower, distinct)):
        raise ValueError("0s and 1s are not a list of names; list one column per class in data.labels.label_columns")
    return distinct


def _as_list(text: str) -> Any:
    """Parse a list in JSON or Python syntax; return other text as it is. Raises ValueError for a malformed list."""
    if not _LIST.fullmatch(text):
        return text
    for load in (json.loads,) if _NUMPY.search(text) else (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return load(text.strip())
    if text.lstrip().startswith("("):  # also the start of names: (R)-mandelate dehydrogenase (NAD, FAD)
        return text
    raise ValueError(f'{text!r:.60} looks like a list but is not valid JSON; write ["a", "b"]')


def _numbers(values: Sequence[Any], columns: Sequence[str], read: Callable[[Any], float]) -> tuple[float, ...] | None:
    # A record with some of its numbers can be learnt from; a record with none is missing its label.
    numbers = []
    for value, column in zip(values, columns, strict=True):
        try:
            numbers.append(read(value))
        except ValueError as error:
            raise ValueError(f"column {column!r}: {error}; {_MEND_LABEL}") from error
    return None if all(map(math.isnan, numbers)) else tuple(numbers)


def _truth(value: Any, source: str = "") -> float:
    text = text_of(value).strip()
    if not is_missing(text) and text.lower() not in _TRUTHS:
        raise ValueError(f"{source}{value!r} is not 0 or 1 (or true, false, yes, no)")
    return _TRUTHS.get(text.lower(), math.nan)


def read_label_weights(path: Path, space: LabelSpace) -> NDArray[np.float32]:
    """Return (C,) float32 weights from a TSV of label and weight; 1 for labels that it lacks.

    Raises DataError if the file can't be read, or a line has an unknown or repeated label or no weight.
    """
    # Labels are popped, so that a repeated label is missing the second time.
    codes = {name: code for code, name in enumerate(space.names)}
    weights_C = np.ones(len(codes), dtype=np.float32)
    for number, line in numbered_lines(expanded(path)):
        name, _, value = line.partition("\t")
        try:
            weight = finite(value)
            if not weight >= 0:  # negative or missing
                raise ValueError(f"invalid weight {value!r}; give a finite number of at least 0")
            weights_C[codes.pop(name.strip())] = weight
        except KeyError:
            problem = "is listed twice" if name.strip() in space.names else "does not occur in the training records"
            raise DataError(f"{path}, line {number}: the label {name!r} {problem}; remove the line") from None
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
    return weights_C
