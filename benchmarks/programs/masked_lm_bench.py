"""Trainings of masked language models that stages compare: on the same parts, judged by the same masks."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from esmeray.benchmarks.harness.proteins import make_store
from esmeray.benchmarks.harness.split import Part, split
from esmeray.benchmarks.harness.stage import Row, Setting
from esmeray.benchmarks.programs.masked_lm import Point
from esmeray.benchmarks.programs.processes import call
from esmeray.benchmarks.programs.training_workload import TOY
from esmeray.train_config.loading import Overrides
from esmeray.training.config import load_config

NETWORK = {"layers": 4, "hidden_size": 256, "heads": 4}
OUR_LAYERS = 2
OUR_TRIAL_STEPS = 60
"""Steps of a trial that measures how many fit the time."""
POINTS = 10
"""Evaluations of the Trainer."""
SEEDS = (0, 1, 2)
QUICK_PROTEINS = 200


@dataclass(frozen=True)
class Course:
    """The points of a training of so many steps."""

    points: Sequence[Point]
    steps: int

    @property
    def best(self) -> Point:
        """The first of the lowest loss."""
        return min(self.points, key=lambda point: point.bits)

    def seconds_to(self, bits: float) -> float | None:
        """None where the loss stayed above."""
        return next((point.seconds for point in self.points if point.bits <= bits), None)

    def steps_in(self, seconds: float) -> int:
        """Steps that fit so many seconds, at the mean rate of this training."""
        return max(2, int(seconds / self.points[-1].seconds * self.steps))


@dataclass(frozen=True)
class MaskedLMBench:
    """What all trainings share."""

    setting: Setting
    parts: dict[Part, Path]
    store: Path

    @classmethod
    def prepare(cls, setting: Setting) -> "MaskedLMBench":
        """Split the proteins by clusters (:mod:`esmeray.benchmarks.harness.split`)."""
        setting.note("splitting by clusters")
        parts = split(setting.fasta, setting.folder, QUICK_PROTEINS if setting.quick else None)
        return cls(setting, parts, make_store(parts["training"], setting.folder / "training.store"))

    def trainer(self, rate: float, steps: int, seconds: float) -> Course:
        """The Trainer's, at this learning rate, for so many steps, which are expected to take so many seconds."""
        at_s = [seconds * point / POINTS for point in range(1, POINTS)]
        arguments = {
            "network": self._network,
            "proteins": self.parts["training"],
            "learning_rate": rate,
            "steps": steps,
            "at_s": at_s,
        }
        return Course(self._points("train_trainer", arguments), steps)

    def ours_in(self, seconds: float) -> int:
        """Steps of ours that fit so many seconds, by a trial."""
        return self.ours(OUR_TRIAL_STEPS, seconds).steps_in(seconds)

    def ours(self, steps: int, seconds: float, seed: int = 0, changed: Overrides | None = None) -> Course:
        """That of train_config/masked_lm.yaml, so changed, for steps that are expected to take so many seconds."""
        overrides: Overrides = {
            **{("model", "backbone", key): value for key, value in self._network.items()},
            ("model", "backbone", "layers"): OUR_LAYERS,
            ("training", "max_steps"): steps,
            ("model", "masked_lm", "mask_share_steps"): steps,
            **(changed or {}),
        }
        config = load_config("train_config/masked_lm.yaml", overrides).model_dump(mode="json")
        arguments = {
            "config": config,
            "seed": seed,
            "store": self.store,
            "at_s": [0.85 * seconds, 0.95 * seconds],
        }
        return Course(self._points("train_ours", arguments), steps)

    @property
    def _network(self) -> dict[str, int]:
        return TOY if self.setting.quick else NETWORK

    def _points(self, function: str, arguments: Mapping[str, Any]) -> list[Point]:
        with tempfile.TemporaryDirectory(dir=self.setting.folder) as folder:
            every = {**arguments, "fasta": self.parts["validation"], "folder": folder}
            plain = {key: str(value) if isinstance(value, Path) else value for key, value in every.items()}
            return [Point(**point) for point in call(f"esmeray.benchmarks.programs.masked_lm:{function}", **plain)]


def row(name: str, courses: Sequence[Course]) -> Row:
    """Means of the ends of these trainings, and the bits of each."""
    ends = [course.points[-1] for course in courses]
    return {
        "training": name,
        "seconds": round(mean(end.seconds for end in ends), 1),
        "tokens/s": round(mean(end.tokens / end.seconds for end in ends)),
        "bits a masked residue": round(mean(end.bits for end in ends), 4),
        "of each seed": " ".join(f"{end.bits:.4f}" for end in ends),
        "lowest": round(min(course.best.bits for course in courses), 4),
    }
