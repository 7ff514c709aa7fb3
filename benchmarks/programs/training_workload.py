"""What the training contenders are given: the same initial weights, proteins, tokens a step, optimiser and schedule.

In: the proteins as FASTA. Out: a :class:`Workload`, which travels to a contender's process as JSON, and the lines that
the contender answers with. The contenders are programs of their own, each in a fresh process, so that none inherits
another's memory, threads or process group.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

SEED = 0
LEARNING_RATE = 4e-4
RATE_WARMUP_SHARE = 0.5
LOWEST_RATE_SHARE = 0.1
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01
CLIPPING = 1.0
MASK_SHARE = 0.15


@dataclass(frozen=True)
class Workload:
    """One masked-LM training, the same for every contender.

    Attributes:
        fasta: the proteins; those longer than ``MAX_RESIDUES`` are cropped by every contender.
        store: the same as the project's store.
        weights: Hugging Face folder with the initial weights of all contenders.
        sequences: sequences of a padded micro-batch of the Trainer.
        accumulation: micro-batches of an optimizer step, of every contender.
        tokens: token budget of a packed micro-batch: as many real tokens as ``sequences`` hold on average.
        warmup_steps: first steps, which are not measured.
        steps: measured steps.
        precision: bf16 or none (fp32).
    """

    fasta: str
    store: str
    weights: str
    sequences: int
    accumulation: int
    tokens: int
    warmup_steps: int
    steps: int
    precision: str = "bf16"

    @property
    def total_steps(self) -> int:
        """Optimizer steps, those that are not measured among them."""
        return self.warmup_steps + self.steps

    @property
    def rate_warmup_steps(self) -> int:
        """Steps in which the learning rate rises."""
        return max(1, round(RATE_WARMUP_SHARE * self.total_steps))

    def to_json(self) -> str:
        """As a command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """Read :meth:`to_json`."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class StepLine:
    """What a contender says after an optimizer step.

    Attributes:
        step: from 1.
        seconds: wall time since the end of the step before; loading, logging and the optimizer included.
        tokens: real tokens, special tokens included and padding not.
        computed_tokens: tokens that the model computed on, padding included.
        loss: mean cross entropy over the step's masked residues.
        peak_bytes: highest memory since the model and the optimizer were built.
        built_bytes: memory when they were built.
    """

    step: int
    seconds: float
    tokens: int
    computed_tokens: int
    loss: float
    peak_bytes: int
    built_bytes: int


class StepLines:
    """Writes one JSON line a step, for the parent process; stdout is left to whatever libraries print."""

    def __init__(self, path: Path | str) -> None:
        self._file = Path(path).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115

    def write(self, line: StepLine) -> None:
        """Write one; it is in the file when this returns."""
        self._file.write(json.dumps(asdict(line)) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_step_lines(path: Path) -> list[StepLine]:
    """The lines of a contender that has ended."""
    return [StepLine(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
