"""Masked language modelling by Esmeray's loop and by transformers.Trainer, each in a process of its own.

Ours is the loop of :mod:`esmeray.training.loop.worker`, which every run uses, with its collectives, metrics and
learning rate, without Ray, validation and checkpoints. The peer is the Trainer as users run it: EsmForMaskedLM,
EsmTokenizer and DataCollatorForLanguageModeling with padded batches; proteins are tokenized before the training starts,
as ``datasets.map`` would.

Shape legend: B proteins of a batch, L their length with padding, K tokens of the vocabulary.
"""

import math
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import dnaio
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers import (
    DataCollatorForLanguageModeling,
    EsmForMaskedLM,
    EsmTokenizer,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.programs.processes import call, peak_memory
from esmeray.cluster.collective import WorkerContext
from esmeray.dataset.section import SPECIAL_TOKENS_PER_SEQUENCE
from esmeray.dataset.tokens.base import EsmSequenceTokenizer
from esmeray.model.backbones.huggingface_loading import save_network
from esmeray.model.device import choose_device
from esmeray.run_folder.paths import RunFolder
from esmeray.training.config import Config
from esmeray.training.engine.deepspeed_setup import prepare_deepspeed
from esmeray.training.loop.building import build_worker
from esmeray.training.loop.worker import loop, start

TOY = {"layers": 1, "hidden_size": 32, "heads": 2}
"""The model of a smoke run."""
MASK_SHARE = 0.15
EVALUATED_TOGETHER = 16
NEVER = 10**9
"""Steps between validations or checkpoints, so that there are none."""


class Step(NamedTuple):
    """One optimizer step.

    Attributes:
        seconds: wall time since the end of the step before, including loading, logging and the optimizer.
        tokens: real tokens, including special tokens and excluding padding.
        computed_tokens: tokens that the model computed on, including padding.
        loss: mean cross entropy of the step's masked residues.
    """

    seconds: float
    tokens: int
    computed_tokens: int
    loss: float


@dataclass(frozen=True)
class Training:
    """A finished training.

    Attributes:
        memory_bytes: peak since model and optimizer were built. On a CPU, what the process held beyond these.
        bits: bits per masked residue of the held-out proteins; NaN without such proteins.
    """

    steps: list[Step]
    memory_bytes: int
    bits: float

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        return sum(step.seconds for step in self.steps)


def in_process(function: str, folder: Path, **arguments: Any) -> Training:
    """Call a training of this module in a process of its own."""
    # In a fresh process: memory, caches and threads of an earlier training have no effect.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        training = Training(**call(f"{__name__}:{function}", folder=f"{scratch}/run", **arguments))
    return Training([Step(*step) for step in training.steps], training.memory_bytes, training.bits)


class EnoughError(Exception):
    """The last step is done. What a run does at its end is not part of the benchmark."""


def ours(config: dict[str, Any], store: str, folder: str, held_out: str | None = None) -> Training:
    """Train on all proteins of a store; evaluate on the held-out proteins of a FASTA file."""
    sections = {
        "run": {"name": "benchmark", "storage_path": folder},
        "training": {"evaluate_every_steps": NEVER},
        "checkpoint": {"every_steps": NEVER},
        "data": {"validation_share": 0.0},
        "wandb": {"mode": "disabled"},
    }
    settings = Config.model_validate(config | {name: config.get(name, {}) | own for name, own in sections.items()})
    run = RunFolder(folder, settings.run.name)
    run.path.mkdir(parents=True)
    worker = build_worker(settings, WorkerContext(device=make_group()), run, store, None)
    peak_bytes = peak_memory()
    steps: list[Step] = []

    def write(kind: str, step: int, **metrics: Any) -> None:
        if kind == "train":
            # Packed: all tokens that are computed on are real.
            steps.append(Step(metrics["step_s"], metrics["tokens"], metrics["tokens"], metrics["loss"]))
            if step == worker.course.total_steps:
                raise EnoughError

    position = start(worker)
    # In place of the run's log, so that the loop needs no hook for benchmarks and writes nothing in timed steps.
    worker.observers.log = SimpleNamespace(write=write, event=lambda *_, **__: None)  # type: ignore[assignment]
    try:
        loop(worker, position)
    except EnoughError:
        worker.experiment.close()
    memory_bytes = peak_bytes()
    export = run.path / "model"
    save_network(worker.engine.module.network(), export)  # type: ignore[operator]
    EsmSequenceTokenizer().save(export)
    # Read the way users read an export, with transformers' own forward pass.
    network, tokenizer = EsmForMaskedLM.from_pretrained(export), EsmTokenizer.from_pretrained(export)
    bits = bits_per_residue(network, held_out, tokenizer, settings.data.max_length)
    return Training(steps, memory_bytes, bits)


class CountingTrainer(Trainer):
    """Count tokens on the device of the batch, without a synchronisation."""

    real_tokens: Tensor | int = 0
    computed_tokens = 0

    def _get_train_sampler(self, *arguments: Any, **keywords: Any) -> Any:
        sampler: Any = super()._get_train_sampler(*arguments, **keywords)
        if self.args.train_sampling_strategy != "group_by_length":
            return sampler
        # The Trainer sorts every 50 groups by length, longest first: the few steps of a benchmark would see long
        # proteins alone. In a golden-ratio order any few groups in a row span all lengths, beginning with the longest.
        indices = list(sampler)
        group = self.args.train_batch_size * self.args.gradient_accumulation_steps
        starts = np.arange(0, len(indices), group)
        order = (np.arange(len(starts)) * 0.618034 % 1).argsort().argsort()
        return [index for start in starts[order] for index in indices[start : start + group]]

    def training_step(self, model: Any, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Tensor:
        # Summed on the device, and read only when a step ends.
        mask_BL = inputs["attention_mask"]
        self.real_tokens = self.real_tokens + mask_BL.sum()
        self.computed_tokens += mask_BL.numel()
        return super().training_step(model, inputs, *arguments, **keywords)


class StepClock(TrainerCallback):
    """Seconds and tokens of each step."""

    def __init__(self, trainer: CountingTrainer) -> None:
        self.steps: list[tuple[float, int, int]] = []
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.peak_bytes = peak_memory()  # DeepSpeed's engine is built by now
        self._ended_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        # Reading the count waits for the device, so a step's kernels are part of its time.
        tokens = int(trainer.real_tokens)
        now_s = time.perf_counter()
        self.steps.append((now_s - self._ended_s, tokens, trainer.computed_tokens))
        trainer.real_tokens = trainer.computed_tokens = 0
        self._ended_s = now_s


def trainer(
    weights: str, fasta: str, residues: int, arguments: dict[str, Any], folder: str, held_out: str | None = None
) -> Training:
    """Train in bf16 with these TrainingArguments, from the weights of a folder that also has the tokenizer."""
    if "deepspeed" in arguments:
        # The Trainer uses this group. Its own would compile DeepSpeed's operator, whose lock a killed process may hold.
        os.environ.update(RANK="0", WORLD_SIZE="1")
        prepare_deepspeed(make_group())
    tokenizer = EsmTokenizer.from_pretrained(weights)
    model = EsmForMaskedLM.from_pretrained(weights)
    counting = CountingTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=tokenized(fasta, tokenizer, residues),  # type: ignore[arg-type]
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASK_SHARE),
    )
    clock = StepClock(counting)
    counting.add_callback(clock)
    counting.train()
    # One entry per step, and a summary without a loss.
    losses = [entry["loss"] for entry in counting.state.log_history if "loss" in entry]
    steps = [Step(*counted, loss) for counted, loss in zip(clock.steps, losses, strict=True)]
    return Training(steps, clock.peak_bytes(), bits_per_residue(model, held_out, tokenizer, residues))


