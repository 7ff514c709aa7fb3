"""Samples in the format of the workers' samplers, for tests of their readers."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from esmeray.run_folder.metrics_log import MetricsLog, Record

GIB = 1024**3
BEGAN_S = 1_700_000_000.0


def sample(worker: int, time_s: float, step: int = 1, epoch: int = 0, host: str = "a", **metrics: float) -> Record:
    """A sample ``time_s`` seconds after the run began; in names, ``__`` stands for a slash."""
    return {
        "kind": "sample",
        "step": step,
        "epoch": epoch,
        "time": BEGAN_S + time_s,
        "host": host,
        "worker": worker,
        "metrics": {name.replace("__", "/"): value for name, value in metrics.items()},
    }


def train(step: int, time_s: float, **values: Any) -> Record:
    """A step's record, ``time_s`` seconds after the run began."""
    return {"kind": "train", "step": step, "time": BEGAN_S + time_s, "loss": 1.0, **values}


def append(path: Path, *records: Record) -> None:
    """Append records as a worker does: open the log, write, close it."""
    with MetricsLog(path) as log:
        for record in records:
            log.append(record)


def wait_until(condition: Callable[[], object], patience_s: float) -> bool:
    """Wait until the condition holds; return False if it does not within ``patience_s`` seconds."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
