"""The peer of the training benchmark: transformers.Trainer with DeepSpeed ZeRO-2 and padded batches, as users run it.

Sequences are put into batches at ``random``, the Trainer's default, or by ``group_by_length``. EsmForMaskedLM,
EsmTokenizer and DataCollatorForLanguageModeling do the work; proteins are tokenized before the training starts, as
``datasets.map`` would.

Shape legend: B sequences of a micro-batch, L their length with padding.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import dnaio
import torch
import yaml
from torch import Tensor
from transformers import (
    DataCollatorForLanguageModeling,
    EsmForMaskedLM,
    EsmTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.harness.proteins import MAX_RESIDUES
from benchmarks.harness.stage import REPOSITORY
from benchmarks.programs import training_workload as recipe
from benchmarks.programs.processes import MemoryMeter
from benchmarks.programs.training_workload import StepLine, Workload
from benchmarks.programs.worker_alone import make_group
from esmeray.dataset.section import SPECIAL_TOKENS_PER_SEQUENCE
from esmeray.training.engine.deepspeed_setup import prepare_deepspeed


def tokenized(fasta: str, tokenizer: EsmTokenizer, residues: int = MAX_RESIDUES) -> list[dict[str, Any]]:
    """All proteins, at most so many residues of each, ready for the collator."""
    with dnaio.open(fasta) as records:
        sequences = [record.sequence for record in records]
    ids = tokenizer(sequences, truncation=True, max_length=residues + SPECIAL_TOKENS_PER_SEQUENCE)["input_ids"]
    # With a mask of ones: the collator pads it, and the Trainer counts real tokens by it.
    return [{"input_ids": own, "attention_mask": [1] * len(own)} for own in ids]


class SpreadGroups(torch.utils.data.Sampler[int]):
    """A sampler's groups in an order in which any few in a row span all of its lengths.

    The Trainer sorts each 50 groups by length, longest first: the few steps of a benchmark would see long proteins
    alone. Here the same groups come a golden section apart, beginning with the longest.
    """

    def __init__(self, sampler: torch.utils.data.Sampler[int], group: int) -> None:
        self._sampler = sampler
        self._group = group

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        indices = list(self._sampler)
        groups = [indices[start : start + self._group] for start in range(0, len(indices), self._group)]
        # Without a common divisor the walk by this stride meets each group once before it comes back to the first.
        stride = max(1, round(0.618 * len(groups)))
        while math.gcd(stride, len(groups)) > 1:
            stride += 1
        return (index for turn in range(len(groups)) for index in groups[turn * stride % len(groups)])


class CountingTrainer(Trainer):
    """Counts tokens on the device of the batch, so that counting waits for nothing."""

    real_tokens: Tensor | int = 0
    computed_tokens = 0

    def _get_train_sampler(self, *arguments: Any, **keywords: Any) -> Any:
        sampler: Any = super()._get_train_sampler(*arguments, **keywords)
        group = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return SpreadGroups(sampler, group) if self.args.train_sampling_strategy == "group_by_length" else sampler

    def training_step(self, model: Any, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Tensor:
        # Summed on the device, and read only when a step is logged.
        mask_BL = inputs["attention_mask"]
        self.real_tokens = self.real_tokens + mask_BL.sum()
        self.computed_tokens += mask_BL.numel()
        return super().training_step(model, inputs, *arguments, **keywords)

    def take_counts(self) -> tuple[int, int]:
        """Real tokens and computed tokens since the last call."""
        counts = int(self.real_tokens), self.computed_tokens
        self.real_tokens = self.computed_tokens = 0
        return counts


class StepClock(TrainerCallback):
    """Calls ``stepped`` after each step, with its seconds and whether it was the last; the call is not timed.

    Attributes:
        meter: peak memory since the training began, when DeepSpeed's engine is built.
    """

    def __init__(self, stepped: Callable[[float, bool], object]) -> None:
        self._stepped = stepped

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.meter = MemoryMeter(trim=True)
        self._ended_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize()  # or a step's kernels would count in the next one
        self._stepped(time.perf_counter() - self._ended_s, state.global_step == state.max_steps)
        self._ended_s = time.perf_counter()


def arguments(workload: Workload, folder: str, sampling: str) -> TrainingArguments:
    """The same optimizer, schedule and tokens a step as the project's run."""
    cuda = torch.cuda.is_available()
    # The project's own ZeRO-2 settings, with what the Trainer fills in.
    deepspeed = yaml.safe_load((REPOSITORY / "train_config" / "zero2.yaml").read_text()) | {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=workload.sequences,
        gradient_accumulation_steps=workload.accumulation,
        max_steps=workload.total_steps,
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        learning_rate=recipe.LEARNING_RATE,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": recipe.LOWEST_RATE_SHARE},
        warmup_steps=workload.rate_warmup_steps,
        adam_beta1=recipe.BETAS[0],
        adam_beta2=recipe.BETAS[1],
        weight_decay=recipe.WEIGHT_DECAY,
        max_grad_norm=recipe.CLIPPING,
        bf16=True,
        train_sampling_strategy=sampling,
        seed=recipe.SEED,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        deepspeed=deepspeed,
        use_cpu=not cuda,
    )


def train(workload: dict[str, Any], folder: str, sampling: str) -> list[StepLine]:
    """The steps of a workload (:class:`~benchmarks.programs.training_workload.Workload`)."""
    work = Workload(**workload)
    # The Trainer finds this group. Its own would compile DeepSpeed's operator where any killed program may have left
    # a lock.
    os.environ.update(RANK="0", WORLD_SIZE="1")
    prepare_deepspeed(make_group())
    tokenizer = EsmTokenizer.from_pretrained(work.weights)
    trainer = CountingTrainer(
        model=EsmForMaskedLM.from_pretrained(work.weights),
        args=arguments(work, folder, sampling),
        train_dataset=tokenized(work.fasta, tokenizer),  # type: ignore[arg-type]
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=recipe.MASK_SHARE),
    )
    steps: list[tuple[float, int, int, int]] = []

    def stepped(seconds: float, last: bool) -> None:
        steps.append((seconds, *trainer.take_counts(), clock.meter.peak().computing_bytes))

    clock = StepClock(stepped)
    trainer.add_callback(clock)
    trainer.train()
    # One entry for each step, and a summary without a loss.
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [StepLine(*step[:3], loss, step[3]) for step, loss in zip(steps, losses, strict=True)]
