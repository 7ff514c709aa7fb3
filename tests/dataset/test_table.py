"""Tables are read value by value, whatever they contain; errors name the row."""

import csv
import gzip
import io
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas._libs.parsers import STR_NA_VALUES

from esmeray.common.errors import DataError
from esmeray.dataset.table import PART_ROWS, Table, is_missing, numbered_lines
from tests.dataset.stores import write_table, zipped

any_text = st.text(st.characters(codec="utf-8"), max_size=30)
rows_of_text = st.lists(st.tuples(any_text, any_text), min_size=1, max_size=20)
XLSX = zipped("[Content_Types].xml", "_rels/.rels", "xl/workbook.xml")
XLS = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(512)
EXCELS = ("sep=;", '"sep=;"', "\ufeffSEP=;")
"""Lines in which Excel declares the separator."""
WANTED = {"text": "data.labels.text_column", "label": "data.labels.label_columns"}


@pytest.mark.parametrize(
    "column", ["id", "label_id", "Label ID", "labelID", "label name", "Entry", "accession", "label.acc"]
)
def test_a_column_of_ids_is_never_suggested_as_another(tmp_path, column):
    message = refusal(tmp_path / "in.csv", f"text,{column}\na,b\n")
    assert message.endswith(f"no column 'label'; it has 'text', '{column}': set data.labels.label_columns")
    with pytest.raises(DataError, match=r"e\.g\. --data.labels.id_column id"):
        Table(write_table(tmp_path / "ids.csv", ("id", "text"), ("a", "b")), {"ids": "data.labels.id_column"}).columns()


def values(path: Path, *columns: str) -> list[tuple]:
    table = Table(path, dict.fromkeys(columns, "a setting"))
    parts = list(table.parts())
    assert [first_row for first_row, _ in parts] == list(range(1, PART_ROWS * len(parts), PART_ROWS))
    return [row for _, part in parts for row in zip(*(part[column] for column in columns), strict=True)]


def refusal(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as raised:
        list(Table(path, WANTED).parts())
    assert "\n" not in str(raised.value)
    return str(raised.value).replace(f"{path}", path.name)


@settings(deadline=None, max_examples=30)
@given(
    rows=rows_of_text,
    name=st.sampled_from(["text", "one, two; three\tfour and five"]),
    suffix=st.sampled_from([".csv", ".tsv", ".csv.gz", ".tsv.gz"]),
    separator=st.sampled_from(",;\t"),
    mark=st.booleans(),
)
def test_any_text_comes_back_by_the_separator_of_the_header(tmp_path_factory, rows, name, suffix, separator, mark):
    path = tmp_path_factory.mktemp("table") / f"in{suffix}"
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=separator).writerows([(name, "label"), *rows])
    content = text.getvalue().encode("utf-8-sig" if mark else "utf-8")
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    expected = [tuple(None if is_missing(value) else value for value in row) for row in rows]
    assert values(path, name, "label") == expected
    assert values(path, "label") == [(label,) for _, label in expected]


@settings(deadline=None, max_examples=60)
@given(
    missing=st.sampled_from(sorted(STR_NA_VALUES | {"-"})),
    blanks=st.tuples(st.text(" \t", max_size=2), st.text(" \t", max_size=2)),
    suffix=st.sampled_from([".csv", ".parquet"]),
)
def test_whatever_means_missing_is_none_unless_it_is_kept(tmp_path_factory, missing, blanks, suffix):
    path = tmp_path_factory.mktemp("table") / f"in{suffix}"
    frame = pd.DataFrame({"text": ["MKT", missing.join(blanks), "NANA"], "label": ["x", "y", "z"]})
    frame.to_csv(path, index=False) if suffix == ".csv" else frame.to_parquet(path)
    assert values(path, "text") == [("MKT",), (None,), ("NANA",)]
    if missing:
        kept = Table(path, {"text": ""}, keep=[missing]).columns()["text"]
        assert kept == ["MKT", missing.join(blanks), "NANA"]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        *((f"{declared}\r\ntext;label\r\na,b;x\r\n", [("a,b", "x")]) for declared in EXCELS),
        ("sep=|\ntext|label\na,b|x\n", [("a,b", "x")]),
        ("text\na;b\nc\td\n", [("a;b",), ("c\td",)]),  # one column has no separator
    ],
)
def test_the_separator_is_the_declared_one_or_none(tmp_path, text, rows):
    (tmp_path / "in.csv").write_bytes(text.encode())
    assert values(tmp_path / "in.csv", *("text", "label")[: len(rows[0])]) == rows


