"""Stands in for a run: writes a step of 10 tokens every so often into its folder's metrics.jsonl, and has a child.

    python counting_program.py FOLDER SECONDS_A_STEP WORKERS_SAMPLED W&B_FOLDER

The child has lost the program's environment, as processes with a title of their own have.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path


def main(folder: Path, step_s: float, sampled: int, wandb: str) -> None:
    (folder / "monitoring").mkdir(parents=True)
    for worker in range(sampled):
        sample = {"kind": "sample", "step": 0, "time": time.time()}
        (folder / "monitoring" / f"worker-{worker:05d}.jsonl").write_text(json.dumps(sample) + "\n")
    if wandb:
        (folder / "wandb" / wandb).mkdir(parents=True)
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(sleeper, env={}), (folder / "metrics.jsonl").open("w", buffering=1) as metrics:
        for step in range(100_000):
            time.sleep(step_s)
            record = {"kind": "train", "step": step, "tokens": 10, "loss": 1 / (1 + step), "time": time.time()}
            metrics.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
