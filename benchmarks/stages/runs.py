"""Whole training runs, beside the same with one capability off: cached features, and monitoring.

Training a classifier's head from cached features, beside computing the features of the frozen backbone at each step:
the worker's own loop in a process of its own, from the same config but for ``cache_features``, so both take the same
batches in the same order. Computing the features once takes the time that is among the facts; it is paid once for each
backbone and sequence.

Runs of ``train_ray.py`` with all monitoring, beside none. On: each worker samples itself, the machine and its GPUs
every five seconds; the metrics go to Prometheus through Ray, to W&B in a file and to the alerts. Off: none of that, and
no memory guard. Tokens per second are those between time stamps of metrics.jsonl, so that whatever happens between
steps counts.

Losses of two runs of a case are held to each other before anything counts.
"""

import csv
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.proteins import MAX_RESIDUES, read_proteins, write_fasta
from benchmarks.harness.stage import Case, Comparison, Contender, Facts, Setting, Stage, WrongWorkError
from benchmarks.programs.processes import run_program
from benchmarks.programs.training_workload import NEVER, TOY, tokens_per_s
from run_folder.metrics_log import read_metrics
from run_folder.paths import RunFolder
from train_config.loading import dump_config
from train_config.schema import Config

HEAD, CACHED, COMPUTED = "training the head", "cached features", "features computed at each step"
MONITORED, ON, OFF = "training, monitored", "everything on", "everything off"
SIZES = {
    HEAD: {"cpu": "esm2_t6_8M", "cuda": "esm2_t33_650M"},
    MONITORED: {"cpu": "esm2_t6_8M", "cuda": "esm2_t30_150M"},
}
TOKENS = {HEAD: {"cpu": 4096, "cuda": 65536}, MONITORED: {"cpu": 2048, "cuda": 32768}}
"""Token budget of the one batch that a worker takes in a step."""
STEPS = {HEAD: {"cpu": (5, 20), "cuda": (10, 60)}, MONITORED: {"cpu": (5, 40), "cuda": (20, 200)}}
"""Optimizer steps that are not measured, and those that are."""
QUICK_PROTEINS, QUICK_STEPS = 200, (1, 3)
LABELLED_PROTEINS = {"cpu": 1500, "cuda": 10_000}
TOLERANCE = {HEAD: {"cpu": 1e-4, "cuda": 1e-4}, MONITORED: {"cpu": 1e-6, "cuda": 1e-2}}
"""Relative difference of losses: cached features were computed in other batches, so sums differ by rounding."""
_JUDGED = "AGLS"
_MONITORING: dict[str, dict[str, Any]] = {
    ON: {"training": {"gpu_log_interval": 5.0}, "wandb": {"mode": "offline"}},
    OFF: {
        "training": {"gpu_log_interval": 0.0, "memory_guard": {"enabled": False}},
        "monitoring": {"prometheus": False, "alerts": {"enabled": False}},
        "wandb": {"mode": "disabled"},
    },
}

Record = dict[str, Any]


def _cases(setting: Setting) -> Iterator[Case]:
    proteins = read_proteins(setting.fasta)
    sequences = proteins.sequences[: QUICK_PROTEINS if setting.quick else None]
    yield _head_case(setting, sequences[: LABELLED_PROTEINS[setting.device]], proteins.facts)
    yield _monitored_case(setting, sequences, proteins.facts)


def _head_case(setting: Setting, sequences: list[str], facts: Facts) -> Case:
    table = setting.folder / "proteins.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["sequence", "label"])
        writer.writerows([sequence, max(_JUDGED, key=sequence.count)] for sequence in sequences)
    runs, skipped, facts = _runs(setting, HEAD, facts)
    facts["records"] = len(sequences)

    def contender(name: str) -> Contender:
        settings = _settings(setting, HEAD, table)
        settings["data"] |= {"crop": "start", "labels": {"split": "hash"}}
        settings["model"]["backbone"] |= {"frozen": True, "cache_features": name == CACHED}
        settings["training"]["precision"] = "fp32"
        settings["wandb"] = {"mode": "disabled"}

        def run() -> float:
            start_s = time.perf_counter()
            records = runs.train(settings, ["-m", "benchmarks.programs.worker_alone"])
            if name == CACHED:
                seconds = round(time.perf_counter() - start_s, 1)
                facts.setdefault("seconds of the run that computed the features", seconds)
            return tokens_per_s([(record["tokens"], record["step_s"]) for record in records[skipped:]])

        return Contender(name, run, kind="value")

    return Case(HEAD, "tokens/s", (contender(CACHED), contender(COMPUTED)), rounds=3, facts=facts)


