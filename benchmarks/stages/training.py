"""Masked language modelling, beside transformers.Trainer with the same DeepSpeed ZeRO-2 settings: speed and memory.

All contenders start from the same weights and train all parameters of ESM-2 (8M on the CPU, 650M on a GPU) in bf16 with
torch's AdamW, the same clipping and schedule, on the same real proteins, with as many real tokens in a micro-batch and
in an optimizer step on average. Ours is the loop of :mod:`esmeray.training.loop.worker`; the peer is the Trainer with
EsmTokenizer, DataCollatorForLanguageModeling and padded batches, as its users run it: in random order, which is its
default, and again with batches grouped by length, its own remedy against padding. Each runs in a fresh process; its
first steps are not measured. Only real tokens count.

The same runs give the peak memory of the steps: on the CPU what the process held beyond model and optimizer, on CUDA
what torch had allocated. The loss at the end must agree within :data:`LOSS_TOLERANCE`: otherwise the work would not be
the same. It can't be equal: order, crops and masks are drawn differently.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from transformers import EsmForMaskedLM

from benchmarks.harness.models import random_network
from benchmarks.harness.proteins import MAX_RESIDUES, Proteins, read_proteins, write_store
from benchmarks.harness.stage import Case, Comparison, Contender, Facts, Setting, Stage, WrongWorkError
from benchmarks.peers.transformers_embedding import esm_tokenizer
from benchmarks.programs.training_workload import TOY, StepLine, Workload, run_contender, tokens_per_s
from esmeray.dataset.section import SPECIAL_TOKENS_PER_SEQUENCE
from esmeray.dataset.tokens.model_folder import quiet_transformers

OURS, TRAINER, GROUPED = "esmeray", "Trainer, ZeRO-2", "Trainer, ZeRO-2, grouped by length"
PROGRAMS: dict[str, tuple[str, dict[str, str]]] = {
    OURS: ("benchmarks.programs.worker_alone:train", {}),
    TRAINER: ("benchmarks.programs.trainer:train", {"sampling": "random"}),
    GROUPED: ("benchmarks.programs.trainer:train", {"sampling": "group_by_length"}),
}
"""Function of each contender, with its options."""

SPEED, MEMORY = "masked LM", "peak memory"

LOSS_TOLERANCE = 0.1
"""Nats a residue. With a few thousand masked residues a step, other masks and orders make a difference of 0.05."""

SIZES = {"cpu": "esm2_t6_8M", "cuda": "esm2_t33_650M"}
SEQUENCES = {"cpu": 8, "cuda": 32}
"""Sequences of a padded micro-batch: the Trainer's default on the CPU, and what fits 80 GB with the longest protein."""
ACCUMULATION = 2
STEPS = {"cpu": (2, 4), "cuda": (5, 20)}
"""Optimizer steps that are not measured, and those that are."""
QUICK_PROTEINS, QUICK_SEQUENCES, QUICK_STEPS = 200, 4, (1, 2)
ROUNDS = 3
BUDGET_MULTIPLE = 64


def _cases(setting: Setting) -> Iterator[Case]:
    proteins = read_proteins(setting.fasta)
    network = random_network(SIZES[setting.device], **(TOY if setting.quick else {}))
    setting.note("writing the store and the initial weights")
    workload = prepare(setting, proteins, network)
    runs = Runs(workload, setting.folder, float("inf") if setting.quick else LOSS_TOLERANCE)
    runs.facts |= {
        **proteins.facts,
        "model": "toy" if setting.quick else SIZES[setting.device],
        "sequences of a padded micro-batch": workload.sequences,
        "token budget of a packed micro-batch": workload.tokens,
        "micro-batches a step": workload.accumulation,
        "steps measured": workload.steps,
    }
    speed = tuple(Contender(name, partial(runs.run, name), kind="value") for name in PROGRAMS)
    yield Case(SPEED, "tokens/s", speed, rounds=ROUNDS, facts=runs.facts)

    memory = tuple(runs.replay(name, lambda steps: steps[-1].memory_bytes / 1e6) for name in PROGRAMS)
    yield Case(MEMORY, "MB", memory, better="lower", rounds=ROUNDS)


