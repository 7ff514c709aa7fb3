import signal
import subprocess
import sys

from tests.conftest import REPOSITORY
from tests.tools.conftest import next_words


def test_a_conversion_ends_with_a_summary_of_everything_done(command, tmp_path):
    (tmp_path / "1.fasta").write_text(">a\nmkv*\n>b\nMJ-\n")
    (tmp_path / "2.fasta").write_text(f">c\n\n>a\nMK\n>gene\n{'ACGT' * 100}\n")
    outcome = command.done(
        *("data", "convert", "--data.source", tmp_path / "1.fasta", tmp_path / "[2].fasta"),
        *("--convert.store", tmp_path / "store", "--data.ingest.bad_characters", "to_x"),
        *("--data.ingest.duplicate_ids", "first", "--data.ingest.empty_sequences", "skip"),
    )
    assert outcome.err == ""
    first, nucleotides, *counts, _ = outcome.out.splitlines()
    assert next_words(outcome.out) == ["train", "--config", "masked_lm", "--data.source", str(tmp_path / "store")]
    assert first.startswith(f"{tmp_path / 'store'}: 3 records, 406 residues, ")
    assert nucleotides.strip().startswith("1 record that look like DNA or RNA")
    assert [line.strip() for line in counts] == [
        "1 record with lower-case letters, converted to upper case",
        "1 final '*' dropped",
        "1 J replaced by X",
        "1 character outside the alphabet replaced by X",
        "1 record without a sequence skipped",
        "1 record skipped because of a duplicate id",
    ]


def test_a_check_of_sound_files_gives_their_counts_and_writes_nothing(command, tmp_path):
    (tmp_path / "a.fasta").write_text(">a\nmkv*\n")
    (tmp_path / "b.fasta").write_text(">b\nMK\n")
    outcome = command("data", "convert", "--check", "--data.source", tmp_path / "a.fasta", tmp_path / "b.fasta")
    assert (outcome.code, outcome.err) == (0, "")
    assert "b.fasta: valid, 2 records, 5 residues" in outcome.out and "1 final '*' dropped" in outcome.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.fasta", "b.fasta"]


def test_wrong_usage_is_one_line(command, tmp_path):
    (tmp_path / "a.yaml").write_text("overwrite: true\ndata:\n  source: a.fasta\n")
    words = f"{tmp_path / 'a.yaml'}:1: overwrite: not a setting; use the option --overwrite"
    command.refused(2, words, f"data convert --config {tmp_path / 'a.yaml'}")
    command.refused(2, "missing: --convert.store", "data convert --data.source a")
    command.refused(2, "missing: --data.source", "data convert --check")
    command.refused(2, "duplicate_ids", "data convert --data.source a --check --data.ingest.duplicate_ids frist")


WAITING = """
import time
from esmeray.dataset.store.writer import StoreWriter
from esmeray.tools.__main__ import entry_point

StoreWriter.finish = lambda *_, **__: print("written", flush=True) or time.sleep(99)
entry_point()
"""


def test_a_signal_leaves_nothing_behind(tmp_path):
    (tmp_path / "in.fasta").write_text(">a\nMKV\n")
    options = ["--data.source", tmp_path / "in.fasta", "--convert.store", tmp_path / "out" / "store"]
    command = [sys.executable, "-c", WAITING, "data", "convert", *options]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "written\n" and list(tmp_path.glob("out/.store.scratch-*/store/data.mdb"))
    process.send_signal(signal.SIGTERM)
    assert process.communicate()[1] == "interrupted\n" and process.returncode == 143
    assert list((tmp_path / "out").iterdir()) == []