def test_parquet_values_keep_their_types_and_texts_may_be_missing(tmp_path):
    columns = {"a": [1, None], "b": [0.5, float("inf")], "c": [True, None], "d": [["x", "y"], []], "e": ["é\n", None]}
    types = (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()))
    texts = {f"t{number}": pa.array(["NaN", "x"]).cast(wanted) for number, wanted in enumerate(types)}
    pq.write_table(pa.table(columns | texts), tmp_path / "in.parquet")
    expected = [*columns.values(), *[[None, "x"]] * len(types)]
    assert values(tmp_path / "in.parquet", *columns, *texts) == list(zip(*expected, strict=True))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_many_rows_come_in_parts_in_order(tmp_path, suffix):
    numbers = [str(number) for number in range(2 * PART_ROWS)] + ["longer than Python's csv takes by itself" * 5000]
    path = write_table(tmp_path / f"in{suffix}", ("text",), *((number,) for number in numbers))
    table = Table(path, {"text": "a setting"})
    parts = list(table.parts())
    assert [value for _, part in parts for value in part["text"]] == numbers
    lengths = [len(part["text"]) for _, part in parts]
    assert [first_row for first_row, _ in parts] == [1 + sum(lengths[:index]) for index in range(len(parts))]
    (finished,) = table.finished
    assert finished.xxh128 == xxhash.xxh3_128_hexdigest(path.read_bytes())
    assert (finished.bytes, finished.path) == (path.stat().st_size, str(path.resolve()))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,label\n", "in.csv: the table has no rows"),
        ("text,category\na,b\n", "in.csv: no column 'label'; it has 'text', 'category': set data.labels.label_columns"),
        ("text;lable\na;b\n", "no column 'label' (did you mean lable?); it has 'text', 'lable': set"),
        (",".join(f"c{n}" for n in range(50)) + "\n", "'c18', 'c19' and 30 more: set data.labels.text_column"),
        ("x" * 1000, f"no column 'text'; it has '{'x' * 60}': set data.labels.text_column"),
        (
            "MKTAYIAKQRQISFVKLLAG,a\n",
            "no column 'text'; it has 'MKTAYIAKQRQISFVKLLAG', 'a'; its first row looks like values",
        ),
        (">a b\nMKT\n", "in.csv: looks like FASTA (it starts with '>'), but"),
        (XLSX, "in.csv: an Excel workbook; save it as CSV"),
        (XLS, "in.csv: an Excel workbook; save it as CSV"),
        ("text,label\na,b\n".encode("utf-16"), "in.csv: text in UTF-16, as Excel's 'Unicode Text'; save it as UTF-8"),
        ("text\tlabel\na\tb\n".encode("utf-16-le"), "in.csv: text in UTF-16"),
        ('[{"text": "MK", "label": "x"}]', "in.csv: JSON; convert it"),
        ("<html>", "in.csv: looks like HTML"),
        ("text,label,label\na,b,c\n", "2 columns are named 'label' (data.labels.label_columns)"),
        ("text,label\na,b\nc\n", "in.csv, row 2: 1 fields, but the header has 2"),
        ('text,label\na,b\n"open,c\nd,e\n', "in.csv, row 2: not CSV: unexpected end of data; quote fields"),
        ('text,label\na,b\nd,"open', "in.csv, row 2: not CSV: unexpected end of data"),
        ('text,label\n"open,c\nd,e\n"f",g\n', "in.csv, row 1: not CSV: ',' expected after '\"'"),
        (b"text,label\na,b\ncaf\xe9,b\n", "in.csv, row 2: not UTF-8 text; save the file as UTF-8"),
    ],
)
def test_a_bad_csv_is_refused_with_the_place(tmp_path, content, message):
    assert message in refusal(tmp_path / "in.csv", content)


def test_what_is_no_parquet_is_refused(tmp_path):
    assert "in.parquet: not Parquet, or damaged" in refusal(tmp_path / "in.parquet", b"text,label\na,b\n" * 10)
    assert "an Excel workbook; save it as CSV" in refusal(tmp_path / "in.parquet", XLSX)
    pq.write_table(pa.table({"text": ["a"], "category": ["b"]}), tmp_path / "other.parquet")
    content = (tmp_path / "other.parquet").read_bytes()
    assert "in.csv: Parquet; rename it to end in .parquet" in refusal(tmp_path / "in.csv", content)
    assert "no column 'label'; it has 'text', 'category'" in refusal(tmp_path / "in.parquet", content)
    assert "not Parquet, or damaged" in refusal(tmp_path / "in.parquet", content[:-20])
    pq.write_table(pa.table({"text": pa.array([], pa.string()), "label": pa.array([], pa.string())}), tmp_path / "0")
    assert "the table has no rows" in refusal(tmp_path / "in.parquet", (tmp_path / "0").read_bytes())
    latin = pa.array([b"Z\xfcrich"]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": latin, "label": ["a"]}), tmp_path / "latin", use_dictionary=False)
    assert "not Parquet, or damaged" in refusal(tmp_path / "in.parquet", (tmp_path / "latin").read_bytes())


@pytest.mark.parametrize(
    ("text", "lines"),
    [("", []), ("a", ["a"]), ("a\n", ["a"]), ("\n\na", ["", "", "a"]), ("a\r\nb\n\n", ["a", "b", ""])],
)
def test_a_last_line_is_a_line_with_and_without_its_end(tmp_path, text, lines):
    path = tmp_path / "in.txt"
    path.write_bytes(text.encode())
    assert list(numbered_lines(path)) == [*enumerate(lines, 1)]
