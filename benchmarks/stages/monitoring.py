"""What monitoring costs: whole runs of ``train_ray.py`` with all of it on, beside the same run with all of it off.

On: each worker samples itself, the machine and its GPUs every five seconds; the metrics go to Prometheus through Ray,
to W&B in a file and to the alerts. Off: none of that, and no memory guard. The runs alternate; tokens per second are
those of the steady steps, between time stamps of metrics.jsonl, so that whatever happens between steps counts.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.proteins import MAX_RESIDUES, read_proteins, write_fasta
from benchmarks.harness.stage import Case, Comparison, Contender, Setting, Stage, WrongWorkError
from benchmarks.programs.launched_program import run_program

CASE, ON, OFF = "training, monitored", "everything on", "everything off"
SIZES = {"cpu": "esm2_t6_8M", "cuda": "esm2_t30_150M"}
TOKENS = {"cpu": 2048, "cuda": 32768}
"""Token budget of the one batch that a worker takes in a step."""
STEPS = {"cpu": (5, 40), "cuda": (20, 200)}
"""Optimizer steps that are not measured, and those that are."""
QUICK_SIZE, QUICK_PROTEINS, QUICK_STEPS = {"layers": 1, "hidden_size": 32, "heads": 2}, 200, (1, 3)
_NEVER = 10**9
_SETTINGS: dict[str, dict[str, Any]] = {
    ON: {"training": {"gpu_log_interval": 5.0}, "wandb": {"mode": "offline"}},
    OFF: {
        "training": {"gpu_log_interval": 0.0, "memory_guard": {"enabled": False}},
        "monitoring": {"prometheus": False, "alerts": {"enabled": False}},
        "wandb": {"mode": "disabled"},
    },
}


def _cases(setting: Setting) -> Iterator[Case]:
    proteins = read_proteins(setting.fasta)
    sequences = proteins.sequences[: QUICK_PROTEINS if setting.quick else None]
    fasta = setting.folder / "proteins.fasta"
    write_fasta(fasta, sequences, len(sequences))
    skipped, measured = QUICK_STEPS if setting.quick else STEPS[setting.device]
    numbers, losses = itertools.count(), list[list[float]]()

    def train(way: str) -> float:
        records = _trained(setting, fasta, f"run-{next(numbers)}", skipped + measured, _SETTINGS[way])
        losses.append([record["loss"] for record in records])
        _require_equal(losses[0], losses[-1], 1e-2 if setting.device == "cuda" else 1e-6)
        steady = records[skipped - 1 :]
        return sum(record["tokens"] for record in steady[1:]) / (steady[-1]["time"] - steady[0]["time"])

    yield Case(
        CASE,
        "tokens/s",
        tuple(Contender(way, lambda way=way: train(way), kind="value") for way in _SETTINGS),  # type: ignore[misc]
        rounds=9,
        facts={**proteins.facts, "model": SIZES[setting.device], "steps measured": measured},
    )


def _trained(setting: Setting, fasta: Path, name: str, steps: int, changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train with these settings; the records of all steps."""
    from run_folder.metrics_log import read_metrics
    from run_folder.paths import RunFolder
    from train_config.loading import dump_config
    from train_config.schema import Config

    tokens = TOKENS[setting.device]
    quick = QUICK_SIZE if setting.quick else {}
    settings: dict[str, Any] = {
        "run": {"name": name, "storage_path": str(setting.folder.resolve())},
        "data": {"source": [str(fasta.resolve())], "max_length": MAX_RESIDUES, "validation_share": 0.0},
        "batch": {"tokens": tokens, "global_tokens": tokens},
        "model": {"task": "masked_lm", "backbone": {"source": SIZES[setting.device], **quick}},
        "checkpoint": {"every_steps": _NEVER},
        "ray": {"address": "local", "num_workers": 1},
        **changes,
        "training": {"max_steps": steps, "evaluate_every_steps": _NEVER, **changes["training"]},
    }
    config = Config.model_validate(settings)
    path = setting.folder / f"{name}.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    run_program([sys.executable, "train_ray.py", "--config", str(path)])
    metrics = RunFolder(config.run.storage_path, config.run.name).metrics
    return [record for record in read_metrics(metrics) if record["kind"] == "train"]


def _require_equal(first: list[float], losses: list[float], tolerance: float) -> None:
    worst = max(abs(a - b) / abs(a) for a, b in zip(first, losses, strict=True))
    if not worst <= tolerance:
        raise WrongWorkError(f"losses of two runs of the same training differ by {worst:.1e} relative")


STAGE = Stage(
    name="monitoring",
    summary="training with all monitoring on, beside the same with all of it off",
    cases=_cases,
    comparisons=(Comparison(CASE, ON, OFF, {"cpu": 0.99, "cuda": 0.99}),),
    packages=("ray", "deepspeed", "wandb"),
    distributions=("ray", "deepspeed", "transformers", "wandb"),
)