def _monitored_case(setting: Setting, sequences: list[str], facts: Facts) -> Case:
    fasta = setting.folder / "proteins.fasta"
    write_fasta(fasta, sequences, len(sequences))
    runs, skipped, facts = _runs(setting, MONITORED, facts)

    def contender(name: str) -> Contender:
        settings = _settings(setting, MONITORED, fasta)
        settings["data"]["validation_share"] = 0.0
        settings["ray"] = {"address": "local", "num_workers": 1}
        for section, values in _MONITORING[name].items():
            settings[section] = settings.get(section, {}) | values

        def run() -> float:
            steady = runs.train(settings, ["train_ray.py", "--config"])[skipped - 1 :]
            return sum(record["tokens"] for record in steady[1:]) / (steady[-1]["time"] - steady[0]["time"])

        return Contender(name, run, kind="value")

    return Case(MONITORED, "tokens/s", (contender(ON), contender(OFF)), rounds=9, facts=facts)


def _runs(setting: Setting, case: str, facts: Facts) -> tuple["TrainingRuns", int, Facts]:
    """The runs of a case, the steps that are not measured, and facts."""
    skipped, measured = _steps(setting, case)
    model = "toy" if setting.quick else SIZES[case][setting.device]
    runs = TrainingRuns(setting.folder / case.replace(" ", "-"), TOLERANCE[case][setting.device])
    return runs, skipped, {**facts, "model": model, "steps measured": measured}


def _steps(setting: Setting, case: str) -> tuple[int, int]:
    return QUICK_STEPS if setting.quick else STEPS[case][setting.device]


def _settings(setting: Setting, case: str, source: Path) -> dict[str, Any]:
    """What the runs of a case share."""
    tokens = TOKENS[case][setting.device]
    backbone = {"source": SIZES[case][setting.device], **(TOY if setting.quick else {})}
    return {
        "data": {"source": [str(source.resolve())], "max_length": MAX_RESIDUES},
        "batch": {"tokens": tokens, "global_tokens": tokens},
        "model": {"task": "classifier" if case == HEAD else "masked_lm", "backbone": backbone},
        "training": {"max_steps": sum(_steps(setting, case)), "evaluate_every_steps": NEVER},
        "checkpoint": {"every_steps": NEVER},
    }


class TrainingRuns:
    """Runs numbered in one folder, each of which must come to the losses of the first.

    ``tolerance`` is the largest relative difference between losses of a step.
    """

    def __init__(self, folder: Path, tolerance: float) -> None:
        self._folder = folder.resolve()
        self._folder.mkdir(exist_ok=True)
        self._tolerance = tolerance
        self._losses: list[float] = []
        self._number = 0

    def train(self, settings: Record, program: list[str]) -> list[Record]:
        """Train once, on one worker and thread, by a program of Python that takes the config's path.

        ``settings`` are the config without the name and place of the run. Returns the training records of all steps in
        metrics.jsonl. Raises WrongWorkError where the losses differ from those of the first run.
        """
        name, self._number = f"run-{self._number}", self._number + 1
        config = Config.model_validate(settings | {"run": {"name": name, "storage_path": str(self._folder)}})
        path = self._folder / f"{name}.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        run_program([sys.executable, *program, str(path)], {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"})
        metrics = RunFolder(config.run.storage_path, config.run.name).metrics
        records = [record for record in read_metrics(metrics) if record["kind"] == "train"]
        self.compare([record["loss"] for record in records])
        return records

    def compare(self, losses: Sequence[float]) -> None:
        """Hold the losses of a run to those of the first; raises WrongWorkError where they differ."""
        self._losses = self._losses or list(losses)
        worst = max(abs(a - b) / abs(a) for a, b in zip(self._losses, losses, strict=True))
        if not worst <= self._tolerance:
            raise WrongWorkError(f"losses of two runs of the same training differ by {worst:.1e} relative")


STAGE = Stage(
    name="runs",
    summary="a head trained from cached features, beside computing them; training with and without monitoring",
    cases=_cases,
    comparisons=(
        Comparison(HEAD, CACHED, COMPUTED, {"cpu": 20.0, "cuda": 20.0}),
        Comparison(MONITORED, ON, OFF, {"cpu": 0.99, "cuda": 0.99}),
    ),
    packages=("ray", "deepspeed", "wandb"),
    distributions=("ray", "deepspeed", "transformers", "wandb"),
)
