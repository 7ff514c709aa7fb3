"""Masked language models trained from random weights against the clock, Esmeray's and the Trainer's, by one evaluation.

The clock counts what steps take, waiting for data included; building the model and evaluations are left out on both
sides. Functions are called in a process of their own, with plain values, by the bench that stages and records share.

Shape legend: B proteins of a batch, L their length with padding, M masked residues, K tokens of the vocabulary.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import DataCollatorForLanguageModeling, PreTrainedModel, TrainingArguments

from benchmarks.harness.models import random_network
from benchmarks.harness.proteins import make_store
from benchmarks.harness.split import Part, split
from benchmarks.harness.stage import Row, Setting
from benchmarks.peers.transformers_embedding import esm_tokenizer
from benchmarks.programs.processes import call
from benchmarks.programs.trainer import CountingTrainer, StepClock, tokenized
from benchmarks.programs.training_workload import NEVER, TOY
from benchmarks.programs.worker_alone import begin, train_until_enough
from esmeray.dataset.section import SPECIAL_TOKENS_PER_SEQUENCE
from esmeray.train_config.loading import Overrides
from esmeray.training.config import Config, load_config
from esmeray.training.loop.building import build_worker

NETWORK = {"layers": 4, "hidden_size": 256, "heads": 4}
OUR_LAYERS = 2
POINTS = 10
"""Evaluations of the Trainer."""
SEEDS = (0, 1, 2)
MASK_SHARE = 0.15
MAX_LENGTH = 510
"""Residues of a protein that are trained on and judged, from its start."""
PADDED_TOKENS = 8192
"""Of a batch of the evaluation, at most."""
NO_TARGET = -100


@dataclass(frozen=True)
class Point:
    """A model on its way: seconds and real tokens of its steps, and its bits per masked residue of a part."""

    seconds: float
    tokens: int
    bits: float
    part: Part = "validation"


class Evaluation:
    """Bits per masked residue of the proteins of a FASTA file, each residue masked with 0.15, by the mask token alone.

    Masks depend on the file alone, so that all models are asked the same.
    """

    def __init__(self, fasta: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = esm_tokenizer(Path(folder))
        rng = np.random.default_rng(seed=0)
        # Longest last: batches taken from the end are of like lengths, with little padding.
        proteins = sorted((protein["input_ids"] for protein in tokenized(fasta, tokenizer, MAX_LENGTH)), key=len)
        self._batches: list[tuple[Tensor, Tensor]] = []
        while proteins:
            count = max(1, PADDED_TOKENS // len(proteins[-1]))
            batch = proteins[-count:]
            del proteins[-count:]
            inputs_BL = torch.full((len(batch), len(batch[-1])), tokenizer.pad_token_id)
            targets_BL = torch.full_like(inputs_BL, NO_TARGET)
            for row, ids in enumerate(batch):
                # From the residue after <cls>: special tokens are never asked for.
                masked = 1 + np.flatnonzero(rng.random(len(ids) - SPECIAL_TOKENS_PER_SEQUENCE) < MASK_SHARE)
                inputs_BL[row, : len(ids)] = torch.tensor(ids)
                targets_BL[row, masked] = inputs_BL[row, masked]
                inputs_BL[row, masked] = tokenizer.mask_token_id
            self._batches.append((inputs_BL, targets_BL))
        self._pad = tokenizer.pad_token_id

    @torch.no_grad()
    def bits(self, network: PreTrainedModel) -> float:
        """Mean over all masked residues, in fp32; the network is in the state that it had afterwards."""
        training = network.training
        network.eval()
        nats, masked = 0.0, 0
        for inputs_BL, targets_BL in self._batches:
            logits_BLK = network(input_ids=inputs_BL, attention_mask=(inputs_BL != self._pad).long()).logits
            chosen = targets_BL != NO_TARGET
            # Summed, and divided at the end: batches have different numbers of masked residues.
            nats += float(functional.cross_entropy(logits_BLK[chosen].float(), targets_BL[chosen], reduction="sum"))
            masked += int(chosen.sum())
        network.train(training)
        return nats / masked / math.log(2)


class _Course:
    """Points of a training: at these seconds, at its end, and none after ``limit_s``.

    Where a FASTA file of the test part is given, the last point is of that.
    """

    def __init__(
        self,
        network: Callable[[], PreTrainedModel],
        fasta: str,
        at_s: Sequence[float],
        limit_s: float = math.inf,
        test: str | None = None,
    ) -> None:
        self.points: list[Point] = []
        self._network = network
        self._evaluation = Evaluation(fasta)
        self._test = test
        self._at_s = sorted(at_s)
        self._limit_s = limit_s
        self._seconds, self._tokens = 0.0, 0

    def stepped(self, seconds: float, tokens: int, last: bool) -> bool:
        """Count a step; returns whether it was the last."""
        self._seconds += seconds
        self._tokens += tokens
        last |= self._seconds >= self._limit_s
        # Steps have no end at a given second: a point is of the first step at or after it, and one step may pass two.
        if last or (self._at_s and self._seconds >= self._at_s[0]):
            self._at_s = [at for at in self._at_s if at > self._seconds]
            self._judge(self._evaluation, "validation")
        # Only now: the test part is opened once, for the model that is entered.
        if last and self._test is not None:
            self._judge(Evaluation(self._test), "test")
        return last

    def _judge(self, evaluation: Evaluation, part: Part) -> None:
        self.points.append(Point(self._seconds, self._tokens, evaluation.bits(self._network()), part))


def train_ours(
    config: dict[str, Any],
    seed: int,
    store: str,
    folder: str,
    fasta: str,
    at_s: Sequence[float] = (),
    limit_s: float = math.inf,
    test: str | None = None,
) -> list[Point]:
    """The points of a masked LM by this config on all proteins of a store, judged by those of a FASTA file.

    Evaluations and checkpoints of the run's own are left out.
    """
    # What every judged training has, whatever an entry asks for.
    of_all = {
        "run": {"storage_path": folder, "seed": seed},
        "data": {"max_length": MAX_LENGTH, "validation_share": 0.0},  # the store has the training part alone
        "model": {"task": "masked_lm"},
        "training": {"evaluate_every_steps": NEVER},
        "checkpoint": {"every_steps": NEVER},
        "wandb": {"mode": "disabled"},
    }
    settings = Config.model_validate(config | {name: config[name] | values for name, values in of_all.items()})
    worker = build_worker(settings, *begin(settings.run), store, None)
    model: Any = worker.engine.module
    course = _Course(model.network, fasta, at_s, limit_s, test)

    def stepped(step: int, metrics: dict[str, Any]) -> bool:
        # The loop's own seconds of a step, which evaluations between steps are no part of.
        return course.stepped(metrics["step_s"], metrics["tokens"], step == worker.course.total_steps)

    train_until_enough(worker, stepped)
    return course.points


def train_trainer(
    network: dict[str, int],
    proteins: str,
    folder: str,
    learning_rate: float,
    steps: int,
    fasta: str,
    at_s: Sequence[float] = (),
) -> list[Point]:
    """The points of ``transformers.Trainer`` with its defaults, those of ``run_mlm.py``, in bf16."""
    tokenizer = esm_tokenizer(Path(folder))
    model = random_network("esm2_t6_8M", **network)
    trainer = CountingTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            learning_rate=learning_rate,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=tokenized(proteins, tokenizer, MAX_LENGTH),  # type: ignore[arg-type]
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASK_SHARE),
    )
    course = _Course(lambda: model, fasta, at_s)
    trainer.add_callback(StepClock(lambda seconds, last: course.stepped(seconds, trainer.take_counts()[0], last)))
    trainer.train()
    return course.points


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
        # The first that is as low: it may rise again.
        return next((point.seconds for point in self.points if point.bits <= bits), None)

    def steps_in(self, seconds: float) -> int:
        """Steps that fit so many seconds, at the mean rate of this training."""
        return max(2, int(seconds / self.points[-1].seconds * self.steps))


@dataclass(frozen=True)
class MaskedLMBench:
    """Shared settings of all trainings."""

    setting: Setting
    parts: dict[Part, Path]
    store: Path

    @classmethod
    def prepare(cls, setting: Setting) -> "MaskedLMBench":
        """Split the proteins by clusters (:mod:`benchmarks.harness.split`)."""
        setting.note("splitting by clusters")
        parts = split(setting.fasta, setting.folder, 200 if setting.quick else None)
        return cls(setting, parts, make_store(parts["training"], setting.folder / "training.store"))

    def trainer(self, rate: float, steps: int, seconds: float) -> Course:
        """The Trainer's, at this learning rate, for so many steps, which are expected to take so many seconds."""
        points = self.points(
            "train_trainer",
            network=self._network,
            proteins=str(self.parts["training"]),
            learning_rate=rate,
            steps=steps,
            # Its best may lie before its end, where the loss of the validation part rises again.
            at_s=[seconds * point / POINTS for point in range(1, POINTS)],
        )
        return Course(points, steps)

    @property
    def seeds(self) -> tuple[int, ...]:
        return SEEDS[:1] if self.setting.quick else SEEDS

    def ours_in(self, seconds: float) -> int:
        """Steps of ours that fit so many seconds, by a trial."""
        return self.ours(60, seconds).steps_in(seconds)

    def ours(self, steps: int, seconds: float, seed: int = 0, changed: Overrides | None = None) -> Course:
        """That of train_config/masked_lm.yaml, so changed, for steps that are expected to take so many seconds."""
        # The network is the stage's, with fewer layers; schedules end with the steps, whatever the recipe's file says.
        overrides: Overrides = {
            **{("model", "backbone", key): value for key, value in self._network.items()},
            ("model", "backbone", "layers"): OUR_LAYERS,
            ("training", "max_steps"): steps,
            ("model", "masked_lm", "mask_share_steps"): steps,
            **(changed or {}),
        }
        config = load_config("train_config/masked_lm.yaml", overrides).model_dump(mode="json")
        # Shortly before its end as well: machines are not steady, and the target may be reached earlier than planned.
        at_s = [0.85 * seconds, 0.95 * seconds]
        return Course(self.points("train_ours", config=config, seed=seed, store=str(self.store), at_s=at_s), steps)

    @property
    def _network(self) -> dict[str, int]:
        return TOY if self.setting.quick else NETWORK

    def points(self, function: str, **arguments: Any) -> list[Point]:
        """The points of a training, judged by the validation part, by a function of programs/masked_lm.py."""
        # In a process of its own: nothing of the training before is in its memory, caches or threads.
        with tempfile.TemporaryDirectory(dir=self.setting.folder) as folder:
            shared = {"fasta": str(self.parts["validation"]), "folder": folder}
            points = call(f"{__name__}:{function}", **arguments, **shared)
        return [Point(**point) for point in points]


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
