"""The workload of the training contenders: the same initial weights, proteins, tokens a step, optimizer and schedule.

A contender is a function ``(workload, folder, ...)`` that a process of its own calls: it takes a :class:`Workload` as a
dictionary and a folder for its files, and returns a :class:`StepLine` for each optimizer step.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.programs.processes import call

SEED = 0
LEARNING_RATE = 4e-4
RATE_WARMUP_SHARE = 0.5
LOWEST_RATE_SHARE = 0.1
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01
CLIPPING = 1.0  # the Trainer's default
MASK_SHARE = 0.15

NEVER = 10**9
"""Steps between validations, or checkpoints, that are left out."""
TOY = {"layers": 1, "hidden_size": 32, "heads": 2}
"""The model of a smoke run."""


@dataclass(frozen=True)
class Workload:
    """One masked-LM training, the same for every contender.

    Attributes:
        fasta, store: the proteins; those longer than ``MAX_RESIDUES`` are cropped by every contender.
        weights: Hugging Face folder with the initial weights.
        sequences: of a padded micro-batch of the Trainer.
        accumulation: micro-batches of an optimizer step.
        tokens: token budget of a packed micro-batch: as many real tokens as ``sequences`` hold on average.
        warmup_steps: first steps, which are not measured.
    """

    fasta: str
    store: str
    weights: str
    sequences: int
    accumulation: int
    tokens: int
    warmup_steps: int
    steps: int

    @property
    def total_steps(self) -> int:
        """Optimizer steps, those that are not measured among them."""
        return self.warmup_steps + self.steps

    @property
    def rate_warmup_steps(self) -> int:
        """Steps in which the learning rate rises."""
        return max(1, round(RATE_WARMUP_SHARE * self.total_steps))


@dataclass(frozen=True)
class StepLine:
    """One optimizer step of a contender.

    Attributes:
        seconds: wall time since the end of the step before; loading, logging and the optimizer included.
        tokens: real tokens, special tokens included and padding not.
        computed_tokens: tokens that the model computed on, padding included.
        loss: mean cross entropy over the step's masked residues.
        memory_bytes: peak since model and optimizer were built; on the CPU what the process held beyond these.
    """

    seconds: float
    tokens: int
    computed_tokens: int
    loss: float
    memory_bytes: int


def tokens_per_s(steps: Iterable[tuple[int, float]]) -> float:
    """Tokens over all the seconds that the steps took."""
    # Not the mean of the steps' rates, in which a short step would count as much as a long one.
    tokens, seconds = zip(*steps, strict=True)
    return sum(tokens) / sum(seconds)


def run_contender(function: str, workload: Workload, folder: Path, **options: str) -> list[StepLine]:
    """All steps of a contender in a fresh process, whose files are in the folder until then.

    Raises RuntimeError where it failed, or did fewer steps.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        lines = call(function, workload=workload, folder=f"{scratch}/run", **options)
    # Fewer would be compared all the same, at another length of the schedule.
    if len(lines) != workload.total_steps:
        raise RuntimeError(f"{function} ended after {len(lines)} of {workload.total_steps} steps")
    return [StepLine(**line) for line in lines]
