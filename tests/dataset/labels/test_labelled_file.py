"""Labelled files are read record by record; a bad record is refused with its position, or counted under a policy."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset import table as tables
from esmeray.dataset.labels.labelled_file import LabelledRecords, find_labelled_files, read_labelled
from esmeray.dataset.labels.values import label_reader
from esmeray.dataset.section import IngestSection, LabelsSection, TokenizerSection
from esmeray.inference.classify.labelled import TextStream
from tests.dataset.stores import data_of, made, write_fasta, write_table, zipped

LOCATION = r"^\S+ (?P<label>.+?)-[MSU]\b"
INGEST = {"duplicate_ids", "bad_characters", "empty_sequences"}


def read(*sources: Path, content: str = "protein", held_out: tuple[Path, ...] = (), **settings) -> LabelledRecords:
    return read_labelled(
        [str(source) for source in sources],
        LabelsSection(**{name: value for name, value in settings.items() if name not in INGEST}),
        TokenizerSection(content=content),
        IngestSection(**{name: value for name, value in settings.items() if name in INGEST}),
        held_out_sources=[str(path) for path in held_out],
    )


def counted(records: LabelledRecords) -> dict[str, int]:
    return records.counts.model_dump(exclude_defaults=True, exclude={"records_read"})


def refusal(*sources: Path, error: type[Exception] = DataError, **settings) -> str:
    with pytest.raises(error) as raised:
        read(*sources, **settings)
    assert "\n" not in str(raised.value)
    return str(raised.value).replace(f"{sources[0].parent}/", "")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_a_table_gives_ids_texts_and_labels_in_order(tmp_path, suffix):
    rows = [("name", "sequence", "label"), ("b c", " MKV ", "x"), ("a", "mkl", " y ")]
    path = write_table(tmp_path / f"in{suffix}", *rows)
    records = read(path, id_column="name")
    assert (records.ids, records.texts, records.labels) == (["b c", "a"], ["MKV", "MKL"], ["x", "y"])
    assert records.parts is None
    assert counted(records) == {"records_upper_cased": 1}
    assert records.place(1) == f"record 'a' ({path}, row 2)"


def test_a_header_pattern_or_word_is_the_label(tmp_path):
    text = ">Q1 Cell.membrane-M test\nMKV\nLA\n>Q2 Cytoplasm-Nucleus-U\nMK\n>Q3 Nucleus-S x\nML\n"
    path = tmp_path / "in.fasta.gz"
    path.write_bytes(gzip.compress(text.encode()))
    by_pattern = read(path, header_pattern=LOCATION)
    assert (by_pattern.ids, by_pattern.texts) == (["Q1", "Q2", "Q3"], ["MKVLA", "MK", "ML"])
    assert by_pattern.labels == ["Cell.membrane", "Cytoplasm-Nucleus", "Nucleus"]
    assert by_pattern.place(2) == f"record 'Q3' ({path}, line 6, record 3 'Q3')"
    assert read(path, header_field=1).labels == ["Cell.membrane-M", "Cytoplasm-Nucleus-U", "Nucleus-S"]
    assert read(path, header_pattern=r" (\S+)-").labels == by_pattern.labels, "the first group, where none is a label"


TABLE = ("sequence", "label")
SETS, NUMBERS, SKIP = {"kind": "multilabel"}, {"kind": "regression"}, {"missing_labels": "skip", "empty_texts": "skip"}
BY_SET = {"split": "column", "split_column": "set"}
BY_RESIDUE = {"kind": "per_residue", "header_field": 1}, ["MKVL", "MK", "MX"], ["HH.E", "CC", "C?"]
REPAIRED = {"stops_dropped": 1, "j_to_x": 1}
MISSING, SKIPPED = {"label_values_missing": 1}, {"records_skipped_empty": 1, "records_skipped_missing_label": 2}


@pytest.mark.parametrize(
    ("name", "rows", "settings", "texts", "labels", "counts"),
    [
        ("in.csv", [TABLE, ("MK", "b; a;b;"), ("ML", "c")], SETS, ["MK", "ML"], [["a", "b"], ["c"]], {}),
        ("in.parquet", [TABLE, ("MK", ["b", "a"]), ("ML", [])], SETS, ["MK", "ML"], [["a", "b"], []], {}),
        ("in.fasta", [("a x|y", "-1")], SETS | {"separator": "|", "content": "text"}, ["-1"], [["x", "y"]], {}),
        ("two.csv", [(*TABLE, "b"), ("MK", 1, "False"), ("ML", "0.0", 1)], SETS, ["MK", "ML"], [[0, 1], [1, 0]], {}),
        ("two.csv", [(*TABLE, "b"), ("MK", " -5e-1 ", 51.25)], NUMBERS, ["MK"], [[51.25, -0.5]], {}),
        ("two.csv", [(*TABLE, "b"), ("M", 2, "nan")], NUMBERS | SKIP, ["M"], [[np.nan, 2]], MISSING),
        ("in.fasta", [("a 0.5", "MK")], NUMBERS, ["MK"], [[0.5]], {}),
        ("in.csv", [TABLE, ("MKVL", "HH.E"), ("MK*", "CCH"), ("MJ", "C?")], *BY_RESIDUE, REPAIRED),
        (
            "in.csv",
            [TABLE, ("MKVL", " H.E"), ("MK*", " CC ")],
            BY_RESIDUE[0],
            ["MKVL", "MK"],
            [" H.E", "CC"],
            {"stops_dropped": 1},
        ),
        ("in.fasta", [("a HH.E", "MKVL"), ("b CCH", "MK*"), ("c C?", "MJ")], *BY_RESIDUE, REPAIRED),
        ("in.parquet", [TABLE, ("M", 1.0), (None, 2.0), ("L", None), ("V", np.nan)], SKIP, ["M"], ["1.0"], SKIPPED),
    ],
)
def test_labels_of_every_kind_stand_in_columns_and_headers(tmp_path, name, rows, settings, texts, labels, counts):
    path = tmp_path / name
    write_fasta(path, rows) if name == "in.fasta" else write_table(path, *rows)
    where = {"label_columns": ["b", "label"]} if name == "two.csv" else {"header_field": 1}
    records = read(path, **where | settings)
    assert records.texts == texts and counted(records) == counts
    np.testing.assert_equal(list(records.labels), labels)


def test_many_files_are_read_in_order_and_rows_stay_apart(tmp_path):
    files = {"a.csv": [("MK", "x"), ("ML", "y")], "b.tsv": [("MV", "z")], "c.csv": [("MA", "x")]}
    first, second, held_out = (write_table(tmp_path / name, TABLE, *rows) for name, rows in files.items())
    records = read(first, second, held_out=(held_out,))
    assert records.ids == ["row1", "row2", "row3", "row4"]
    assert records.labels == ["x", "y", "z", "x"]
    assert records.parts == ["training"] * 3 + ["validation"]
    locations = [records.place(index).split("/")[-1] for index in (1, 2, 3)]
    assert locations == ["a.csv, row 2)", "b.tsv, row 1)", "c.csv, row 1)"]
    assert [Path(file.path).name for file in records.source + records.held_out_source] == list(files)


def test_a_folder_stands_for_its_tables_and_fasta_files(tmp_path):
    for name in ("b.csv", "a.fasta.gz", "c.parquet", "notes.txt", ".d.csv"):
        (tmp_path / name).touch()
    assert [path.name for path in find_labelled_files([str(tmp_path)])] == ["a.fasta.gz", "b.csv", "c.parquet"]
    assert "no such file" in refusal(tmp_path / "missing.csv")


@pytest.mark.parametrize("name", ["in.xlsx", "in.csv", "in.txt"])
def test_a_workbook_is_refused_whatever_its_name(tmp_path, name):
    (tmp_path / name).write_bytes(zipped("[Content_Types].xml", "xl/workbook.xml"))
    assert re.match(f"{name}(, line 1)?: an Excel workbook", refusal(tmp_path / name, header_field=1))


def test_files_to_be_labelled_need_no_labels(tmp_path):
    fasta = write_fasta(tmp_path / "in.fasta", [("row1", "MK"), ("row2", "ML")])
    for path in (fasta, write_table(tmp_path / "in.csv", ("sequence",), ("MK",), ("ML",))):
        stream = TextStream([str(path)], LabelsSection(group_column="g"), TokenizerSection(), IngestSection())
        ((ids, texts, share),) = stream.parts(10)
        assert (ids, texts, share) == (["row1", "row2"], ["MK", "ML"], 1.0)


def test_policies_apply_to_labelled_records_and_are_counted(tmp_path):
    rows = [("a", "MK", "x"), ("a", "ML", "y"), ("b", "M-K", "x"), ("c", " ", "x"), ("d", "MV", ""), ("e", "MA", "NaN")]
    path = write_table(tmp_path / "in.csv", ("id", "sequence", "label"), *rows, ("f", "M1", "z"), ("g", "*", "z"))
    skipping = dict.fromkeys(["bad_characters", "empty_sequences", "empty_texts", "missing_labels"], "skip")
    records = read(path, id_column="id", duplicate_ids="rename", **skipping)
    assert (records.ids, records.labels) == (["a", "a.2"], ["x", "y"])
    assert records.counts.records_read == 8
    skipped = [f"records_skipped_{why}" for why in ("bad_characters", "empty", "missing_label")]
    assert counted(records) == {"ids_renamed": 1, **dict.fromkeys(skipped, 2)}
    assert records.place(1) == f"record 'a.2' ({path}, row 2)"


@settings(deadline=None, max_examples=40)
@given(
    missing=st.sampled_from(sorted(tables.MISSING)),
    name=st.sampled_from(["in.csv", "in.tsv", "in.parquet"]),
    column=st.sampled_from(["sequence", "label"]),
    blanks=st.sampled_from(["{}", " {}", "{} "]),
)
def test_what_is_missing_is_refused_by_row_or_counted(tmp_path_factory, missing, name, column, blanks):
    rows = [{"sequence": "MK", "label": "x"}, {"sequence": "ML", "label": "y"}]
    rows.insert(1, {"sequence": "MV", "label": "x"} | {column: blanks.format(missing)})
    path = write_table(tmp_path_factory.mktemp("missing") / name, TABLE, *(tuple(row.values()) for row in rows))
    message = refusal(path, kind="binary")
    assert f"{name}, row 2: " in message and (repr(missing) in message or not missing)
    records = read(path, kind="binary", missing_labels="skip", empty_texts="skip")
    skipped = {"sequence": "records_skipped_empty", "label": "records_skipped_missing_label"}[column]
    assert (records.texts, records.labels, counted(records)) == (["MK", "ML"], ["x", "y"], {skipped: 1})
    if missing and column == "label":
        assert read(path, not_missing=[missing]).labels == ["x", missing, "y"]


def test_kept_texts_are_names_and_texts_but_no_sequences_or_numbers(tmp_path):
    kept = {"id_column": "id", "not_missing": ["NA"]}
    path = write_table(tmp_path / "in.csv", ("id", *TABLE), ("NA", "MK", "NA"), ("b", "NA", "x"))
    assert "row 2: column 'sequence' is empty ('NA' means a missing value);" in refusal(path, **kept)
    assert read(path, **kept, content="text").texts == ["MK", "NA"]
    records = read(path, **kept, empty_texts="skip")
    assert (records.ids, records.labels) == (["NA"], ["NA"])
    path = write_table(tmp_path / "numbers.csv", ("id", *TABLE), ("NA", "MK", "NA"), ("b", "ML", "1"))
    assert read(path, **kept, kind="regression", missing_labels="skip").ids == ["b"]
    fasta = write_fasta(tmp_path / "in.fasta", [("NA NA", "MK"), ("b x", "ML")])
    assert read(fasta, header_field=1, not_missing=["NA"]).labels == ["NA", "x"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('["a", "b"]', ["a", "b"]),
        (" ['b', \"a\"] ", ["a", "b"]),
        ("('a', 'b')", ["a", "b"]),
        ("('a',)", ["a"]),
        ("{'a', 'b'}", ["a", "b"]),
        ("[]", []),
        ("()", []),
        ("set()", []),
        ('"a"', ["a"]),
        ("'a','b'", ["a", "b"]),
        ("[1, 2.5]", ["1", "2.5"]),
        ('["x, y; z", "b|c"]', ["b|c", "x, y; z"]),
        ("(R)-dehydrogenase (NAD, FAD)", ["(R)-dehydrogenase (NAD, FAD)"]),
        ("a; b;", ["a", "b"]),
        ('["a", null]', None),
        ("['a', None]", None),
        ('["a", "NaN"]', None),
        ("a;NA", None),
        (["a", None], None),
        (["a", ""], None),
        ([], []),
        (";", None),
    ],
)
def test_lists_of_json_python_and_parquet_say_themselves_where_names_end(text, names):
    assert label_reader(LabelsSection(kind="multilabel"))([text]) == names


MARKS = ["|", ",", ", ", "/", "\t", " / ", "&", "+", ";"]
NAMES = (
    st.text("abcdeé ()'.", min_size=1, max_size=6)
    .map(str.strip)
    .filter(lambda name: name[:1] not in ("", "'") and name != "()")
)


@settings(deadline=None, max_examples=60)
@given(
    sets=st.lists(st.lists(NAMES, min_size=1, max_size=3, unique=True), min_size=2, max_size=8),
    mark=st.sampled_from(MARKS),
    wrong=st.sampled_from([";", "|"]),
)
def test_another_separator_is_named_and_by_it_every_set_comes_back(tmp_path_factory, sets, mark, wrong):
    path = tmp_path_factory.mktemp("sets") / "in.csv"
    sets = [*sets, *([name] for names in sets for name in names), ["x", "y"], ["x"], ["y"]]
    write_table(path, TABLE, *(("MK", mark.join(names)) for names in sets))
    right = mark.strip(" ")
    if right != wrong:
        message = read(path, kind="multilabel", separator=wrong).doubt
        quoted = "$'\\t'" if right == "\t" else f"'{right}'"
        assert f"is read as a single multilabel name; if {right!r} separates names, give" in message
        assert f"--data.labels.separator {quoted}; if" in message
    expected = [sorted(set(names)) for names in sets]
    records = read(path, kind="multilabel", separator=right)
    assert (records.labels, records.doubt) == (expected, None)
    lists = write_table(path, TABLE, *(("MK", json.dumps(names) if len(names) > 1 else repr(names)) for names in sets))
    assert read(lists, kind="multilabel", separator=wrong).labels == expected


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["a|b", "c|d"], "'a|b' is read as a single multilabel name; if '|' separates names"),
        (["a", "b-c", "b", "c"], "if '-' separates names"),
        (["a b", "a", "b"], "if ' ' separates names"),
        (
            ["x", "a and b"],
            "'a and b' is read as a single multilabel name; no record has several names separated by ';'",
        ),
        (["a;b", "b {ECO:1|PubMed:2}"], "'b {ECO:1|PubMed:2}' is read as"),
        (["a;b", "a", "b", "a|b"], "'a|b' is read as"),
        (["lysosome, vacuole", "nucleus"], "if ',' separates names"),
    ],
)
def test_a_text_that_looks_like_several_names_is_refused(tmp_path, texts, words):
    path = write_table(tmp_path / "in.csv", TABLE, *(("MK", text) for text in texts))
    assert words in read(path, kind="multilabel").doubt
    with pytest.raises(DataError, match="is read as a single multilabel name"):
        made(data_of(path, kind="multilabel"), tmp_path)


def test_names_of_which_some_records_have_two_may_hold_other_separators(tmp_path):
    names = [("lysosome, vacuole;nucleus", ["lysosome, vacuole", "nucleus"]), ("5'-end/x", ["5'-end/x"]), ("a", ["a"])]
    path = write_table(tmp_path / "in.csv", TABLE, *(("MK", text) for text, _ in names))
    records = read(path, kind="multilabel")
    assert (records.labels, records.doubt) == ([expected for _, expected in names], None)


@settings(deadline=None, max_examples=20)
@given(
    true=st.sampled_from(["True", "true", "TRUE", "1", "1.0", "yes", "T", "y"]),
    false=st.sampled_from(["False", "0", "no", "f", "", "NaN", "0.0"]),
    column=st.sampled_from(["validation", "Validation", "VALIDATION"]),
)
def test_a_true_validation_makes_held_out_records_of_training_ones(tmp_path_factory, true, false, column):
    parts = [("train", true), ("train", false), ("test", true), ("val", true)]
    path = write_table(
        tmp_path_factory.mktemp("flip") / "in.csv",
        ("sequence", "label", "set", column),
        *(("MK", str(number), *part) for number, part in enumerate(parts)),
    )
    records = read(path, **NUMBERS, **BY_SET)
    assert records.parts == ["validation", "training", "test", "validation"]
    assert records.counts.held_out_by_validation == 1
    assert counted(read(path, **NUMBERS)) == {}, "by a hash, columns say nothing"


@pytest.mark.parametrize(
    ("header", "settings", "parts"),
    [
        (("sequence", "label", "validation"), {"split_column": "validation"}, ["training", "validation"]),
        (("sequence", "validation", "set"), {"split_column": "set", "label_columns": ["validation"]}, ["training"] * 2),
    ],
)
def test_a_column_that_settings_name_is_not_read_as_flips(tmp_path, header, settings, parts):
    second = "dev" if header[2] == "validation" else "train"
    path = write_table(tmp_path / "in.csv", header, ("MK", "x", "train"), ("ML", "y", second))
    assert read(path, split="column", **settings).parts == parts


def test_comments_and_ignored_files_of_labelled_folders_are_counted(tmp_path):
    (tmp_path / "in.fasta").write_text(";by hand\n>a x\nMK\n;again\n>b y\nML\n")
    (tmp_path / "notes.txt").touch()
    assert read(tmp_path, header_field=1).counts.lines() == [
        "1 file ignored in folders because of their names: notes.txt",
        "2 comment lines ignored (they start with ';')",
    ]


def test_all_that_is_refused_of_labels_and_sequences_is_reported_at_once(tmp_path):
    rows = [("MK", "1"), ("M-", "2"), ("ML", "fast"), ("MV", ""), ("MA", "3")]
    path = write_fasta(tmp_path / "in.fasta", [(f"id{n} {label}", text) for n, (text, label) in enumerate(rows)])
    with pytest.raises(DataError) as raised:
        read(path, kind="regression", header_field=1)
    summary, *lines = raised.value.problems
    assert summary.startswith("3 faults: 1 record with characters outside the alphabet, 1 invalid label, 1")
    found_at = ("4, column 2, record 2 'id1'", "5, record 3 'id2'", "7, record 4 'id3'")
    for line, where in zip(lines, found_at, strict=True):
        assert line.startswith(f"{path}, line {where}")


BY_LABEL = {"split": "column", "split_column": "label"}
TWO_NUMBERS = {"kind": "regression", "label_columns": ["sequence", "label"], "content": "text"}
TRUTHS = {"kind": "multilabel", "label_columns": ["label", "sequence"], "content": "text"}


@pytest.mark.parametrize(
    ("settings", "rows", "message"),
    [
        ({"group_column": "w"}, ["MK x"], "no column 'w'; it has 'sequence', 'label': set data.labels.group_column"),
        ({}, ["MK x", " x"], "in.csv, row 2: column 'sequence' is empty; complete or remove the row, or give --data"),
        (
            {},
            ["MK x", "ML "],
            "in.csv, row 2: label missing in column 'label'; complete or remove the record, or give --",
        ),
        ({"id_column": "label"}, ["MK a\nb"], "row 1: the id in column 'label' is empty or contains a line break"),
        ({"id_column": "label"}, ["MK é", "MV é"], "row 2, record 'é': duplicate id 'é', first at in.csv, row 1;"),
        (NUMBERS | {"id_column": "sequence"}, ["ML fast"], "row 1, record 'ML': column 'label': 'fast' is not a"),
        (NUMBERS, ["MK 1_0"], "row 1: column 'label': '1_0' is not a number; correct it, or replace it with nan"),
        (TRUTHS, ["0 1", "1 2"], "row 2: column 'label': '2' is not 0 or 1"),
        (NUMBERS, ["MK -inf"], "row 1: column 'label': the number is infinite; correct it, or replace it with nan"),
        (
            TWO_NUMBERS,
            ["0 1", "2 nan"],
            "row 2: label missing in column 'label'; complete or remove the record, or give",
        ),
        (
            {},
            ["MK x", "#N/A x"],
            "row 2: column 'sequence' is empty ('#N/A' means a missing value); complete or remove",
        ),
        (
            {"content": "text"},
            ["MK x", "NA x"],
            "('NA' means a missing value; if it is a real value, give --data.labels.not_",
        ),
        (
            {},
            ["MK x", "ML n/a"],
            "row 2: label missing in column 'label' ('n/a' means a missing value; if it is a real value, give",
        ),
        (
            {"header_field": 1},
            ["a x", "b NA"],
            "matches no label in the header 'b NA' ('NA' means a missing value; if it",
        ),
        (
            {"id_column": "label"},
            ["MK a", "ML NA"],
            "row 2: the id in column 'label' is empty or contains a line break ('",
        ),
        (NUMBERS, ["MK 0,5"], "row 1: column 'label': '0,5' is not a number (use a decimal point)"),
        (SETS, ["MK ['a' 'b']"], "row 1: \"['a' 'b']\" looks like a list but is not valid JSON; write"),
        (SETS, ["MK [a,b]"], "row 1: '[a,b]' looks like a list but is not valid JSON"),
        (SETS, ["MK frozenset({'a'})"], "looks like a list but is not valid JSON"),
        (SETS, ['MK "a";"b"'], 'row 1: \'"a";"b"\' looks like a list but is not valid JSON'),
        (SETS, ["MK [0,1,0]"], "row 1: 0s and 1s are not a list of names"),
        (SETS, ['MK {"a":1}'], "row 1: expected text, found dict"),
        ({"kind": "per_residue"}, ["MK HH", "MKV HE"], "row 2: 2 labels for 3 residues"),
        (BY_LABEL, ["MK holdout"], "row 1: unknown split 'holdout'; use"),
        (
            {"missing_labels": "skip"},
            ["MK "],
            "no records left after data.ingest and data.labels were applied",
        ),
        (
            {"header_pattern": "loc=(.)"},
            ["a x"],
            "line 1, record 1 'a': data.labels.header_pattern 'loc=(.)' matches no",
        ),
        ({"header_field": 2}, ["a x z", "b x"], "line 3, record 2 'b': data.labels.header_field 2 matches no label in"),
        ({"header_field": 1, "kind": "per_residue"}, ["a HHH"], "in.fasta, line 1, record 1 'a': 3 labels for 2 resid"),
        ({"header_field": 1}, ["a x", "a y"], "line 3, record 2 'a': duplicate id 'a', first at in.fasta, line 1, r"),
    ],
)
def test_a_bad_row_or_header_is_refused_with_its_place(tmp_path, settings, rows, message):
    if settings.keys() & {"header_pattern", "header_field"}:
        path = write_fasta(tmp_path / "in.fasta", [(header, "MK") for header in rows])
    else:
        path = write_table(tmp_path / "in.csv", TABLE, *(row.split(" ", 1) for row in rows))
    assert message in refusal(path, **settings)


def test_splits_that_are_missing_or_not_true_or_false_are_refused_by_row(tmp_path):
    header = ("sequence", "label", "set", "validation")
    path = write_table(tmp_path / "in.csv", header, ("MK", "1", "train", "True"), ("ML", "2", "train", "0.7"))
    message = refusal(path, **NUMBERS, **BY_SET)
    assert "in.csv, row 2: column 'validation' (if it is not a split, rename it): '0.7' is not 0 or 1" in message
    write_table(path, header, ("MK", "1", "train", "True"), ("ML", "2", "-", "True"))
    assert "row 2: unknown split ''; use one of train" in refusal(path, **NUMBERS, **BY_SET)


def test_a_record_of_the_sample_is_named_by_its_id():
    message = refusal(Path("sample"), content="text", header_pattern="loc=(.)")
    assert "; record 'track_order_00000': data.labels.header_pattern 'loc=(.)' matches no label in the" in message


def test_an_id_that_stands_in_an_earlier_file_too_is_refused(tmp_path):
    first = write_fasta(tmp_path / "a.fasta", [("p1 x", "MK"), ("p2 x", "MK")])
    second = write_table(tmp_path / "b.csv", ("id", "sequence", "label"), ("p3", "MK", "x"), ("p2", "MK", "x"))
    message = refusal(first, second, header_field=1, id_column="id")
    where = "b.csv, row 2, record 'p2'"
    assert message.startswith(f"{where}: duplicate id 'p2', first at a.fasta, line 3, record 2 'p2'")
    assert len(read(first, held_out=(second,), header_field=1, id_column="id", duplicate_ids="first")) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "set data.labels.header_field or data.labels.header_pattern"),
        ({"header_pattern": "(x"}, "header_pattern '(x' is not a regular expression: missing )"),
        ({"header_pattern": "x"}, "header_pattern 'x' has no group: put (?P<label>...)"),
        (
            {"header_field": 1, "group_column": "w"},
            "data.labels.group_column applies to tables, but in.fasta is read as",
        ),
        (NUMBERS | {"header_field": 1, "label_columns": ["a", "b"]}, "label_columns applies to tables"),
        ({"kind": "per_residue", "content": "text"}, "per_residue needs model.tokenizer.content protein"),
    ],
)
def test_settings_that_do_not_fit_are_errors_of_the_settings(tmp_path, settings, message):
    path = write_fasta(tmp_path / "in.fasta", [("a x", "MK")])
    assert message in refusal(path, error=ConfigError, **settings)
