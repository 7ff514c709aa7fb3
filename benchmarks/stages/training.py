"""Masked language modelling, beside transformers.Trainer with the same DeepSpeed ZeRO-2 settings: speed and memory.

All contenders start from the same weights and train all parameters of ESM-2 (8M on the CPU, 650M on a GPU) in bf16 with
torch's AdamW, the same clipping and schedule, on the same real proteins, with as many real tokens in a micro-batch and
in an optimizer step on average. Ours is the loop of :mod:`training.loop.worker`; the peer is the Trainer with
EsmTokenizer, DataCollatorForLanguageModeling and padded batches, as its users run it: in random order, which is its
default, and again with batches grouped by length, its own remedy against padding. Each runs in a fresh process; its
first steps are not measured. Only real tokens count.

The same runs give the peak memory of the steps: on the CPU what the process held beyond model and optimizer, on CUDA
what torch had allocated. The loss at the end must agree within :data:`LOSS_TOLERANCE`: otherwise the work would not be
the same. It can't be equal: order, crops and masks are drawn differently.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.proteins import MAX_RESIDUES, Proteins, read_proteins, write_fasta
from benchmarks.harness.stage import Case, Comparison, Contender, Facts, Setting, Stage, WrongWorkError
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE

if TYPE_CHECKING:
    from transformers import EsmForMaskedLM

    from benchmarks.programs.training_workload import StepLine, Workload

OURS = "esmeray"
TRAINER = "Trainer, ZeRO-2"
GROUPED = "Trainer, ZeRO-2, grouped by length"
PEAK = "bf16 matrix product"
SPEED, MEMORY, UTILIZATION = "masked LM", "peak memory", "share of peak"

LOSS_TOLERANCE = 0.1
"""Nats a residue. With a few thousand masked residues a step, other masks and orders make a difference of 0.05."""

SIZES = {"cpu": "esm2_t6_8M", "cuda": "esm2_t33_650M"}
SEQUENCES = {"cpu": 8, "cuda": 32}
"""Of a padded micro-batch: the Trainer's default on the CPU, and what fits 80 GB when the longest protein is in it."""
ACCUMULATION = 2
STEPS = {"cpu": (2, 4), "cuda": (5, 20)}
"""Optimizer steps that are not measured, and those that are."""
QUICK_SIZE = {"layers": 1, "hidden_size": 32, "heads": 2}
QUICK_PROTEINS, QUICK_SEQUENCES, QUICK_STEPS = 200, 4, (1, 2)
ROUNDS = 3
BUDGET_MULTIPLE = 64
PEAK_SIZE, PEAK_REPEATS = 8192, 20


def _cases(setting: Setting) -> Iterator[Case]:
    if setting.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn that it found nothing better
    proteins = read_proteins(setting.fasta)
    network = _network(setting)
    setting.note("writing the store and the initial weights")
    workload = prepare(setting, proteins, network)
    runs = Runs(workload, setting.folder, None if setting.quick else LOSS_TOLERANCE)
    runs.facts.update(_facts(setting, proteins, workload))
    yield _speed_case(runs)
    yield _memory_case(runs, setting.device)
    if setting.device == "cuda":
        yield _utilization_case(runs, _training_flops(network, proteins))


