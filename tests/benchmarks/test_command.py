"""``python -m benchmarks`` as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_a_smoke_run_of_one_stage_writes_its_results_where_it_is_told_to(tmp_path: Path):
    fasta = tmp_path / "some.fasta"
    fasta.write_text(">a\nMKTAYIAKQRQISF\n>b\nGAVLIPFW\n")
    done = call("tokenizer", "--quick", "--output", str(tmp_path / "out"), "--fasta", str(fasta))
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [case["stage"] for case in written["cases"]] == ["tokenizer"]
    assert written["cases"][0]["facts"]["token ids checked to be equal"] == 26
    assert "--quick" in written["cases"][0]["command"]
    assert "EsmTokenizer" in done.stdout


def test_help_teaches_and_list_shows_the_floors():
    helped, listed = call("--help"), call("--list")
    assert (helped.returncode, listed.returncode) == (0, 0)
    assert "python -m benchmarks embedding loading" in helped.stdout
    assert "300 on cpu" in listed.stdout


def test_a_misspelt_stage_is_one_line_and_a_usage_error():
    done = call("tokeniser")
    assert (done.returncode, done.stderr.strip().count("\n")) == (2, 0)
    assert "did you mean tokenizer?" in done.stderr