@dataclass
class Runs:
    """Measured runs of the contenders, which all cases share.

    Attributes:
        loss_tolerance: largest difference between the last losses of two contenders.
        facts: of the runs, filled as they are made.
        measured: measured steps of each run, by contender.
        losses: last loss of each contender's first run.
    """

    workload: Workload
    folder: Path
    loss_tolerance: float
    facts: Facts = field(default_factory=dict)
    measured: dict[str, list[Sequence[StepLine]]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)

    def run(self, name: str) -> float:
        """Train once; return real tokens per second of the measured steps.

        Raises WrongWorkError where the last loss is not that of another contender.
        """
        function, options = PROGRAMS[name]
        return self.add(name, run_contender(function, self.workload, self.folder, **options))

    def add(self, name: str, lines: Sequence[StepLine]) -> float:
        """Keep a run of a contender; see :meth:`run`."""
        steps = lines[self.workload.warmup_steps :]
        self.measured.setdefault(name, []).append(steps)
        # Of the later half: a single step's loss has the noise of its few masked residues.
        later = steps[len(steps) // 2 :]
        last = sum(step.loss * step.tokens for step in later) / sum(step.tokens for step in later)
        for other, loss in self.losses.items():
            # So written, a loss that is NaN is refused, too.
            if not abs(loss - last) <= self.loss_tolerance:
                raise WrongWorkError(f"after the same real tokens, {name} has a loss of {last:.3f}, {other} {loss:.3f}")
        self.losses.setdefault(name, last)
        tokens = sum(step.tokens for step in steps)
        self.facts[f"last loss, {name}"] = round(last, 3)
        self.facts[f"padding, {name}"] = round(1 - tokens / sum(step.computed_tokens for step in steps), 3)
        return tokens_per_s([(step.tokens, step.seconds) for step in steps])

    def replay(self, name: str, value: Callable[[Sequence[StepLine]], float]) -> Contender:
        """A contender that gives this value of the runs that were made, one each round."""
        # One run is measured once: its memory and FLOP/s are of the same steps as its speed.
        made = iter(self.measured[name])
        return Contender(name, lambda: value(next(made)), kind="value")


def prepare(setting: Setting, proteins: Proteins, network: EsmForMaskedLM) -> Workload:
    """Write the files that all contenders read, and settle how much each takes at once."""
    sequences = proteins.sequences[: QUICK_PROTEINS if setting.quick else None]
    folder = setting.folder.resolve()
    store = write_store(folder, sequences)
    weights = folder / "weights"
    with quiet_transformers():
        network.save_pretrained(weights)
    esm_tokenizer(weights).save_pretrained(weights)  # the Trainer's own reads it with the weights
    batch = QUICK_SEQUENCES if setting.quick else SEQUENCES[setting.device]
    warmup_steps, steps = QUICK_STEPS if setting.quick else STEPS[setting.device]
    return Workload(
        fasta=str(folder / "proteins.fasta"),
        store=str(store),
        weights=str(weights),
        sequences=batch,
        accumulation=ACCUMULATION,
        tokens=token_budget(sequences, batch),
        warmup_steps=warmup_steps,
        steps=steps,
    )


def token_budget(sequences: Sequence[str], batch: int) -> int:
    """Tokens that so many of the sequences have on average; at least as many as the longest."""
    lengths = [min(len(sequence), MAX_RESIDUES) + SPECIAL_TOKENS_PER_SEQUENCE for sequence in sequences]
    # As many real tokens as the peer's padded batch has on average, so that both take as many a step.
    mean = batch * sum(lengths) / len(lengths)
    return max(round(mean / BUDGET_MULTIPLE) * BUDGET_MULTIPLE, max(lengths))


STAGE = Stage(
    name="training",
    summary="masked LM with DeepSpeed ZeRO-2, beside transformers.Trainer: tokens/s and peak memory",
    cases=_cases,
    comparisons=(
        Comparison(SPEED, OURS, TRAINER, {"cpu": 3.0}),
        Comparison(SPEED, OURS, GROUPED),
        Comparison(MEMORY, OURS, TRAINER, {"cpu": 1.0, "cuda": 1 / 0.6}, label="peak memory of training"),
        Comparison(MEMORY, OURS, GROUPED, label="peak memory of training"),
    ),
    packages=("transformers", "accelerate", "deepspeed"),
    distributions=("transformers", "accelerate", "deepspeed"),
)
