"""The model alone across token budgets and precisions, and the whole way from the store through it.

In: a :class:`~tools._benchmark.subject.Subject`. Out: samples of each variant. Every budget gets the same sequences, so
that a round compares equal work; how many budgets fit the time is found out by a few runs of the smallest.

What a model waits for is taken from outside: after each batch the device is waited for, and then the time until the
next one is on it counts as waiting, which is more than a loop without that synchronisation would wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from dataset.packed_batch import PackedBatch
from dataset.tokens.esm import packed_from_tokens, tokenize_pieces
from model.backbones.base import PackedBackbone
from model.backbones.loading import build_backbone
from model.tasks.embedding import optimize_for_inference
from model.tasks.pooling import mean_over_residues
from tools._benchmark.data_stages import NUM_WORKERS, endless, processes, training_batches
from tools._benchmark.measuring import LEAST_ROUNDS, Done, StageResult, Variant, measure, synchronize
from tools._benchmark.subject import SEED, Subject
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE, DataSection

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
BUDGETS = {"cpu": (1_024, 32_768), "cuda": (4_096, 131_072)}
PIECE_S = 0.4
"""Time of a round of the whole pipeline, or of a batch where that takes longer."""

_SETTLING_BATCHES = 1
_TRIALS = 3

Models: TypeAlias = dict[str, PackedBackbone]
"""The same backbone in each precision, by its name."""


def load_models(subject: Subject) -> Models:
    """On the device, for inference.

    Raises:
        ConfigError, DataError, ResourceError: as :func:`~model.backbones.loading.load_network`.
    """
    loaded = {}
    for name, dtype in PRECISIONS.items():
        backbone = build_backbone(subject.backbone, SEED).to(subject.device)
        loaded[name] = optimize_for_inference(backbone, dtype)
    return loaded


def inference(subject: Subject, models: Models, until_share: float) -> StageResult:
    """The forward pass and the mean of each sequence, by budget and precision."""
    budgets, notes = _fitting_budgets(subject, models, until_share)
    records = subject.plan(subject.some_records(), budgets[-1]).batch_records(0)
    batches = {}
    for budget in budgets:
        plan = subject.plan(records, budget)
        numbers = range(plan.num_batches)
        batches[budget] = [_batch(subject, plan.batch_records(number)) for number in numbers]
    variants = []
    for precision, backbone in models.items():
        for budget in budgets:

            def work(backbone: PackedBackbone = backbone, budget: int = budget) -> Done:
                return _forward(backbone, batches[budget])

            settings: dict[str, int | str] = {"batch.tokens": budget, "precision": precision}
            variants.append(Variant(f"{precision}, {budget:,} tokens", work, settings))
    rows, more = measure(variants, subject.clock, until_share, subject.device, subject.show)
    title = f"Inference with {subject.backbone.source} on {subject.device.type}"
    return StageResult("inference", title, rows, [*notes, *more])


def pipeline(subject: Subject, models: Models, precision: str, budget: int, until_share: float) -> StageResult:
    """Store, loader, model: tokens/s and what the model waits for data, by loader processes."""
    backbone = models[precision]
    with ExitStack() as open_batches:
        variants = []
        for num_workers in NUM_WORKERS:
            batches = open_batches.enter_context(training_batches(subject, budget, "masked_lm", num_workers))
            coming = endless(batches)

            def work(coming: Iterator[PackedBatch] = coming, num_workers: int = num_workers) -> Done:
                _settle(backbone, coming, num_workers, subject.device)
                return _pipeline_piece(backbone, coming, subject.device)

            settings: dict[str, int | str] = {"data.num_workers": num_workers}
            variants.append(Variant(processes(num_workers), work, settings))
        rows, notes = measure(variants, subject.clock, until_share, subject.device, subject.show)
    title = f"Whole pipeline: store, loader, forward ({precision}, {budget:,} tokens)"
    return StageResult("pipeline", title, rows, notes)


def _fitting_budgets(subject: Subject, models: Models, until_share: float) -> tuple[list[int], list[str]]:
    """As many budgets as can be measured in the time, the two smallest always; and what was left out."""
    wanted = subject.budgets(*BUDGETS[subject.device.type])
    records = subject.plan(subject.some_records(), wanted[0]).batch_records(0)
    batch = _batch(subject, records)
    seconds_per_token = 0.0
    for precision, backbone in models.items():
        subject.show(f"{precision}: trying the smallest budget")
        seconds_per_token += _forward_s(backbone, batch, subject.device) / batch.num_tokens
    round_s = subject.clock.left_s(until_share) / (LEAST_ROUNDS + 1)
    fitting = [b for number, b in enumerate(wanted, 1) if number <= 2 or number * b * seconds_per_token <= round_s]
    left_out = wanted[len(fitting) :]
    notes = [f"no time for {', '.join(f'{b:,}' for b in left_out)} tokens: --seconds gives more"] if left_out else []
    return fitting, notes


def _batch(subject: Subject, records_N: NDArray[np.int64]) -> PackedBatch:
    """Records cropped at their start, on the device."""
    tokens_N = subject.tokens_of(records_N)
    residues_N = tokens_N - SPECIAL_TOKENS_PER_SEQUENCE
    pieces = subject.store.windows(records_N, np.zeros_like(residues_N), residues_N)
    return packed_from_tokens(tokenize_pieces(pieces), tokens_N).to(subject.device)


@torch.inference_mode()
def _forward(backbone: PackedBackbone, batches: list[PackedBatch]) -> Done:
    for batch in batches:
        mean_over_residues(backbone(batch), batch)
    tokens = sum(batch.num_tokens for batch in batches)
    return Done({"tokens/s": tokens, "sequences/s": sum(batch.num_sequences for batch in batches)})


def _forward_s(backbone: PackedBackbone, batch: PackedBatch, device: torch.device) -> float:
    """The shortest of a few runs: the first compiles and allocates, others may be disturbed."""
    times_s = []
    for _ in range(_TRIALS):
        start_s = time.perf_counter()
        _forward(backbone, [batch])
        synchronize(device)
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def _settle(backbone: PackedBackbone, coming: Iterator[PackedBatch], num_workers: int, device: torch.device) -> None:
    """Use up what was prepared while other variants had their turn, so that it doesn't hide waiting."""
    for _ in range(num_workers * DataSection().prefetch):
        next(coming)
    for batch in islice(coming, _SETTLING_BATCHES):
        _forward(backbone, [batch.to(device)])
    synchronize(device)


def _pipeline_piece(backbone: PackedBackbone, coming: Iterator[PackedBatch], device: torch.device) -> Done:
    tokens, waited_s = 0, 0.0
    start_s = asked_s = time.perf_counter()
    while not tokens or asked_s - start_s < PIECE_S:
        batch = next(coming).to(device, non_blocking=True)
        synchronize(device)
        waited_s += time.perf_counter() - asked_s
        _forward(backbone, [batch])
        synchronize(device)
        tokens += batch.num_tokens
        asked_s = time.perf_counter()
    passed_s = asked_s - start_s
    return Done({}, {"tokens/s": tokens / passed_s, "% waiting for data": 100 * waited_s / passed_s})
