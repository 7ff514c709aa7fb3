"""Masked language models trained from random weights against the clock, Esmeray's and the Trainer's, by one evaluation.

The clock counts what steps take, waiting for data included; building the model and evaluations are left out on both
sides. Functions are called in a process of their own, with plain values.

Shape legend: B proteins of a batch, L their length with padding, M masked residues, K tokens of the vocabulary.
"""

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
)

from esmeray.benchmarks.harness.models import random_network
from esmeray.benchmarks.harness.split import Part
from esmeray.benchmarks.peers.transformers_embedding import esm_tokenizer
from esmeray.benchmarks.programs.trainer import CountingTrainer, tokenized
from esmeray.benchmarks.programs.training_workload import NEVER
from esmeray.benchmarks.programs.worker_alone import EnoughError, begin, train_until_enough
from esmeray.train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE, Config
from esmeray.training.loop.building import build_worker

MASK_SHARE = 0.15
MAX_LENGTH = 510
"""Residues of a protein that are trained on and judged, from its start."""
PADDED_TOKENS = 8192
"""Of a batch of the evaluation, at most."""
NO_TARGET = -100
MASKS_SEED = 0


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
        rng = np.random.default_rng(MASKS_SEED)
        proteins = sorted((protein["input_ids"] for protein in tokenized(fasta, tokenizer, MAX_LENGTH)), key=len)
        self._batches: list[tuple[Tensor, Tensor]] = []
        while proteins:
            count = max(1, PADDED_TOKENS // len(proteins[-1]))
            batch, proteins = proteins[-count:], proteins[:-count]
            inputs_BL = torch.full((len(batch), len(batch[-1])), tokenizer.pad_token_id)
            targets_BL = torch.full_like(inputs_BL, NO_TARGET)
            for row, ids in enumerate(batch):
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
        self._network, self._evaluation, self._test = network, Evaluation(fasta), test
        self._at_s, self._limit_s = sorted(at_s), limit_s
        self._seconds, self._tokens = 0.0, 0

    def stepped(self, seconds: float, tokens: int, last: bool) -> bool:
        """Count a step; returns whether it was the last."""
        self._seconds += seconds
        self._tokens += tokens
        last |= self._seconds >= self._limit_s
        if last or (self._at_s and self._seconds >= self._at_s[0]):
            self._at_s = [at for at in self._at_s if at > self._seconds]
            self._judge(self._evaluation, "validation")
        if last and self._test is not None:
            self._judge(Evaluation(self._test), "test")
        return last

    def _judge(self, evaluation: Evaluation, part: Part) -> None:
        self.points.append(Point(self._seconds, self._tokens, evaluation.bits(self._network()), part))


class _CourseLog:
    """Stands in for the run's log."""

    def __init__(self, course: _Course, total_steps: int) -> None:
        self._course, self._total_steps = course, total_steps

    def write(self, kind: str, step: int, **metrics: Any) -> None:
        if kind == "train" and self._course.stepped(metrics["step_s"], metrics["tokens"], step == self._total_steps):
            raise EnoughError

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Events take no part."""


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
    of_all = {
        "run": {"storage_path": folder, "seed": seed},
        "data": {"max_length": MAX_LENGTH, "validation_share": 0.0},
        "model": {"task": "masked_lm"},
        "training": {"evaluate_every_steps": NEVER},
        "checkpoint": {"every_steps": NEVER},
        "wandb": {"mode": "disabled"},
    }
    settings = Config.model_validate(config | {name: config[name] | values for name, values in of_all.items()})
    context, run = begin(settings.run)
    worker = build_worker(settings, context, run, store, None)
    model: Any = worker.engine.module
    course = _Course(model.network, fasta, at_s, limit_s, test)
    train_until_enough(worker, _CourseLog(course, worker.course.total_steps))
    return course.points


class _Clock(TrainerCallback):
    def __init__(self, trainer: CountingTrainer, course: _Course) -> None:
        self._trainer, self._course = trainer, course

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._ended_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.perf_counter() - self._ended_s
        tokens, _computed = self._trainer.take_counts()
        self._course.stepped(seconds, tokens, state.global_step == state.max_steps)
        self._ended_s = time.perf_counter()


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
    trainer.add_callback(_Clock(trainer, course))
    trainer.train()
    return course.points
