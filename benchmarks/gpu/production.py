"""Training as its users start it: Ray, DeepSpeed, loader processes, checkpoints, the log of every step."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.bench import SIZES, Bench
from benchmarks.harness.stage import Row
from run_folder.metrics_log import read_metrics
from run_folder.paths import RunFolder

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS, FIRST_STEPS = 40, 10
"""Steps of a run, and those at its start that are left out."""


def production(bench: Bench) -> Iterator[Row]:
    """train_ray.py from start to end, eager and compiled; nothing where Ray or DeepSpeed is not installed."""
    missing = [name for name in ("ray", "deepspeed") if find_spec(name) is None]
    if missing:
        yield {"verdict": f"left out: {', '.join(missing)} is not installed"}
        return
    name = bench.arguments.sizes[min(1, len(bench.arguments.sizes) - 1)]
    for compiled in ("false", "true"):
        yield {"model": name, "compile": compiled, **_run(bench, name, compiled)}


def _run(bench: Bench, name: str, compiled: str) -> Row:
    tokens = bench.arguments.tokens // 2
    settings: dict[str, Any] = {
        "model.task": "masked_lm",
        "model.backbone.source": SIZES.get(name, "esm2_t6_8M"),
        "training.compile": compiled,
        "training.max_steps": STEPS,
        "training.warmup_steps": "none",
        "batch.tokens": tokens,
        "batch.global_tokens": 2 * tokens,
        "run.name": "gpu",
    }
    if name not in SIZES:
        settings |= {"model.backbone.layers": 2, "model.backbone.hidden_size": 32, "model.backbone.heads": 4}
    with tempfile.TemporaryDirectory() as folder:
        settings["run.storage_path"] = folder
        options = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
        command = [sys.executable, "train_ray.py", "--config", "masked_lm", *options]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode != 0:
            return {"verdict": f"WRONG: exit code {done.returncode}, {done.stderr.strip().splitlines()[-1:]}"}
        records = [r for r in read_metrics(RunFolder(folder, "gpu").metrics) if r["kind"] == "train"]
    names = ("tokens_per_s", "step_s", "data_wait_s", "communication_s")
    return {name: median(record[name] for record in records[FIRST_STEPS:]) for name in names}
