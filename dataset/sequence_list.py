"""Sequences that a caller gives in Python, cleaned as a store has them.

In: a list, an array or a Series of str. Out: a list of the same length. The rules are those for records of a file
(:mod:`esmeray.dataset.fasta.reader`, :mod:`esmeray.dataset.store.ingest`) with their default policies. Changes are
counted in a warning; refusals name the item of the list.
"""

import warnings
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.fasta.reader import RecordBatch, joined_lines
from esmeray.dataset.fasta.records import Records
from esmeray.dataset.section import IngestSection
from esmeray.dataset.store.ingest import Ingest

_POLICY = ", or give --data.ingest."
"""Begins the remedy by another policy, which commands have and a list has not."""


@dataclass(frozen=True, kw_only=True)
class _List(RecordBatch):
    name: str

    def location(self, index: int, residue: int | None = None) -> str:
        return f"{self.name}[{index}]" + ("" if residue is None else f", residue {residue + 1}")


def checked_list(values: Iterable[Any], name: str, items: str = "str") -> Iterable[Any]:
    """The argument ``name``, if it is a list or another iterable in one dimension. Raises ConfigError otherwise."""
    # Python also iterates over letters of a str, keys of a dict and columns of a table, and would give each a result.
    is_list = isinstance(values, Iterable) and not isinstance(values, (str, bytes, bytearray, Mapping, Set))
    if not is_list or getattr(values, "ndim", 1) != 1:
        raise ConfigError(
            f"{name}: a list of {items} is needed, not {_described(values)}; for a single one, give a list of one"
        )
    return values


def checked_text(value: Any, name: str) -> str:
    """The value, if it is a str. Raises DataError for anything else, such as None or NaN of a Series."""
    if not isinstance(value, str):
        raise DataError(f"{name}: a str is needed, not {_described(value)}; fill in or remove what is missing")
    return str(value)  # a plain one of NumPy's


def checked_texts(values: Iterable[Any], name: str) -> list[str]:
    """A list, array or Series of str as a list. Raises EsmerayError for anything else, with the first wrong item."""
    return [checked_text(value, f"{name}[{index}]") for index, value in enumerate(checked_list(values, name))]


def clean_list(values: Iterable[Any], name: str, content: Literal["protein", "text"] = "protein") -> list[str]:
    """Sequences as a store has them, of a list, array or Series of str; texts are only checked.

    Raises ConfigError where ``values`` is no list, DataError with a line for each item that is refused.
    """
    texts = checked_texts(values, name)
    if content == "protein":
        texts = [joined_lines(item, f"{name}[{index}]") for index, item in enumerate(texts)]
    if not texts:
        return texts
    ids = [str(index).encode() for index in range(len(texts))]
    # Any str has bytes, also one with half a surrogate pair, which is the tokenizer's business.
    batch = _List(Records.of(ids, [item.encode("utf-8", "surrogatepass") for item in texts]), name=name)
    ingest = Ingest(IngestSection(), content=content)
    try:
        with ingest.faults.raised_at_end():
            block = ingest.clean(batch)
    except DataError as error:
        raise DataError(*(problem.partition(_POLICY)[0] for problem in error.problems)) from None
    if lines := ingest.counts.lines():
        warnings.warn(f"{name}: {'; '.join(lines)}", stacklevel=3)  # of the caller of the public function
    return texts if block is None or content == "text" else block.texts()


def _described(value: Any) -> str:
    return f"{type(value).__name__} ({value!r:.40})" if isinstance(value, (str, bytes, float)) else type(value).__name__
