"""``embed run``: its output, and refusals before it computes."""

from pathlib import Path

import pytest

from esmeray.dataset.embeddings.reader import read_embeddings
from tests.artifacts import Artifacts
from tests.inference.embedding.jobs import write_proteins
from tests.model.support import random_sequences
from tests.tools.conftest import next_words


@pytest.fixture
def given(artifacts: Artifacts, tmp_path: Path, tmp_path_factory, monkeypatch) -> list[str]:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path_factory.mktemp("no-cluster")))  # ignore clusters on this machine
    model = artifacts.encoder
    fasta = write_proteins(tmp_path / "proteins.fasta", random_sequences([9, 30, 9]))
    options = (
        f"embed run --embed.models {model} --embed.input {fasta} --embed.device cpu --embed.output {tmp_path / 'out'}"
    )
    return options.split()


def test_a_folder_is_made_and_its_performance_is_a_table(command, given: list[str], tmp_path: Path):
    outcome = command.done(
        *given, "--embed.outputs", "mean", "residues", "--embed.dtype", "fp16", "--embed.format", "npy"
    )
    assert "residues/s" in outcome.out and f"written: {tmp_path / 'out'}\n  all records read unchanged" in outcome.out
    assert read_embeddings(tmp_path / "out", "residues")["P00001"].shape == (30, 32)
    again = command(*given, "--embed.outputs", "mean", "residues", "--embed.dtype", "fp16", "--embed.format", "npy")
    assert again.code == 0 and "residues/s" in again.out
    drawn = command(*next_words(again.out))
    assert drawn.code == 0 and f"{tmp_path / 'out'}-map: embeddings.png" in drawn.out, drawn.err


def test_letters_that_were_changed_are_counted_beside_the_result(command, given: list[str], tmp_path: Path):
    write_proteins(tmp_path / "proteins.fasta", ["mktay", "MKV*", "MKV"])
    lines = command.done(*given).out.splitlines()
    at = lines.index(f"written: {tmp_path / 'out'}")
    assert lines[at + 1 : at + 3] == [
        "  1 record with lower-case letters, converted to upper case",
        "  1 final '*' dropped",
    ]
    assert "1 record with lower-case letters, converted to upper case" in command(*given).out, (
        "also where nothing was left to do"
    )


def test_a_dry_run_reports_sequences_bytes_and_time(command, given: list[str], tmp_path: Path, monkeypatch):
    monkeypatch.setattr("esmeray.inference.embedding.job.MEASURED_S", 0.05)
    outcome = command.done(*given, "--dry_run")
    assert "3 proteins, 0 duplicates, 3 to embed" in outcome.out
    assert "48 residues" in outcome.out and "GB on disk: mean" in outcome.out and "residues/s" in outcome.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["proteins.fasta"]


def test_a_wrong_input_or_output_is_refused_before_ray_starts(command, given: list[str], tmp_path: Path, monkeypatch):
    monkeypatch.delattr("esmeray.cluster.connection.connected")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    command.refused(2, "out: already exists", *given, "--embed.workers", "2", "--dry_run")
    (tmp_path / "out" / "notes.txt").unlink()
    (tmp_path / "proteins.fasta").unlink()
    for options in ("--embed.workers 2", "--embed.workers 2 --dry_run"):
        command.refused(3, "proteins.fasta: no such file or folder", *given, *options.split())


def test_what_can_not_be_is_one_line_and_nothing_is_left(command, given: list[str], tmp_path: Path):
    window = "--embed.long window --embed.max_length 20"
    for options, code, words in [
        ("--embed.outputs means", 2, "outputs means: unknown output (did you mean mean?); available"),
        ("--embed.dtype bf16", 2, "--embed.dtype bf16"),
        (f"{window} --embed.overlap 20", 2, "--embed.overlap 20: must be less than"),
        (f"{window} --embed.outputs contacts", 2, "can't be averaged over windows"),
        ("--embed.device cuda", 4, "no GPU found"),
    ]:
        command.refused(code, words, *given, *options.split())
    (tmp_path / "proteins.fasta").write_text("")
    command.refused(3, "no FASTA records (the file is empty, or has", *given)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["proteins.fasta"]
