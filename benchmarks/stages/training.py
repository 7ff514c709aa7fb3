"""Masked language modelling compared with transformers.Trainer with the same DeepSpeed ZeRO-2 settings: speed, memory.

All contenders start from the same weights and train all parameters of ESM-2 (8M on a CPU, 650M on a GPU) in bf16 with
torch's AdamW, the same clipping and schedule, on the same real proteins. A micro-batch and an optimizer step have the
same mean number of real tokens. Ours is the loop of :mod:`esmeray.training.loop.worker`. The peer is the Trainer with
EsmTokenizer, DataCollatorForLanguageModeling and padded batches, as its users run it: in random order, which is its
default, and with batches grouped by length, its own remedy against padding. Each runs in a fresh process; the first
steps are not measured. Only real tokens count.

The same runs give the peak memory of the steps: on a CPU what the process held in addition to model and optimizer, on
CUDA what torch had reserved. The losses at the end must agree within :data:`LOSS_TOLERANCE`. They can't be equal:
order, crops and masks are drawn differently.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness.comparison import compare_runs
from benchmarks.harness.inputs import MAX_RESIDUES, make_store, read_proteins, write_fasta
from benchmarks.harness.stage import Row, Setting, Stage, WrongWorkError
from benchmarks.peers.transformers_embedding import write_model
from benchmarks.programs.trainings import MASK_SHARE, TOY, Step, in_process
from esmeray.dataset.section import SPECIAL_TOKENS_PER_SEQUENCE
from esmeray.training.engine.deepspeed_settings import deepspeed_settings
from esmeray.training.section import DeepSpeedSection, TrainingSection

OURS, TRAINER, GROUPED = "esmeray", "Trainer, ZeRO-2", "Trainer, ZeRO-2, grouped by length"
SAMPLING = {TRAINER: "random", GROUPED: "group_by_length"}

LOSS_TOLERANCE = 0.1
"""Nats per residue. With a few thousand masked residues a step, other masks and orders make a difference of 0.05."""

LEARNING_RATE, LOWEST_RATE_SHARE = 4e-4, 0.1
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01
CLIPPING = 1.0  # the Trainer's default
ACCUMULATION = 2
WORK = {"cpu": ("esm2_t6_8M", 8, 2, 6), "cuda": ("esm2_t33_650M", 32, 5, 25), "quick": ("esm2_t6_8M", 4, 1, 3)}
"""Model; sequences of a padded micro-batch: the Trainer's default on a CPU, what fits 80 GB on a GPU; optimizer steps
that are not measured; all steps."""
QUICK_PROTEINS = 200
BUDGET_MULTIPLE = 64


def _rows(setting: Setting) -> Iterator[Row]:
    sequences = read_proteins(setting)[: QUICK_PROTEINS if setting.quick else None]
    fasta = str(write_fasta(setting.folder / "proteins.fasta", sequences))
    store = str(make_store(fasta, setting.folder))
    size, batch, warm_up, steps = WORK["quick" if setting.quick else setting.device]
    weights = write_model(setting.folder / "weights", size, **(TOY if setting.quick else {}))
    tokens = token_budget(sequences, batch)
    setting.facts.update(
        {
            "model": "toy" if setting.quick else size,
            "sequences of a padded micro-batch": batch,
            "token budget of a packed micro-batch": tokens,
            "micro-batches a step": ACCUMULATION,
            "steps": steps,
            "steps that are not measured": warm_up,
        }
    )
    config = our_config(fasta, weights, tokens, steps)
    trainings = {OURS: partial(in_process, "ours", setting.folder, config=config, store=store)}
    for name, sampling in SAMPLING.items():
        options = {"weights": weights, "fasta": fasta, "residues": MAX_RESIDUES}
        arguments = trainer_arguments(batch, steps, sampling, setting.device)
        trainings[name] = partial(in_process, "trainer", setting.folder, arguments=arguments, **options)
    losses: dict[str, float] = {}

    def measured(name: str) -> tuple[float, float]:
        training = trainings[name]()
        lines = training.steps[warm_up:]
        tokens = sum(line.tokens for line in lines)
        losses[name] = last_loss(lines)
        setting.facts[f"last loss, {name}"] = round(losses[name], 3)
        setting.facts[f"padding, {name}"] = round(1 - tokens / sum(line.computed_tokens for line in lines), 3)
        if not setting.quick:
            compare_losses(losses)
        # Not the mean of the steps' rates, in which a short step would count as much as a long one.
        return tokens / sum(line.seconds for line in lines), training.memory_bytes / 1e6

    runs = {name: partial(measured, name) for name in trainings}
    yield from compare_runs(setting, "masked LM", "tokens/s", runs, floors={TRAINER: 3.0})


def last_loss(steps: Sequence[Step]) -> float:
    """Return the mean loss per token of the later half: a single step has few masked residues."""
    later = steps[len(steps) // 2 :]
    return sum(step.loss * step.tokens for step in later) / sum(step.tokens for step in later)


def compare_losses(losses: dict[str, float]) -> None:
    """Raise WrongWorkError if contenders have different losses after the same real tokens."""
    if not np.ptp([*losses.values()]) <= LOSS_TOLERANCE:  # also true for NaN
        texts = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
        raise WrongWorkError(f"losses differ after the same real tokens: {texts}")


def our_config(fasta: str, weights: str, tokens: int, steps: int) -> dict[str, Any]:
    """Return the settings of Esmeray's run."""
    return {
        "data": {"source": [fasta], "max_length": MAX_RESIDUES},
        "batch": {"tokens": tokens, "global_tokens": tokens * ACCUMULATION},
        "model": {
            "task": "masked_lm",
            "backbone": {"source": weights},
            "masked_lm": {"mask_share": MASK_SHARE},
        },
        "training": {
            "max_steps": steps,
            "learning_rate": LEARNING_RATE,
            "min_learning_rate_share": LOWEST_RATE_SHARE,
            "warmup_steps": max(1, steps // 2),
            "betas": BETAS,
            "weight_decay": WEIGHT_DECAY,
            "gradient_clipping": CLIPPING,
            "precision": "bf16",
        },
    }


def trainer_arguments(sequences: int, steps: int, sampling: str, device: str) -> dict[str, Any]:
    """Return TrainingArguments with the same optimizer, schedule and real tokens per step."""
    # The project's own ZeRO-2 settings; the Trainer fills in "auto".
    own = deepspeed_settings(TrainingSection(), DeepSpeedSection())
    deepspeed = {name: own[name] for name in ("zero_optimization", "data_types")} | {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return {
        "per_device_train_batch_size": sequences,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": steps,
        "optim": "adamw_torch_fused" if device == "cuda" else "adamw_torch",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": LOWEST_RATE_SHARE},
        "warmup_steps": max(1, steps // 2),
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": CLIPPING,
        "train_sampling_strategy": sampling,
        "seed": 0,
        "deepspeed": deepspeed,
    }


def token_budget(sequences: Sequence[str], batch: int) -> int:
    """Return the mean number of tokens of ``batch`` sequences, at least the tokens of the longest."""
    lengths = [min(len(sequence), MAX_RESIDUES) + SPECIAL_TOKENS_PER_SEQUENCE for sequence in sequences]
    # The number of real tokens that the peer's padded batch has on average, so that both take as many per step.
    mean = batch * sum(lengths) / len(lengths)
    return max(round(mean / BUDGET_MULTIPLE) * BUDGET_MULTIPLE, max(lengths))


STAGE = Stage(
    name="training",
    summary="masked LM with DeepSpeed ZeRO-2 compared with transformers.Trainer: tokens/s and peak memory",
    rows=_rows,
    packages=("transformers", "accelerate", "deepspeed"),
    distributions=("transformers", "accelerate", "deepspeed"),
)
