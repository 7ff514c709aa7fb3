import gzip
import os
import random
from pathlib import Path

import pytest

from esmeray.dataset.fasta import locate as fasta_places

FIRST = b">ok first\nMKV\nLLA\n"
COMPRESSED = ("gz", "bz2", "xz", "zst")
UTF8_E = "é".encode()

REFUSED = {
    "empty": (b"", "no FASTA records (the file is empty, or has"),
    "FASTQ": (b"@read1\nMKV\n+\n#III\n", "line 1: looks like FASTQ"),
    "comment before no header": (b"; MKV, by hand\nMKV\n", "line 2: text before the first header"),
    "sequence before a header": (b"\n\nMKV\n>a\nMKV\n", "line 3: text before the first header"),
    "HTML": (b"<!DOCTYPE html>\n<html>\n", "line 1: looks like HTML"),
    "no sequence": (FIRST + b">empty\n>b\nMKV\n", "line 4, record 2 'empty': the record has no sequence"),
    "empty id": (FIRST + b">\nMKV\n", "line 4, record 2: the header has no id"),
    "duplicate id": (
        FIRST + b">b\nMKV\n>ok again\nMKV\n",
        "line 6, record 3 'ok': duplicate id 'ok', first at {path}, line 1; make ids unique, or give "
        "--data.ingest.duplicate_ids "
        "first (or rename)",
    ),
    "UTF-8 in a header": (
        FIRST + b">a caf" + UTF8_E + b"\nMKV\n",
        "line 4, record 2 'a': contains a non-ASCII character; replace",
    ),
    "UTF-8 in a sequence": (
        FIRST + b">a\nMK\nM" + UTF8_E + b"\n",
        "line 6, record 2 'a': contains a non-ASCII character; replace",
    ),
    "UTF-16": ("\ufeff>a\nMKV\n".encode("utf-16-le"), "line 1"),
    "digit": (
        FIRST + b">a\nMKV\nM1K\n",
        "line 6, column 2, record 2 'a': the character '1' is not in the alphabet ACDEFGHIKLMNPQRSTVWYBUZOX; fix the "
        "record, or give --data.ingest.bad_characters to_x (or skip)",
    ),
    "blank inside": (FIRST + b">a\nMK VL\n", "line 5, column 3, record 2 'a': the character ' ' is not in"),
    "stop inside": (FIRST + b">a\nMK*\nVL\n", "line 5, column 3, record 2 'a': the character '*' inside a sequence"),
    "gap": (
        FIRST + b">a\nMK\n-V\n",
        "line 6, column 1, record 2 'a': the gap character '-' of an alignment; remove the gaps, because models",
    ),
    "NUL": (FIRST + b">a\nMK\0V\n", "line 5, record 2 'a': contains a NUL byte"),
    "header inside a line": (FIRST + b">a\nMKV>b\nMKV\n", "line 5, column 4, record 2 'a': '>' inside a sequence line"),
    "comment": (FIRST + b">a\nMKV\n#LLL\nKKK\n", "line 6, record 2 'a': starts with '#'"),
    "comment in a line": (FIRST + b">a\nMKV ;L\n", "line 5, column 5, record 2 'a': ';' inside a sequence line"),
    "after a comment": (b">a\nMKV\n;MMM\nM1K\n;\n", "line 4, column 2, record 1 'a': the character '1'"),
    "CRLF": (b">a\r\nMKV\r\nM1K\r\n", "line 3, column 2, record 1 'a': the character '1'"),
    "CR alone": (b">a\rMKV\rM1K\r", "line 3, column 2, record 1 'a': the character '1'"),
}


def assert_refused(command, words: str, *sources: Path) -> None:
    """Check that sources are refused in one line, and that no files are left."""
    folder = sources[0].parent
    outcome = command.refused(
        3, words, "data", "convert", "--data.source", *sources, "--convert.store", folder / "store"
    )
    assert outcome.err.startswith("error: ") and outcome.out == ""
    assert not [path for path in folder.iterdir() if "store" in path.name]


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_with_bad_content_is_refused_with_its_place(command, tmp_path, kind):
    content, words = REFUSED[kind]
    path = tmp_path / "in.fasta"
    path.write_bytes(content)
    assert_refused(command, words.format(path=path), path)


