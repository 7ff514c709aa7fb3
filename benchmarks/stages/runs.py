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

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from benchmarks.harness.proteins import MAX_RESIDUES, read_proteins, write_fasta
from benchmarks.harness.stage import Case, Comparison, Contender, Facts, Setting, Stage, WrongWorkError
from benchmarks.programs.processes import run_program
from benchmarks.programs.training_workload import NEVER, TOY, tokens_per_s
from esmeray.common.timing import timed
from esmeray.run_folder.metrics_log import Record, read_metrics
from esmeray.run_folder.paths import RunFolder
from esmeray.train_config.loading import dump_config
from esmeray.training.config import Config

HEAD, CACHED, COMPUTED = "training the head", "cached features", "features computed at each step"
MONITORED, ON, OFF = "training, monitored", "everything on", "everything off"


class Extent(NamedTuple):
    """Work of the runs of a case.

    Attributes:
        model: name of the backbone.
        tokens: budget of the one batch that a worker takes in a step.
        skipped, measured: optimizer steps.
        tolerance: largest relative difference of losses; cached features were computed in other batches, so sums
            differ by rounding.
    """

    model: str
    tokens: int
    skipped: int
    measured: int
    tolerance: float


EXTENTS = {
    HEAD: {
        "cpu": Extent("esm2_t6_8M", 4096, 5, 20, 1e-4),
        "cuda": Extent("esm2_t33_650M", 65536, 10, 60, 1e-4),
    },
    MONITORED: {
        "cpu": Extent("esm2_t6_8M", 2048, 5, 40, 1e-6),
        "cuda": Extent("esm2_t30_150M", 32768, 20, 200, 1e-2),
    },
}
LABELLED_PROTEINS = {"cpu": 1500, "cuda": 10_000}
_JUDGED = "AGLS"
_MONITORING: dict[str, dict[str, Any]] = {
    ON: {"training": {"gpu_log_interval": 5.0}, "wandb": {"mode": "offline"}},
    OFF: {
        "training": {"gpu_log_interval": 0.0},
        "monitoring": {"prometheus": False, "alerts": {"enabled": False}},
        "wandb": {"mode": "disabled"},
    },
}


def _cases(setting: Setting) -> Iterator[Case]:
    proteins = read_proteins(setting.fasta)
    sequences = proteins.sequences[: 200 if setting.quick else None]
    yield _head_case(setting, sequences[: LABELLED_PROTEINS[setting.device]], proteins.facts)
    yield _monitored_case(setting, sequences, proteins.facts)


def _head_case(setting: Setting, sequences: list[str], facts: Facts) -> Case:
    table = setting.folder / "proteins.csv"
    # A label that a model can learn, without data of anyone: which of four residues is most frequent.
    labels = [max(_JUDGED, key=sequence.count) for sequence in sequences]
    pd.DataFrame({"sequence": sequences, "label": labels}).to_csv(table, index=False)
    runs = TrainingRuns(setting, HEAD)
    facts = {**facts, **runs.facts, "records": len(sequences)}

    def contender(name: str) -> Contender:
        settings = runs.settings("classifier", table)
        settings["data"] |= {"crop": "start", "labels": {"split": "hash"}}
        settings["model"]["backbone"] |= {"frozen": True, "cache_features": name == CACHED}
        settings["training"]["precision"] = "fp32"  # cached features are: losses can be held to each other
        settings["wandb"] = {"mode": "disabled"}

        def run() -> float:
            records, seconds = timed(partial(runs.train, settings, ["-m", "benchmarks.programs.worker_alone"]))
            if name == CACHED:
                # Of the first run alone: later ones find the features in the cache.
                facts.setdefault("seconds of the run that computed the features", round(seconds, 1))
            return tokens_per_s([(record["tokens"], record["step_s"]) for record in records[runs.extent.skipped :]])

        return Contender(name, run, kind="value")

    return Case(HEAD, "tokens/s", (contender(CACHED), contender(COMPUTED)), rounds=3, facts=facts)


def _monitored_case(setting: Setting, sequences: list[str], facts: Facts) -> Case:
    fasta = setting.folder / "proteins.fasta"
    write_fasta(fasta, sequences, len(sequences))
    runs = TrainingRuns(setting, MONITORED)

    def contender(name: str) -> Contender:
        settings = runs.settings("masked_lm", fasta)
        settings["data"]["validation_share"] = 0.0
        settings["ray"] = {"address": "local", "num_workers": 1}
        for section, values in _MONITORING[name].items():
            settings[section] = settings.get(section, {}) | values

        def run() -> float:
            # From the end of the last skipped step on: by time stamps, so that whatever lies between steps counts.
            steady = runs.train(settings, ["train_ray.py", "--config"])[runs.extent.skipped - 1 :]
            return sum(record["tokens"] for record in steady[1:]) / (steady[-1]["time"] - steady[0]["time"])

        return Contender(name, run, kind="value")

    return Case(MONITORED, "tokens/s", (contender(ON), contender(OFF)), rounds=9, facts={**facts, **runs.facts})


class TrainingRuns:
    """Runs of a case, numbered in one folder, each of which must come to the losses of the first."""

    def __init__(self, setting: Setting, case: str) -> None:
        extent = EXTENTS[case][setting.device]
        self.extent = extent._replace(skipped=1, measured=3) if setting.quick else extent
        self._shrunk: dict[str, int] = TOY if setting.quick else {}
        self.facts: Facts = {"model": "toy" if setting.quick else extent.model, "steps measured": self.extent.measured}
        self._folder = (setting.folder / case.replace(" ", "-")).resolve()
        self._folder.mkdir(exist_ok=True)
        self._losses: list[float] = []
        self._number = 0

    def settings(self, task: str, source: Path) -> dict[str, Any]:
        """Shared settings of a case's runs."""
        extent = self.extent
        return {
            "data": {"source": [str(source.resolve())], "max_length": MAX_RESIDUES},
            "batch": {"tokens": extent.tokens, "global_tokens": extent.tokens},
            "model": {"task": task, "backbone": {"source": extent.model, **self._shrunk}},
            "training": {"max_steps": extent.skipped + extent.measured, "evaluate_every_steps": NEVER},
            "checkpoint": {"every_steps": NEVER},
        }

    def train(self, settings: Record, program: list[str]) -> list[Record]:
        """Train once, on one worker and thread, by a program of Python that takes the config's path.

        ``settings`` are the config without the name and folder of the run. Returns the training records of all steps in
        metrics.jsonl. Raises WrongWorkError where the losses differ from those of the first run.
        """
        # Of its own, as a run in a folder that holds one would resume it.
        name = f"run-{self._number}"
        self._number += 1
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
        self._losses = self._losses or list(losses)  # those of the first run
        # Of every step, not of the last: a run that drifts and comes back has computed something else.
        worst = max(abs(a - b) / abs(a) for a, b in zip(self._losses, losses, strict=True))
        if not worst <= self.extent.tolerance:
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
