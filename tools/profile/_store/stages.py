"""The stages from the store to the model's output, each in tokens per second.

A sample takes some hundredths of a second; small stores are gone through again and again. Every budget of inference
gets the same sequences, so that a round compares equal work. Waiting is measured from outside: after each batch the
device is waited for, and the time until the next one is on it counts, which is more than a loop without that
synchronisation would wait.

Shape legend: N records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

from common.text import counted
from common.timing import timed
from dataset.batches.loader import Loader, ResidueSource
from dataset.batches.plan import plan_epoch
from dataset.batches.preparation import PreparationSettings
from dataset.batches.steps import TrainingSteps
from dataset.packed_batch import PackedBatch
from dataset.tokens.esm import packed_from_tokens, tokenize_pieces
from model.backbones.base import PackedBackbone
from model.backbones.loading import build_backbone
from model.optimization import optimize_for_inference
from model.tasks.pooling import mean_over_residues
from tools.profile._store.subject import END_SHARES, LEAST_ROUNDS, SEED, Row, StageResult, Subject, Variant
from train_config.schema import BatchSection, DataSection, MaskedLMSection

TOKENS, WAITING, FILLED = "tokens/s", "% waiting for data", "% filled"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""By their names in training.precision."""

_FORWARD_BUDGETS = {"cpu": (1_024, 32_768), "cuda": (4_096, 131_072)}
_PACKING_WINDOWS = (BatchSection().packing_window, 4 * BatchSection().packing_window)
_NUM_WORKERS = (0, 1, 2)
_READ_RECORDS, _PACKED_RECORDS = 20_000, 1_000_000
_CHUNK_RECORDS = 64
"""Sequences that are read, or tokenized, at once: about a batch."""
_LOADING_PIECE_S = 0.15
"""Time of a round, in which many times as much is loaded as waits, prepared ahead, when it begins."""
_PIPELINE_PIECE_S = 0.4

Sample = dict[str, float]


def run_stages(subject: Subject) -> Iterator[StageResult]:
    """Each stage in turn; the last takes the budget and precision that were fastest.

    Raises:
        ConfigError, DataError, ResourceError: as :func:`~model.backbones.loading.build_backbone`.
    """
    subject.show("loading the model")
    models = {
        name: optimize_for_inference(build_backbone(subject.backbone, SEED).to(subject.device), dtype)
        for name, dtype in PRECISIONS.items()
    }
    yield reading(subject)
    yield tokenizing(subject)
    yield packing(subject)
    forward = inference(subject, models)
    yield forward
    budget = reference_budget(forward.rows)
    yield _by_loaders(subject, "loading", f"Loading batches of {budget:,} tokens", budget, _load)
    best = fastest(forward.rows).settings
    precision, budget = str(best["training.precision"]), int(best["batch.tokens"])
    title = f"Whole pipeline: store, loader, forward (precision {precision}, {budget:,} tokens)"
    yield _by_loaders(subject, "pipeline", title, budget, partial(_pipe, subject, models[precision]))


def fastest(rows: list[Row], unit: str = TOKENS) -> Row:
    """The row with most of a unit."""
    return max(rows, key=lambda row: row.median(unit))


def reference_budget(rows: list[Row]) -> int:
    """The default of batch.tokens, or the budget nearest to it that was measured."""
    default = BatchSection().tokens
    return min((int(row.settings["batch.tokens"]) for row in rows), key=lambda budget: abs(budget - default))


def _rate(tokens: float, work: Callable[[], object]) -> Sample:
    return {TOKENS: tokens / timed(work)[1]}


def reading(subject: Subject) -> StageResult:
    """Sequences copied out of the store, in its order and at random."""
    some = subject.some_records(_READ_RECORDS)
    orders = {"in order": np.arange(some.size), "at random": np.random.default_rng(SEED).permutation(some)}

    def read(records_N: NDArray[np.int64]) -> Sample:
        chunks = _chunks(records_N)
        tokens = float(subject.tokens_of(records_N).sum())
        return _rate(tokens, lambda: [b"".join(subject.pieces(chunk_N)) for chunk_N in chunks])

    variants = [Variant(name, {"order": name}, partial(read, records_N)) for name, records_N in orders.items()]
    return subject.measure("reading", "Reading the store", variants)


