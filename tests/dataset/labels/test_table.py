"""Tables come back value by value, whatever stands in them; what is wrong with one is named with its row."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import DataError
from dataset.labels.table import PART_ROWS, Table, is_table_name

any_text = st.text(st.characters(codec="utf-8"), max_size=30)
rows_of_text = st.lists(st.tuples(any_text, any_text), min_size=1, max_size=20)
WANTED = {"text": "data.labels.text_column", "label": "data.labels.label_columns"}


def values(path: Path, *columns: str) -> list[tuple]:
    table = Table(path, dict.fromkeys(columns, "a setting"))
    parts = list(table.parts())
    assert [part.first_row for part in parts] == list(range(1, PART_ROWS * len(parts), PART_ROWS))
    return [row for part in parts for row in zip(*(part.columns[column] for column in columns), strict=True)]


def refusal(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as raised:
        list(Table(path, WANTED).parts())
    assert "\n" not in str(raised.value)
    return str(raised.value).replace(f"{path}", path.name)


@settings(deadline=None)
@given(rows=rows_of_text, suffix=st.sampled_from([".csv", ".tsv", ".csv.gz", ".tsv.gz"]), mark=st.booleans())
def test_any_text_comes_back_from_csv_and_tsv(tmp_path_factory, rows, suffix, mark):
    path = tmp_path_factory.mktemp("table") / f"in{suffix}"
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter="\t" if "tsv" in suffix else ",")
    writer.writerows([("text", "label"), *rows])
    content = text.getvalue().encode("utf-8-sig" if mark else "utf-8")
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    assert values(path, "text", "label") == rows
    assert values(path, "label") == [(label,) for _, label in rows]


@settings(deadline=None)
@given(rows=rows_of_text)
def test_any_text_comes_back_from_parquet(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("table") / "in.parquet"
    texts, labels = zip(*rows, strict=True)
    pq.write_table(pa.table({"other": labels, "text": texts, "label": labels}), path)
    assert values(path, "text", "label") == rows


def test_parquet_values_keep_their_types(tmp_path):
    columns = {"a": [1, None], "b": [0.5, float("inf")], "c": [True, None], "d": [["x", "y"], []]}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    assert values(tmp_path / "in.parquet", *columns) == list(zip(*columns.values(), strict=True))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_many_rows_come_in_parts_and_in_order(tmp_path, suffix):
    path = tmp_path / f"in{suffix}"
    numbers = [str(number) for number in range(2 * PART_ROWS + 5)]
    if suffix == ".csv":
        path.write_text("\n".join(["text", *numbers]))
    else:
        pq.write_table(pa.table({"text": numbers}), path, row_group_size=3000)
    parts = list(Table(path, {"text": "a setting"}).parts())
    assert [value for part in parts for value in part.columns["text"]] == numbers
    starts = [1]
    for part in parts:
        assert part.first_row == starts[-1]
        starts.append(part.first_row + len(part.columns["text"]))


def test_a_field_may_be_longer_than_pythons_limit(tmp_path):
    long = "word " * 100_000
    (tmp_path / "in.csv").write_text(f"text,label\n{long},a\n")
    assert values(tmp_path / "in.csv", "text", "label") == [(long, "a")]


def test_each_row_knows_the_line_on_which_it_starts(tmp_path):
    (tmp_path / "in.csv").write_text('text,label\n"two\nlines",a\n\nb,b\n')
    (part,) = Table(tmp_path / "in.csv", WANTED).parts()
    assert part.columns["text"] == ["two\nlines", "b"]
    assert part.lines == [2, 5]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_the_file_is_described_as_it_was_read(tmp_path, suffix):
    path = tmp_path / f"in{suffix}"
    if suffix == ".csv":
        path.write_text("text\n" + "a line\n" * 100_000)
    else:
        pq.write_table(pa.table({"text": ["a"]}), path)
    table = Table(path, {"text": "a setting"})
    list(table.parts())
    assert table.finished.xxh128 == xxhash.xxh3_128_hexdigest(path.read_bytes())
    assert (table.finished.bytes, table.finished.path) == (path.stat().st_size, str(path.resolve()))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "in.csv: holds nothing, not even a header"),
        ("\n\n", "in.csv: holds nothing, not even a header"),
        ("text,label\n", "in.csv: holds no rows, only a header"),
        ("text,category\na,b\n", "in.csv: no column 'label'; it has 'text', 'category': set data.labels.label_columns"),
        ("text;label\na;b\n", "no column 'text'; it has 'text;label': is it separated by something else"),
        ("text,label,label\na,b,c\n", "2 columns are called 'label' (data.labels.label_columns)"),
        ("text,label\na,b\nc\n", "in.csv, row 2, line 3: 1 fields where the header has 2"),
        ("text,label\nwell, no,b\n", "in.csv, row 1, line 2: 3 fields where the header has 2"),
        ('text,label\na,b\n"open,c\nd,e\n', "in.csv, line 3: not CSV: unexpected end of data"),
        ('text,label\n"a" b,c\n', "in.csv, line 2: not CSV: ',' expected after '\"'"),
        (b"text,label\na,b\ncaf\xe9,b\n", "in.csv, line 3, byte 4: not UTF-8"),
        ("text,label\na,b\n".encode("utf-16"), "in.csv, line 1, byte 1: not UTF-8"),
    ],
)
def test_a_bad_csv_is_refused_with_the_place(tmp_path, content, message):
    assert message in refusal(tmp_path / "in.csv", content)


def test_a_truncated_gzip_is_refused(tmp_path):
    whole = gzip.compress(b"text,label\n" + b"".join(b"%d,a\n" % number for number in range(20_000)))
    assert "in.csv.gz: the compressed file is truncated after line" in refusal(
        tmp_path / "in.csv.gz", whole[: len(whole) // 2]
    )


def test_what_is_no_parquet_is_refused(tmp_path):
    assert "in.parquet: not Parquet, or damaged" in refusal(tmp_path / "in.parquet", b"text,label\na,b\n" * 10)
    pq.write_table(pa.table({"text": ["a"], "category": ["b"]}), tmp_path / "other.parquet")
    content = (tmp_path / "other.parquet").read_bytes()
    assert "no column 'label'; it has 'text', 'category'" in refusal(tmp_path / "in.parquet", content)
    assert "not Parquet, or damaged" in refusal(tmp_path / "in.parquet", content[:-20])
    pq.write_table(pa.table({"text": pa.array([], pa.string()), "label": pa.array([], pa.string())}), tmp_path / "0")
    assert "holds no rows" in refusal(tmp_path / "in.parquet", (tmp_path / "0").read_bytes())


def test_tables_are_known_by_their_suffix():
    assert all(is_table_name(Path(name)) for name in ("a.csv", "A.CSV.GZ", "b.tsv.zst", "c.parquet"))
    assert not any(is_table_name(Path(name)) for name in ("a.fasta", "csv", "a.csv.fasta", "a.txt"))
