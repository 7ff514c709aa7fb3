"""Cost of monitoring: whole runs of ``train_ray.py`` with all of it on, beside the same run with all of it off.

On: each worker samples itself, the machine and its GPUs every five seconds; the metrics go to Prometheus through Ray,
to W&B in a file and to the alerts. Off: none of that, and no memory guard. The runs alternate; tokens per second are
those of the steady steps, between time stamps of metrics.jsonl, so that whatever happens between steps counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.proteins import MAX_RESIDUES, read_proteins, write_fasta
from benchmarks.harness.stage import Case, Comparison, Contender, Setting, Stage
from benchmarks.programs.training_runs import NEVER, TOY, TrainingRuns

CASE, ON, OFF = "training, monitored", "everything on", "everything off"
SIZES = {"cpu": "esm2_t6_8M", "cuda": "esm2_t30_150M"}
TOKENS = {"cpu": 2048, "cuda": 32768}
"""Token budget of the one batch that a worker takes in a step."""
STEPS = {"cpu": (5, 40), "cuda": (20, 200)}
"""Optimizer steps that are not measured, and those that are."""
QUICK_PROTEINS, QUICK_STEPS = 200, (1, 3)
TOLERANCE = {"cpu": 1e-6, "cuda": 1e-2}
"""Relative difference of losses."""
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
    runs = TrainingRuns(setting.folder, TOLERANCE[setting.device])

    def contender(way: str) -> Contender:
        def run() -> float:
            records = runs.train(_settings(setting, fasta, skipped + measured, _SETTINGS[way]), on_ray=True)
            steady = records[skipped - 1 :]
            return sum(record["tokens"] for record in steady[1:]) / (steady[-1]["time"] - steady[0]["time"])

        return Contender(way, run, kind="value")

    facts = {**proteins.facts, "model": SIZES[setting.device], "steps measured": measured}
    yield Case(CASE, "tokens/s", (contender(ON), contender(OFF)), rounds=9, facts=facts)


def _settings(setting: Setting, fasta: Path, steps: int, changes: dict[str, Any]) -> dict[str, Any]:
    tokens = TOKENS[setting.device]
    return {
        "data": {"source": [str(fasta.resolve())], "max_length": MAX_RESIDUES, "validation_share": 0.0},
        "batch": {"tokens": tokens, "global_tokens": tokens},
        "model": {
            "task": "masked_lm",
            "backbone": {"source": SIZES[setting.device], **(TOY if setting.quick else {})},
        },
        "checkpoint": {"every_steps": NEVER},
        "ray": {"address": "local", "num_workers": 1},
        **changes,
        "training": {"max_steps": steps, "evaluate_every_steps": NEVER, **changes["training"]},
    }


STAGE = Stage(
    name="monitoring",
    summary="training with all monitoring on, beside the same with all of it off",
    cases=_cases,
    comparisons=(Comparison(CASE, ON, OFF, {"cpu": 0.99, "cuda": 0.99}),),
    packages=("ray", "deepspeed", "wandb"),
    distributions=("ray", "deepspeed", "transformers", "wandb"),
)