def _chunks(records_N: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return np.array_split(records_N, -(-records_N.size // _CHUNK_RECORDS))


def tokenizing(subject: Subject) -> StageResult:
    """Residues that were read before to ids."""
    records_N = subject.some_records(_READ_RECORDS)
    pieces = [subject.pieces(chunk_N) for chunk_N in _chunks(records_N)]
    tokens = float(subject.tokens_of(records_N).sum())
    sample = partial(_rate, tokens, lambda: [tokenize_pieces(chunk) for chunk in pieces])
    return subject.measure("tokenizing", "Tokenizing", [Variant("residues to ids", {}, sample)])


def packing(subject: Subject) -> StageResult:
    """An epoch planned from the lengths: how fast, and how much of each budget is filled."""
    tokens_N = subject.tokens_of(subject.some_records(_PACKED_RECORDS))
    budget = max(BatchSection().tokens, subject.longest_tokens)

    def planned(window: int) -> Sample:
        plan, elapsed_s = timed(lambda: plan_epoch(tokens_N, budget, window, SEED, 0))
        return {TOKENS: tokens_N.sum() / elapsed_s, FILLED: 100 * plan.fill_share}

    variants = [
        Variant(f"window {window:,}", {"batch.packing_window": window}, partial(planned, window))
        for window in _PACKING_WINDOWS
    ]
    return subject.measure("packing", f"Packing (planning an epoch of batches of {budget:,} tokens)", variants)


def inference(subject: Subject, models: dict[str, PackedBackbone]) -> StageResult:
    """The forward pass and the mean of each sequence, by budget and precision."""
    budgets, notes = _affordable_budgets(subject, models)
    records = subject.plan(subject.some_records(), budgets[-1]).batch_records(0)
    batches = {}
    for budget in budgets:
        plan = subject.plan(records, budget)
        batches[budget] = [_batch(subject, plan.batch_records(number)) for number in range(plan.num_batches)]
    tokens = float(subject.tokens_of(records).sum())
    variants = [
        Variant(
            f"precision {precision}, {budget:,} tokens",
            {"batch.tokens": budget, "training.precision": precision},
            partial(_rate, tokens, partial(_forward, backbone, batches[budget])),
        )
        for precision, backbone in models.items()
        for budget in budgets
    ]
    title = f"Inference with {subject.backbone.source} on {subject.device.type}"
    return subject.measure("inference", title, variants, notes)


def _affordable_budgets(subject: Subject, models: dict[str, PackedBackbone]) -> tuple[list[int], list[str]]:
    """Budgets that can be measured in the time, the two smallest always; and a note on the others."""
    wanted = subject.budgets(*_FORWARD_BUDGETS[subject.device.type])
    batch = _batch(subject, subject.plan(subject.some_records(), wanted[0]).batch_records(0))
    seconds_per_token = 0.0
    for precision, backbone in models.items():
        subject.show(f"precision {precision}: trying the smallest budget")
        _forward(backbone, [batch])  # compiles and allocates
        seconds_per_token += timed(partial(_forward, backbone, [batch]))[1] / batch.num_tokens
    round_s = subject.left_s(END_SHARES["inference"]) / (LEAST_ROUNDS + 1)
    chosen = [b for number, b in enumerate(wanted, 1) if number <= 2 or number * b * seconds_per_token <= round_s]
    left_out = ", ".join(f"{budget:,}" for budget in wanted[len(chosen) :])
    return chosen, [f"no time for {left_out} tokens: --seconds gives more"] if left_out else []


def _batch(subject: Subject, records_N: NDArray[np.int64]) -> PackedBatch:
    """Records cropped at their end, on the device."""
    return packed_from_tokens(tokenize_pieces(subject.pieces(records_N)), subject.tokens_of(records_N)).to(
        subject.device
    )


@torch.inference_mode()
def _forward(backbone: PackedBackbone, batches: list[PackedBatch]) -> None:
    for batch in batches:
        mean_over_residues(backbone(batch), batch)


def _by_loaders(
    subject: Subject, name: str, title: str, budget: int, sample: Callable[[Iterator[PackedBatch], int], Sample]
) -> StageResult:
    """A stage that takes batches of masked LM, by loader processes."""
    with ExitStack() as stack:
        variants = [
            Variant(
                counted(number, "loader process{es}"),
                {"data.num_workers": number},
                partial(sample, _endless(stack, subject, budget, number), number),
            )
            for number in _NUM_WORKERS
        ]
        return subject.measure(name, title, variants)


def _endless(stack: ExitStack, subject: Subject, budget: int, num_workers: int) -> Iterator[PackedBatch]:
    """Batches of one epoch after the other, as a training worker loads them, until the stack closes."""
    settings = PreparationSettings(subject.max_length, SEED, random_crops=True, masking=MaskedLMSection())
    source = Loader(ResidueSource(subject.store, settings), num_workers, DataSection().prefetch)
    batch = BatchSection(tokens=budget, global_tokens=budget)
    batches = stack.enter_context(TrainingSteps(source, subject.some_records(), batch=batch, seed=SEED))
    return (batch for epoch in count() for step in batches.epoch(epoch) for batch in step)


def _load(coming: Iterator[PackedBatch], _: int) -> Sample:
    """Store to packed batches in torch."""
    tokens, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < _LOADING_PIECE_S:
        tokens += next(coming).num_tokens
    return {TOKENS: tokens / (time.perf_counter() - start_s)}


def _pipe(subject: Subject, backbone: PackedBackbone, coming: Iterator[PackedBatch], num_workers: int) -> Sample:
    """Store, loader, model: tokens/s and the share of time that the model waits for data."""
    for _ in range(num_workers * DataSection().prefetch):
        next(coming)  # prepared while other variants had their turn: it would hide waiting
    _forward(backbone, [next(coming).to(subject.device)])
    tokens, waited_s, passed_s = 0, 0.0, 0.0
    while passed_s < _PIPELINE_PIECE_S:
        batch, loaded_s = timed(lambda: next(coming).to(subject.device, non_blocking=True))
        _, computed_s = timed(partial(_forward, backbone, [batch]))
        tokens += batch.num_tokens
        waited_s += loaded_s
        passed_s += loaded_s + computed_s
    return {TOKENS: tokens / passed_s, WAITING: 100 * waited_s / passed_s}
