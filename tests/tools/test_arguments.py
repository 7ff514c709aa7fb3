"""A missing, unknown or wrong argument of any tool is one line that says which, and the usage."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tools.__main__ import tool_names

MISSING = {
    "analyze_gpu_logs": "missing: --log PATH",
    "benchmark": "missing: STORE",
    "evaluate": "missing: MODEL",
    "export": "missing: RUN",
    "predict": "missing: MODEL, FILE, --output PATH",
    "profile_classifier": "missing: MODEL, --data STR",
}


@pytest.mark.parametrize("tool", MISSING)
def test_a_missing_argument_is_named(command, tool):
    outcome = command(tool)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert outcome.err.startswith(f"error: {MISSING[tool]}; usage: python -m tools {tool} ")


@pytest.mark.parametrize("tool", tool_names())
def test_an_unknown_option_is_named(command, tool):
    outcome = command(tool, "--hlep")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert "--hlep (did you mean --help?)" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--outptu", "b.csv"], "unknown option --outptu (did you mean --output?); usage: "),
        (["b.fasta", "--output", "b.csv"], "unexpected argument b.fasta; usage: "),
        (["--output"], "--output: a value is missing; usage: "),
        (["--output", "b.csv", "--batch-tokens", "x"], "--batch-tokens: invalid literal for int() with base 10: 'x'"),
        (
            ["--output", "b.csv", "--amp-dtype", "bf"],
            "--amp-dtype: expected one of fp32, bf16, fp16, got 'bf'; usage: ",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_line(command, arguments, words):
    outcome = command("predict", "model", "a.fasta", *arguments)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert words in outcome.err


def test_faults_of_arguments_and_files_are_said_without_loading_torch(tmp_path):
    """In a process of its own, where nothing else has loaded it."""
    program = """
import sys
from pathlib import Path
from tools.__main__ import main
from common.command_line import run

Path("model").mkdir()
Path("model/classifier_config.json").write_text("{}")
Path("a.csv").write_text("name,text\\nx,MK\\n")
Path("there.csv").write_text("")
for line in sys.stdin:
    print(run(main, line.split()), file=sys.stderr)
print(*sorted({"torch", "transformers", "sklearn", "scipy"} & sys.modules.keys()))
"""
    lines = ["predict absent a.csv --output b.csv", "predict model a.csv --output there.csv"]
    lines += ["predict model a.csv --output b.csv", "evaluate absent a.csv", "evaluate model a.csv", "export absent"]
    lines += ["profile_classifier absent --data a.csv", "predict model a.csv --output b.csv --data.labels.kinds x"]
    done = subprocess.run(
        [sys.executable, "-c", program],
        input="\n".join(lines),
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    codes = [int(line) for line in done.stderr.splitlines() if line.isdigit()]
    assert codes == [2, 2, 3, 2, 3, 2, 2, 2], done.stderr
    assert done.stdout == "\n"