@dataclass
class Runs:
    """Runs of the contenders so far, by name, which all cases share.

    Attributes:
        workload: what is trained.
        folder: for the files of a run.
        loss_tolerance: by how much last losses may differ; None for no matter how much.
        facts: filled with what the runs tell.
    """

    workload: Workload
    folder: Path
    loss_tolerance: float | None
    facts: Facts = field(default_factory=dict)
    measured: dict[str, list[Sequence[StepLine]]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)

    def run(self, name: str, module: str, *options: str) -> float:
        """Train once; real tokens per second of the measured steps.

        Raises:
            WrongWorkError: it learns otherwise than another contender.
        """
        from benchmarks.programs.training_process import run_contender

        lines = run_contender(module, self.workload, self.folder, *options)
        steps = lines[self.workload.warmup_steps :]
        self.measured.setdefault(name, []).append(steps)
        self._compare_losses(name, lines[0].loss, _mean_loss(steps[len(steps) // 2 :]))
        self.facts[f"real tokens a step, {name}"] = round(sum(step.tokens for step in steps) / len(steps))
        padded = 1 - sum(step.tokens for step in steps) / sum(step.computed_tokens for step in steps)
        self.facts[f"padding, {name}"] = round(padded, 3)
        return tokens_per_s(steps)

    def _compare_losses(self, name: str, first: float, last: float) -> None:
        self.facts |= {f"first loss, {name}": round(first, 3), f"last loss, {name}": round(last, 3)}
        for other, loss in self.losses.items():
            if self.loss_tolerance is not None and not abs(loss - last) <= self.loss_tolerance:
                raise WrongWorkError(f"after the same real tokens, {name} has a loss of {last:.3f}, {other} {loss:.3f}")
        self.losses.setdefault(name, last)

    def replay(self, name: str, value: Callable[[Sequence[StepLine]], float]) -> Contender:
        """A contender that gives this value of the runs that were made, one each round."""
        made = iter(self.measured[name])
        return Contender(name, lambda: value(next(made)), kind="value")


def tokens_per_s(steps: Sequence[StepLine]) -> float:
    """Real tokens over all the time that the steps took."""
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def _mean_loss(steps: Sequence[StepLine]) -> float:
    return sum(step.loss * step.tokens for step in steps) / sum(step.tokens for step in steps)


def _speed_case(runs: Runs) -> Case:
    def contender(name: str, module: str, *options: str) -> Contender:
        return Contender(name, lambda: runs.run(name, module, *options), kind="value")

    return Case(
        SPEED,
        "tokens/s",
        (
            contender(OURS, "benchmarks.programs.training_contender"),
            contender(TRAINER, "benchmarks.programs.trainer", "random"),
            contender(GROUPED, "benchmarks.programs.trainer", "group_by_length"),
        ),
        rounds=ROUNDS,
        facts=runs.facts,
    )


def _memory_case(runs: Runs, device: str) -> Case:
    """The memory of the same runs: nothing is trained again."""

    def megabytes(steps: Sequence[StepLine]) -> float:
        built = 0 if device == "cuda" else steps[-1].built_bytes
        return (steps[-1].peak_bytes - built) / 1e6

    contenders = tuple(runs.replay(name, megabytes) for name in (OURS, TRAINER, GROUPED))
    return Case(
        MEMORY,
        "MB",
        contenders,
        better="lower",
        rounds=ROUNDS,
        facts={
            f"whole process in MB, {name}": round(made[-1][-1].peak_bytes / 1e6)
            for name, made in runs.measured.items()
            if device == "cpu"
        },
    )


def _utilization_case(runs: Runs, flops_per_token: float) -> Case:
    """FLOP/s of the same runs, 6 N a token and attention, beside what the device does at best."""
    import torch

    matrix = torch.randn(PEAK_SIZE, PEAK_SIZE, device="cuda", dtype=torch.bfloat16)

    def product() -> float:
        for _ in range(PEAK_REPEATS):
            torch.matmul(matrix, matrix)
        return PEAK_REPEATS * 2 * PEAK_SIZE**3 / 1e12

    def teraflops(steps: Sequence[StepLine]) -> float:
        return tokens_per_s(steps) * flops_per_token / 1e12

    contenders = (runs.replay(OURS, teraflops), runs.replay(TRAINER, teraflops), Contender(PEAK, product))
    return Case(UTILIZATION, "TFLOP/s", contenders, rounds=ROUNDS, facts={"FLOPs a token": flops_per_token})


def prepare(setting: Setting, proteins: Proteins, network: EsmForMaskedLM) -> Workload:
    """Files that all contenders read, and how much each takes at once."""
    from benchmarks.programs.training_workload import Workload

    sequences = proteins.sequences[: QUICK_PROTEINS if setting.quick else None]
    fasta = setting.folder / "proteins.fasta"
    write_fasta(fasta, sequences, len(sequences))
    store, weights = setting.folder / "store", setting.folder / "weights"
    _convert(fasta, store)
    _save(network, weights)
    batch = QUICK_SEQUENCES if setting.quick else SEQUENCES[setting.device]
    warmup_steps, steps = QUICK_STEPS if setting.quick else STEPS[setting.device]
    return Workload(
        fasta=str(fasta.resolve()),
        store=str(store.resolve()),
        weights=str(weights.resolve()),
        sequences=batch,
        accumulation=ACCUMULATION,
        tokens=token_budget(sequences, batch),
        warmup_steps=warmup_steps,
        steps=steps,
    )


def token_budget(sequences: Sequence[str], batch: int) -> int:
    """As many tokens as so many of the sequences have on average; at least what the longest takes."""
    lengths = [_tokens(sequence) for sequence in sequences]
    mean = batch * sum(lengths) / len(lengths)
    return max(round(mean / BUDGET_MULTIPLE) * BUDGET_MULTIPLE, max(lengths))


def _tokens(sequence: str) -> int:
    return min(len(sequence), MAX_RESIDUES) + SPECIAL_TOKENS_PER_SEQUENCE


def _network(setting: Setting) -> EsmForMaskedLM:
    from benchmarks.programs.training_workload import SEED
    from model.backbones.loading import load_network
    from train_config.schema import BackboneSection

    changes = QUICK_SIZE if setting.quick else {}
    return load_network(BackboneSection.model_validate({"source": SIZES[setting.device], **changes}), SEED)


def _convert(fasta: Path, store: Path) -> None:
    from dataset.store.conversion import convert
    from train_config.schema import IngestSection

    convert([str(fasta)], store, IngestSection())


def _save(network: EsmForMaskedLM, folder: Path) -> None:
    """Weights, config and vocabulary for ``from_pretrained``."""
    from transformers import EsmTokenizer

    from dataset.tokens.esm import VOCABULARY
    from model.backbones.loading import quiet_transformers

    with quiet_transformers():
        network.save_pretrained(folder)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(VOCABULARY), encoding="utf-8")
    EsmTokenizer(str(vocabulary)).save_pretrained(folder)


def _training_flops(network: EsmForMaskedLM, proteins: Proteins) -> float:
    """FLOPs a token: three times those of the forward pass, since the backward pass does two products for each."""
    from benchmarks.harness.models import forward_flops

    cropped = [sequence[:MAX_RESIDUES] for sequence in proteins.sequences]
    return 3 * forward_flops(network, cropped) / sum(map(_tokens, cropped))


def _facts(setting: Setting, proteins: Proteins, workload: Workload) -> Facts:
    return {
        **proteins.facts,
        "model": "toy" if setting.quick else SIZES[setting.device],
        "precision": workload.precision,
        "sequences of a padded micro-batch": workload.sequences,
        "token budget of a packed micro-batch": workload.tokens,
        "micro-batches a step": workload.accumulation,
        "first steps not measured": workload.warmup_steps,
        "steps measured": workload.steps,
        "loss tolerance": LOSS_TOLERANCE,
    }


STAGE = Stage(
    name="training",
    summary="masked LM with DeepSpeed ZeRO-2, beside transformers.Trainer: tokens/s and peak memory",
    cases=_cases,
    comparisons=(
        Comparison(SPEED, OURS, TRAINER, {"cpu": 3.0}),
        Comparison(SPEED, OURS, GROUPED),
        Comparison(MEMORY, OURS, TRAINER, {"cpu": 1.0, "cuda": 1 / 0.6}, label="peak memory of training"),
        Comparison(MEMORY, OURS, GROUPED, label="peak memory of training"),
        Comparison(UTILIZATION, OURS, PEAK, {"cuda": 0.45}),
        Comparison(UTILIZATION, OURS, TRAINER),
    ),
    packages=("transformers", "accelerate", "deepspeed"),
    distributions=("transformers", "accelerate", "deepspeed"),
)
