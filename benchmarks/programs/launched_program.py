"""Runs a launcher (torchrun, train_ray.py) to its end and reads what its run logged."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
_END_TIMEOUT_S = 60.0
_LAST_CHARACTERS = 2000


def run_program(command: list[str]) -> None:
    """Run a command in the repository's root, on one thread a process.

    Raises:
        RuntimeError: it failed; the end of its output is in the message.
    """
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with _ended_with_us(process):
        output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {process.returncode}: {output[-_LAST_CHARACTERS:]}")


def tokens_per_s(records: Sequence[dict[str, Any]]) -> float:
    """Real tokens over all the time that the steps took, from records of metrics.jsonl."""
    return sum(record["tokens"] for record in records) / sum(record["step_s"] for record in records)


@contextmanager
def _ended_with_us(process: subprocess.Popen[str]) -> Iterator[None]:
    """Ask the launcher to end where this process is stopped: killed, it would leave its workers behind."""
    try:
        yield
    except BaseException:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
