"""``python -m tools fasta2lmdb`` converts, says what it did, and teaches itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from dataset.store.reader import Store
from tests.conftest import REPOSITORY


def test_a_conversion_ends_with_a_summary_of_everything_done(command, tmp_path):
    (tmp_path / "in.fasta").write_text(">a\nmkv*\n>b\nMJ-\n>c\n\n>a\nMK\n")
    outcome = command(
        "fasta2lmdb", tmp_path / "in.fasta", tmp_path / "store",
        "--bad-characters", "to_x", "--duplicate-ids", "first", "--empty-sequences", "skip",
    )  # fmt: skip
    assert outcome.code == 0
    assert outcome.err == ""
    first, *counts = outcome.out.splitlines()
    assert first.startswith(f"{tmp_path / 'store'}: 2 records, 6 residues, ")
    assert [line.strip() for line in counts] == [
        "1 record with lower-case letters, upper-cased",
        "1 final '*' dropped",
        "1 J replaced by X",
        "1 character outside the alphabet replaced by X",
        "1 record skipped for want of a sequence",
        "1 record skipped for an id that stood before",
    ]


def test_a_check_of_sound_files_gives_their_counts_and_writes_nothing(command, tmp_path):
    (tmp_path / "a.fasta").write_text(">a\nmkv*\n")
    (tmp_path / "b.fasta").write_text(">b\nMK\n")
    outcome = command("fasta2lmdb", "--check", tmp_path / "a.fasta", tmp_path / "b.fasta")
    assert (outcome.code, outcome.err) == (0, "")
    first, *counts = outcome.out.splitlines()
    assert first.endswith("b.fasta: sound, 2 records, 5 residues")
    assert [line.strip() for line in counts] == [
        "1 record with lower-case letters, upper-cased",
        "1 final '*' dropped",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.fasta", "b.fasta"]


def test_dna_is_reported_in_the_summary_or_refused(command, tmp_path):
    (tmp_path / "in.fasta").write_text(f">gene\n{'ACGT' * 100}\n")
    done = command("fasta2lmdb", tmp_path / "in.fasta", tmp_path / "store")
    assert done.code == 0 and "1 record like DNA or RNA, not protein" in done.out
    refused = command("fasta2lmdb", tmp_path / "in.fasta", tmp_path / "other", "--nucleotides", "error")
    assert refused.code == 3 and "give --nucleotides warn" in refused.err


def test_several_sources_and_a_glob_make_one_store(command, tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.fasta").write_text(f">{name}\nMK\n")
    outcome = command("fasta2lmdb", tmp_path / "c.fasta", tmp_path / "[ab].fasta", tmp_path / "store")
    assert outcome.code == 0
    assert "every record taken as it stands" in outcome.out
    store = Store(tmp_path / "store")
    assert [store.id(index) for index in range(len(store))] == ["c", "a", "b"]


def test_an_existing_store_is_replaced_when_told(command, tmp_path):
    (tmp_path / "in.fasta").write_text(">a\nMK\n")
    arguments = ["fasta2lmdb", tmp_path / "in.fasta", tmp_path / "store"]
    assert command(*arguments).code == 0
    refused = command(*arguments)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "exists already; choose another name or pass --overwrite" in refused.err
    assert command(*arguments, "--overwrite").code == 0


def test_help_teaches_by_example(command):
    outcome = command("fasta2lmdb", "--help")
    assert outcome.code == 0
    assert "python -m tools fasta2lmdb uniref50.fasta.gz uniref50_store" in outcome.out
    for option in ("--duplicate-ids", "--bad-characters", "--empty-sequences", "--overwrite"):
        assert option in outcome.out


@pytest.mark.parametrize(
    "arguments", [[], ["only_one"], ["--check"], ["a", "b", "--duplicate-ids", "frist"], ["a", "b", "--typo"]]
)
def test_wrong_usage_is_exit_code_2(command, arguments):
    assert command("fasta2lmdb", *arguments).code == 2


def test_the_tools_are_listed_with_a_line_each(command):
    outcome = command()
    assert outcome.code == 0
    lines = [line.split(maxsplit=1) for line in outcome.out.splitlines()]
    assert ["fasta2lmdb", "Convert FASTA files to a store that training reads."] in lines
    assert "Show the contents of a store, and check it." in outcome.out


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("fasta2lmbd", "(did you mean fasta2lmdb?)"),
        ("xyz", "fasta2lmdb, find_batch_size, gpu_check"),
        ("_x", "there are"),
    ],
)
def test_an_unknown_tool_is_answered_with_the_nearest(command, name, hint):
    outcome = command(name)
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: there is no command {name!r}")
    assert hint in outcome.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing_behind(tmp_path, number, code):
    (tmp_path / "in").mkdir()
    letters = "MKVLAGDEST" * 30 + "\n"
    with (tmp_path / "in" / "in.fasta").open("w") as file:
        file.writelines(f">{record}\n{letters}" for record in range(400_000))
    command = [sys.executable, "-m", "tools", "fasta2lmdb", tmp_path / "in", tmp_path / "out" / "store"]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(tmp_path.glob("out/.store.building-*/data.mdb")):
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert list((tmp_path / "out").iterdir()) == []