def test_a_duplicate_in_another_file_is_refused_with_both_places(command, tmp_path):
    first, second = tmp_path / "1.fasta", tmp_path / "2.fasta"
    first.write_bytes(FIRST)
    second.write_bytes(b">a\nMK\n>ok\nMK\n")
    assert_refused(command, f"{second}, line 3, record 2 'ok': duplicate id 'ok', first at {first}", first, second)


MANY = FIRST + b">a\nM-K\n>\nMKV\n>b\n>c\nMK1\n>ok again\nMKV\n"


def test_all_faults_of_a_file_are_reported_at_once_with_their_places(command, tmp_path):
    path = tmp_path / "in.fasta"
    path.write_bytes(MANY)
    outcome = command("data", "convert", "--data.source", path, "--convert.store", tmp_path / "store")
    first, *lines = outcome.err.replace(str(path), "in.fasta").splitlines()
    assert (outcome.code, outcome.out) == (3, "")
    assert first == (
        "error: 5 faults: 2 records with characters outside the alphabet, 1 header without an id, 1 header without a "
        "sequence, 1 duplicate id"
    )
    locations = ["5, column 2, record 2 'a'", "6, record 3", "8, record 4 'b'"]
    locations += ["10, column 3, record 5 'c'", "11, record 6 'ok': duplicate id 'ok', first at in.fasta, line 1"]
    for line, location in zip(lines, locations, strict=True):
        assert line.startswith(f"error: in.fasta, line {location}"), line
    assert [entry.name for entry in tmp_path.iterdir()] == ["in.fasta"]


@pytest.mark.parametrize("damage", ["comment", "truncated"])
def test_the_fault_that_ends_reading_is_reported_last(command, tmp_path, damage):
    path = tmp_path / ("in.fasta.gz" if damage == "truncated" else "in.fasta")
    proteins = "".join(random.Random(0).choices("ACDEFGHIKL", k=1_000_000)).encode()  # several read blocks
    end = b">z\n#K\n>y\nM1\n" if damage == "comment" else b">z\n%b\n" % proteins
    path.write_bytes(MANY + end if damage == "comment" else gzip.compress(MANY + end)[:-6])
    outcome = command("data", "convert", "--check", "--data.source", path)
    lines = outcome.err.splitlines()
    assert (outcome.code, len(lines)) == (3, 7)
    assert lines[0].startswith("error: 6 faults: ") and lines[0].endswith(", 1 fault that stopped reading")
    assert ("line 14, record 7 'z': starts with '#'" if damage == "comment" else "is truncated") in lines[-1]


def test_places_are_looked_up_in_one_pass_over_the_file(command, tmp_path, monkeypatch):
    passes = []
    scan = fasta_places._scan
    monkeypatch.setattr(fasta_places, "_scan", lambda path: passes.append(path) or scan(path))
    (tmp_path / "in.fasta").write_bytes(FIRST + b"".join(b">id%d\nM1\n" % number for number in range(1000)))
    outcome = command("data", "convert", "--check", "--data.source", tmp_path / "in.fasta")
    assert outcome.err.startswith("error: 1,000 faults: ") and outcome.err.count("\n") == 11
    assert len(passes) == 1


SOURCES = {
    "missing": (lambda path: None, "no such file or folder"),
    "a folder without FASTA": (
        lambda path: path.mkdir(),
        "the folder",
    ),
    "a pipe": (os.mkfifo, "a named pipe, socket or device, not a regular file"),
    **{kind: (lambda path: path.write_bytes(FIRST), f"not a {kind} file despite its name") for kind in COMPRESSED},
}


@pytest.mark.parametrize("kind", SOURCES)
def test_sources_without_records_are_refused(command, tmp_path, kind):
    make, words = SOURCES[kind]
    path = tmp_path / (f"in.fasta.{kind}" if kind in COMPRESSED else "in.fasta")
    make(path)
    assert_refused(command, words, path)