def make_group() -> torch.device:
    """Create a process group of this process alone; return its device."""
    device = choose_device()
    # A store in memory: another benchmark could take the port of a TCP store.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    return device


def tokenized(fasta: str, tokenizer: EsmTokenizer, residues: int) -> list[dict[str, Any]]:
    """Return all proteins, cropped to ``residues``, ready for the collator."""
    with dnaio.open(fasta) as records:
        sequences = [record.sequence for record in records]
    ids = tokenizer(sequences, truncation=True, max_length=residues + SPECIAL_TOKENS_PER_SEQUENCE)["input_ids"]
    # The collator pads the mask of ones, and the Trainer counts real tokens with it.
    return [{"input_ids": own, "attention_mask": [1] * len(own)} for own in ids]


@torch.no_grad()
def bits_per_residue(network: PreTrainedModel, fasta: str | None, tokenizer: EsmTokenizer, residues: int) -> float:
    """Return the mean cross entropy of masked residues in bits, in fp32; NaN without a file.

    0.15 of the residues are replaced by the mask token. The masks depend on the file alone, so they are the same for
    all models.
    """
    if fasta is None:
        return math.nan
    collate = DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=MASK_SHARE, mask_replace_prob=1.0, random_replace_prob=0.0, seed=0
    )
    # Sorted, so that batches have little padding.
    proteins = sorted(tokenized(fasta, tokenizer, residues), key=lambda protein: len(protein["input_ids"]))
    network.eval()
    nats, masked = 0.0, 0
    for first in range(0, len(proteins), EVALUATED_TOGETHER):
        batch = collate(proteins[first : first + EVALUATED_TOGETHER])
        labels_BL = batch.pop("labels")
        logits_BLK = network(**batch).logits
        chosen = labels_BL >= 0  # others are -100
        # Summed, and divided at the end: batches have different numbers of masked residues.
        nats += float(functional.cross_entropy(logits_BLK[chosen].float(), labels_BL[chosen], reduction="sum"))
        masked += int(chosen.sum())
    return nats / masked / math.log(2)
