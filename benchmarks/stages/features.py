"""Training a classifier's head from kept features, beside computing the features of the frozen backbone at each step.

Both are the worker's own loop in a process of its own, from the same config but for ``cache_features``, so they take
the same batches in the same order: samples a second stand to one another as tokens a second do. Losses of both are held
to each other before anything counts. Computing the features once takes the time that is among the facts; it is paid
once for each backbone and sequence.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.proteins import MAX_RESIDUES, read_proteins
from benchmarks.harness.stage import Case, Comparison, Contender, Facts, Setting, Stage
from benchmarks.programs.training_runs import NEVER, TOY, TrainingRuns
from benchmarks.programs.training_workload import tokens_per_s

CASE, KEPT, COMPUTED = "training the head", "kept features", "features computed at each step"
SIZES = {"cpu": "esm2_t6_8M", "cuda": "esm2_t33_650M"}
TOKENS = {"cpu": 4096, "cuda": 65536}
PROTEINS = {"cpu": 1500, "cuda": 10_000}
STEPS = {"cpu": (5, 20), "cuda": (10, 60)}
"""Optimizer steps that are not measured, and those that are."""
QUICK_PROTEINS, QUICK_STEPS = 200, (1, 3)
TOLERANCE = 1e-4
"""Relative difference of losses: kept features were computed in other batches, so sums differ by rounding."""
_JUDGED = "AGLS"


def _cases(setting: Setting) -> Iterator[Case]:
    proteins = read_proteins(setting.fasta)
    sequences = proteins.sequences[: QUICK_PROTEINS if setting.quick else PROTEINS[setting.device]]
    table = setting.folder / "proteins.csv"
    _write_table(table, sequences)
    skipped, measured = QUICK_STEPS if setting.quick else STEPS[setting.device]
    facts: Facts = {
        **proteins.facts,
        "records": len(sequences),
        "model": "toy" if setting.quick else SIZES[setting.device],
        "steps measured": measured,
    }
    runs = TrainingRuns(setting.folder, TOLERANCE)

    def train(cached: bool) -> float:
        start_s = time.perf_counter()
        records = runs.train(_settings(setting, table, skipped + measured, cached), on_ray=False)
        if cached:
            facts.setdefault("seconds of the run that computed the features", round(time.perf_counter() - start_s, 1))
        return tokens_per_s([(record["tokens"], record["step_s"]) for record in records[skipped:]])

    contenders = (
        Contender(KEPT, lambda: train(cached=True), kind="value"),
        Contender(COMPUTED, lambda: train(cached=False), kind="value"),
    )
    yield Case(CASE, "tokens/s", contenders, rounds=3, facts=facts)


def _write_table(path: Path, sequences: list[str]) -> None:
    """Label each sequence by the most frequent of four residues."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["sequence", "label"])
        writer.writerows([sequence, max(_JUDGED, key=sequence.count)] for sequence in sequences)


def _settings(setting: Setting, table: Path, steps: int, cached: bool) -> dict[str, Any]:
    tokens = TOKENS[setting.device]
    backbone = {"source": SIZES[setting.device], "frozen": True, "cache_features": cached}
    return {
        "data": {
            "source": [str(table.resolve())],
            "max_length": MAX_RESIDUES,
            "crop": "start",
            "labels": {"split": "hash"},
        },
        "batch": {"tokens": tokens, "global_tokens": tokens},
        "model": {"task": "classifier", "backbone": backbone | (TOY if setting.quick else {})},
        "training": {"max_steps": steps, "precision": "fp32", "evaluate_every_steps": NEVER},
        "checkpoint": {"every_steps": NEVER},
        "wandb": {"mode": "disabled"},
    }


STAGE = Stage(
    name="features",
    summary="a head trained from kept features of a frozen backbone, beside computing them at each step",
    cases=_cases,
    comparisons=(Comparison(CASE, KEPT, COMPUTED, {"cpu": 20.0, "cuda": 20.0}),),
    packages=("deepspeed",),
    distributions=("deepspeed", "transformers"),
)
