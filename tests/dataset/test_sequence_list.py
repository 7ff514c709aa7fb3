"""A Python list of sequences is cleaned and refused like a FASTA file of the same sequences."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.section import IngestSection
from esmeray.dataset.sequence_list import clean_list
from esmeray.dataset.store.conversion import convert
from esmeray.dataset.store.reader import open_store

PLAIN = st.text("ACDEFGHIKLMNPQRSTVWYBUZOX", min_size=1, max_size=30)
REPAIRED = st.text("ACDEfghiklJjBUZOX", min_size=1, max_size=12).map(lambda text: f" {text[:5]}\r\n{text[5:]}\t\n*")
ANY = st.text("ACDwyJX*-.1 \n\r\té\0", max_size=12)


def of_a_file(sequences: list[str]) -> list[str] | None:
    """Sequences of a store converted from a FASTA file; None if the file is refused."""
    with tempfile.TemporaryDirectory() as folder:
        fasta = Path(folder, "in.fasta")
        fasta.write_text("".join(f">p{number}\n{text}\n" for number, text in enumerate(sequences)), newline="")
        try:
            convert([str(fasta)], Path(folder, "store"), IngestSection())
        except DataError:
            return None
        store = open_store(Path(folder, "store"))
        return [store.text(number) for number in range(len(store))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(PLAIN, REPAIRED, ANY), min_size=1, max_size=4))
def test_a_list_is_cleaned_and_refused_as_a_file_of_it(sequences: list[str]):
    expected = of_a_file(sequences)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if expected is None:
            with pytest.raises(DataError, match=r"sequences\[\d\]") as refused:
                clean_list(sequences, "sequences")
            assert "--" not in str(refused.value), "an option of a command is no remedy in Python"
            return
        assert clean_list(sequences, "sequences") == expected
    is_changed = any("".join(text.split()) != clean for text, clean in zip(sequences, expected, strict=True))
    assert bool(caught) == is_changed


def test_changes_are_counted_in_a_warning():
    changes = r"sequences: 2 records with lower-case letters, converted to upper case; 1 final '\*' dropped"
    with pytest.warns(UserWarning, match=changes):
        assert clean_list(["mkt", "MK*", "mKV"], "sequences") == ["MKT", "MK", "MKV"]


def test_arrays_series_tuples_and_iterators_of_str_are_lists():
    expected = ["MKT", "MSIL"]
    for values in (
        np.array(expected),
        np.array(expected, dtype=object),
        pd.Series(expected, index=[7, 3]),
        pd.Series(expected, dtype="string"),
        (*expected,),
        iter(expected),
        dict(zip("ab", expected, strict=True)).values(),
    ):
        assert clean_list(values, "sequences") == expected
    assert clean_list([], "sequences") == []


@pytest.mark.parametrize(
    "values", ["MKT", b"MKT", None, 5, 1.5, {"a": "MKT"}, {"MKT"}, pd.DataFrame({"SEQ": ["MKT"]}), np.array([["MKT"]])]
)
def test_what_is_no_list_is_refused_with_a_request_for_one(values: Any):
    with pytest.raises(ConfigError, match="sequences: expected a list of str, found "):
        clean_list(values, "sequences")


@pytest.mark.parametrize("value", [None, float("nan"), pd.NA, b"MKT", 3, ["MKT"], ("a", "MKT")])
@pytest.mark.parametrize("content", ["protein", "text"])
def test_an_item_that_is_no_str_is_refused_by_its_number(value: Any, content: Any):
    with pytest.raises(DataError, match=r"sequences\[1\]: expected a str, found "):
        clean_list(["MKT", value], "sequences", content)


REFUSED = (
    "[1]', residue 3: the gap character '-' of an alignment; remove the gaps, because models",
    "[3]', residue 1: '>'",
    "[4]', residue 2: the character '1' is not in the alphabet",
)


def test_every_refused_item_is_named_and_texts_are_read_as_they_are():
    with pytest.raises(DataError) as refused:
        clean_list(["MKT", "MK-T", "M", ">a\nMKT", "M1"], "sequences")
    for line, words in zip(refused.value.problems[1:], REFUSED, strict=True):
        assert line.startswith(f"record 'sequences{words}")
    with pytest.raises(DataError, match=r"sequences\[0\]: 1,000,001 residues, more than the maximum of 1,000,000"):
        clean_list(["A" * 1_000_001], "sequences")
    texts = ["Lost my card!", "größer > 1-2", "\ud800"]
    assert clean_list(texts, "texts", "text") == texts
    with pytest.raises(DataError, match=r"texts\[1\]"):
        clean_list(["a", ""], "texts", "text")
