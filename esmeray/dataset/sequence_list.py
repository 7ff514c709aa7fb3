"""Sequences that a caller gives in Python, cleaned as a store has them.

In: a list, an array or a Series of str. Out: a list of the same length. The rules are those for records of a file
(:mod:`esmeray.dataset.fasta.reader`, :mod:`esmeray.dataset.store.ingest`) with their default policies. Changes are
counted in a warning; refusals name the item of the list.
"""

import io
import warnings
from collections.abc import Iterable, Mapping, Set
from typing import Any, Literal

from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.fasta.reader import RecordBatch
from esmeray.dataset.fasta.records import Records
from esmeray.dataset.section import IngestSection
from esmeray.dataset.store.ingest import Ingest


def checked_list(values: Iterable[Any], name: str, items: str = "str") -> Iterable[Any]:
    """The argument ``name``, if it is a list or another iterable in one dimension. Raises ConfigError otherwise."""
    # Python also iterates over letters of a str, keys of a dict and columns of a table, and would give each a result.
    is_list = isinstance(values, Iterable) and not isinstance(values, (str, bytes, bytearray, Mapping, Set))
    if not is_list or getattr(values, "ndim", 1) != 1:
        raise ConfigError(f"{name}: a list of {items} is needed, not {values!r:.40}; give a single one as a list")
    return values


def checked_text(value: Any, name: str) -> str:
    """The value, if it is a str. Raises DataError for anything else, such as None or NaN of a Series."""
    if not isinstance(value, str):
        raise DataError(f"{name}: a str is needed, not {value!r:.40}; fill in or remove what is missing")
    return str(value)  # a plain one of NumPy's


def checked_texts(values: Iterable[Any], name: str) -> list[str]:
    """A list, array or Series of str as a list. Raises EsmerayError for anything else, with the first wrong item."""
    return [checked_text(value, f"{name}[{index}]") for index, value in enumerate(checked_list(values, name))]


def clean_list(values: Iterable[Any], name: str, content: Literal["protein", "text"] = "protein") -> list[str]:
    """Sequences as a store has them, of a list, array or Series of str; texts are only checked.

    Raises ConfigError where ``values`` is no list, DataError with a line for each item that is refused.
    """
    texts = checked_texts(values, name)
    if content == "protein":  # lines are joined as in a file
        texts = ["".join(map(str.strip, io.StringIO(text, newline=None))) for text in texts]
    policies = IngestSection()
    for index in [index for index, text in enumerate(texts) if len(text) > policies.max_residues]:
        raise DataError(f"{name}[{index}]: {len(texts[index]):,} residues, more than {policies.max_residues:,}")
    names = [f"{name}[{index}]".encode() for index in range(len(texts))]
    # Characters outside Latin-1 are never residues; for texts only the length matters here.
    records = Records.of(names, [text.encode("latin-1", "replace") for text in texts])
    ingest = Ingest(policies, content=content)
    try:
        with ingest.faults.raised_at_end():
            block = ingest.clean(RecordBatch(records))
    except DataError as error:
        # Another policy is a remedy for commands: a list has the default ones.
        raise DataError(*(problem.partition(", or give --data.ingest.")[0] for problem in error.problems)) from None
    changes = "; ".join(ingest.counts.lines())
    if changes:
        warnings.warn(f"{name}: {changes}", stacklevel=3)  # of the caller of the public function
    return block.texts() if block is not None and content == "protein" else texts
