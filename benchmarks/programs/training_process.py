"""Runs a training contender's program in a fresh process and reads what it says of its steps."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.programs.training_workload import StepLine, Workload, read_step_lines

_REPOSITORY = Path(__file__).resolve().parents[2]
_LAST_WORDS = 2000


def run_contender(module: str, workload: Workload, folder: Path, *options: str) -> list[StepLine]:
    """The lines of all of its steps.

    Args:
        module: the program; it takes the workload, the file for its lines, an empty folder and ``options``.
        workload: what to train.
        folder: where its files go; they are removed.

    Raises:
        RuntimeError: it failed, or did fewer steps; its last words are in the message.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        lines = Path(scratch) / "steps.jsonl"
        command = [sys.executable, "-m", module, workload.to_json(), str(lines), f"{scratch}/run", *options]
        child = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, check=False)
        steps = read_step_lines(lines) if lines.exists() else []
    if child.returncode or len(steps) != workload.total_steps:
        said = (child.stderr or child.stdout)[-_LAST_WORDS:]
        raise RuntimeError(f"{module} ended with code {child.returncode} after {len(steps)} steps: {said}")
    return steps
