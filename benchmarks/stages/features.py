"""Training a classifier's head from kept features, beside computing the features of the frozen backbone at each step.

Both are the worker's own loop in a process of its own, from the same config but for ``cache_features``, so they take
the same batches in the same order: samples a second stand to one another as tokens a second do. Losses of both are held
to each other before anything counts. What computing the features once takes is among the facts; it is paid once for
each backbone and sequence.
"""

from __future__ import annotations

import csv
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.proteins import MAX_RESIDUES, read_proteins
from benchmarks.harness.stage import Case, Comparison, Contender, Facts, Setting, Stage, WrongWorkError
from benchmarks.programs.launched_program import run_program, tokens_per_s

KEPT, COMPUTED = "kept features", "features computed at each step"
CASE = "training the head"
SIZES = {"cpu": "esm2_t6_8M", "cuda": "esm2_t33_650M"}
TOKENS = {"cpu": 4096, "cuda": 65536}
PROTEINS = {"cpu": 1500, "cuda": 10_000}
STEPS = {"cpu": (5, 20), "cuda": (10, 60)}
"""Optimizer steps that are not measured, and those that are."""
QUICK_SIZE = {"layers": 1, "hidden_size": 32, "heads": 2}
QUICK_PROTEINS, QUICK_STEPS = 200, (1, 3)
ROUNDS = 3
TOLERANCE = 1e-4
"""Relative difference of losses: kept features were computed in other batches, so sums differ by rounding."""
_NEVER = 10**9
_JUDGED = "AGLS"


@dataclass
class Heads:
    """Trains the head either way."""

    setting: Setting
    table: str
    warmup_steps: int
    steps: int
    facts: Facts
    losses: list[list[float]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def train(self, *, cached: bool) -> float:
        """Tokens per second of the steps of a run."""
        from run_folder.metrics_log import read_metrics
        from run_folder.paths import RunFolder
        from train_config.loading import dump_config
        from train_config.schema import Config
        from training.tasks.registry import task_plan

        name = f"run-{next(self._numbers)}"
        config = Config.model_validate(self._settings(name, cached))
        run = RunFolder(config.run.storage_path, config.run.name)
        task = task_plan(config)
        path = task.prepare(run.stores)
        task.write_names(run, path)
        config_path = self.setting.folder / f"{name}.yaml"
        config_path.write_text(dump_config(config), encoding="utf-8")
        is_first = cached and not (path.parent / "features").exists()
        start_s = time.perf_counter()
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        run_program([*launcher, "-m", "benchmarks.programs.worker_program", str(config_path), str(path)])
        if is_first:
            self.facts["seconds of the run that computed the features"] = round(time.perf_counter() - start_s, 1)
        records = [record for record in read_metrics(run.metrics) if record["kind"] == "train"]
        self._compare([record["loss"] for record in records])
        return tokens_per_s(records[self.warmup_steps :])

    def _settings(self, name: str, cached: bool) -> dict[str, Any]:
        device = self.setting.device
        backbone = {"source": SIZES[device], "frozen": True, "cache_features": cached}
        tokens = TOKENS[device]
        return {
            "run": {"name": name, "storage_path": str(self.setting.folder.resolve())},
            "data": {
                "source": [self.table],
                "max_length": MAX_RESIDUES,
                "crop": "start",
                "labels": {"split": "hash"},
            },
            "batch": {"tokens": tokens, "global_tokens": tokens},
            "model": {"task": "classifier", "backbone": backbone | (QUICK_SIZE if self.setting.quick else {})},
            "training": {
                "max_steps": self.warmup_steps + self.steps,
                "amp_dtype": "none",
                "evaluate_every_steps": _NEVER,
            },
            "checkpoint": {"every_steps": _NEVER},
            "wandb": {"mode": "disabled"},
        }

    def _compare(self, losses: list[float]) -> None:
        self.losses.append(losses)
        worst = max(abs(a - b) / abs(a) for a, b in zip(self.losses[0], losses, strict=True))
        if not worst <= TOLERANCE:
            raise WrongWorkError(f"losses from kept and from computed features differ by {worst:.1e} relative")


def _cases(setting: Setting) -> Iterator[Case]:
    proteins = read_proteins(setting.fasta)
    sequences = proteins.sequences[: QUICK_PROTEINS if setting.quick else PROTEINS[setting.device]]
    table = setting.folder / "proteins.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["sequence", "label"])
        writer.writerows([sequence, max(_JUDGED, key=sequence.count)] for sequence in sequences)
    warmup_steps, steps = QUICK_STEPS if setting.quick else STEPS[setting.device]
    facts: Facts = {
        **proteins.facts,
        "records": len(sequences),
        "model": "toy" if setting.quick else SIZES[setting.device],
        "token budget of a step": TOKENS[setting.device],
        "first steps not measured": warmup_steps,
        "steps measured": steps,
    }
    heads = Heads(setting, str(table), warmup_steps, steps, facts)
    yield Case(
        CASE,
        "tokens/s",
        (
            Contender(KEPT, lambda: heads.train(cached=True), kind="value"),
            Contender(COMPUTED, lambda: heads.train(cached=False), kind="value"),
        ),
        rounds=ROUNDS,
        facts=facts,
    )


STAGE = Stage(
    name="features",
    summary="a head trained from kept features of a frozen backbone, beside computing them at each step",
    cases=_cases,
    comparisons=(Comparison(CASE, KEPT, COMPUTED, {"cpu": 20.0, "cuda": 20.0}),),
    packages=("deepspeed",),
    distributions=("deepspeed", "transformers"),
)
