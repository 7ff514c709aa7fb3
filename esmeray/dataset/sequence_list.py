"""Clean sequences that are passed from Python, by the rules of stores.

In: a list, an array or a Series of str. Out: a list of the same length. The rules are those for records of a file
(:mod:`esmeray.dataset.fasta.reader`, :mod:`esmeray.dataset.store.ingest`), with the default policies. Changes are
counted in a warning. Errors name the item of the list.
"""

import io
import warnings
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any, Literal

from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.fasta.reader import MAX_RESIDUES, RecordBatch
from esmeray.dataset.fasta.records import Records
from esmeray.dataset.section import IngestSection
from esmeray.dataset.store.ingest import Ingest


def checked_list(values: Iterable[Any], name: str, items: str = "str") -> Iterable[Any]:
    """Return the argument ``name`` if it is a one-dimensional iterable. Raises ConfigError otherwise."""
    # Also iterable, but surely a mistake: letters of a str, keys of a dict, columns of a table.
    is_list = isinstance(values, Iterable) and not isinstance(values, (str, bytes, bytearray, Mapping, Set))
    if not is_list or getattr(values, "ndim", 1) != 1:
        raise ConfigError(f"{name}: expected a list of {items}, found {values!r:.40}; wrap a single value in a list")
    return values


def checked_paths(values: str | Path | Iterable[Any], name: str) -> list[str]:
    """Return a path or a list of paths as texts. Raises ConfigError for anything else."""
    paths = [values] if isinstance(values, (str, Path)) else checked_list(values, name, "paths")
    return [*map(str, paths)]


def checked_text(value: Any, name: str) -> str:
    """Return the value if it is a str. Raises DataError otherwise, e.g. for None or NaN of a Series."""
    if not isinstance(value, str):
        raise DataError(f"{name}: expected a str, found {value!r:.40}; fill in or remove missing values")
    return str(value)  # converts NumPy's str to a plain one


def checked_texts(values: Iterable[Any], name: str) -> list[str]:
    """Return a list, array or Series of str as a list. Raises EsmerayError otherwise, with the first wrong item."""
    return [checked_text(value, f"{name}[{index}]") for index, value in enumerate(checked_list(values, name))]


def clean_list(values: Iterable[Any], name: str, content: Literal["protein", "text"] = "protein") -> list[str]:
    """Return the sequences of a list, array or Series of str, cleaned as in a store. Texts are only checked.

    Raises ConfigError if ``values`` is not a list, DataError with one line per refused item.
    """
    texts = checked_texts(values, name)
    if content == "protein":  # lines are joined as in a file
        texts = ["".join(map(str.strip, io.StringIO(text, newline=None))) for text in texts]
    for index, text in enumerate(texts):
        if len(text) > MAX_RESIDUES:
            raise DataError(f"{name}[{index}]: {len(text):,} residues, more than the maximum of {MAX_RESIDUES:,}")
    # Characters outside Latin-1 are never residues. For texts only the length matters here.
    encoded = [text.encode("latin-1", "replace") for text in texts]
    records = Records.of([(f"{name}[{index}]".encode(), text) for index, text in enumerate(encoded)])
    ingest = Ingest(IngestSection(), content=content)
    try:
        with ingest.faults.raised_at_end():
            block = ingest.clean(RecordBatch(records))
    except DataError as error:
        # Strip the remedy of another policy, which only commands can set.
        raise DataError(*(problem.partition(", or give --data.ingest.")[0] for problem in error.problems)) from None
    changes = "; ".join(ingest.counts.lines())
    if changes:
        warnings.warn(f"{name}: {changes}", stacklevel=3)  # at the call of the public function
    return block.texts() if block is not None and content == "protein" else texts
