"""The stages from the store to the model's output.

In: a :class:`~tools._benchmark.subject.Subject`. Out: samples of each variant. A piece of work takes some hundredths of
a second; small stores are gone through again and again. Every budget of inference gets the same sequences, so that a
round compares equal work. Waiting is measured from outside: after each batch the device is waited for, and the time
until the next one is on it counts, which is more than a loop without that synchronisation would wait.

Shape legend: N records.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count, cycle

import numpy as np
import torch
from numpy.typing import NDArray

from common.text import counted
from common.timing import timed, wait_for_device
from dataset.batches.loader import ResidueSource
from dataset.batches.plan import plan_epoch
from dataset.batches.preparation import PreparationSettings, prepare_batch
from dataset.batches.steps import TrainingSteps
from dataset.packed_batch import PackedBatch
from dataset.tokens.esm import packed_from_tokens, tokenize_pieces
from model.backbones.base import PackedBackbone
from model.backbones.loading import build_backbone
from model.tasks.embedding import optimize_for_inference
from model.tasks.pooling import mean_over_residues
from tools._benchmark.subject import LEAST_ROUNDS, SEED, Done, Row, StageResult, Subject, Variant
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE, BatchSection, DataSection, MaskedLMSection

TOKENS, WAITING, FILLED = "tokens/s", "% waiting for data", "% filled"
_SHARES = {"reading": 0.1, "tokenizing": 0.15, "packing": 0.22, "inference": 0.58, "loading": 0.7, "pipeline": 1.0}
"""When each stage is to end, as a share of the time there is."""

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FORWARD_BUDGETS = {"cpu": (1_024, 32_768), "cuda": (4_096, 131_072)}
_PACKING_BUDGETS = (1_024, 32_768)
_PACKING_WINDOWS = (BatchSection().packing_window, 4 * BatchSection().packing_window)
_NUM_WORKERS = (0, 1, 2)
_READ_RECORDS, _FIRST_READINGS = 20_000, 4
_CHUNK_RECORDS = 64
"""Sequences that are read, or tokenized, at once: about a batch."""
_PACKED_RECORDS = 1_000_000
_LOADING_PIECE_S = 0.15
"""Time of a round, in which many times as much is loaded as waits, prepared ahead, when it begins."""
_PIPELINE_PIECE_S = 0.4
_TRIALS = 3

Chunks = list[NDArray[np.int64]]


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
    yield loading(subject, reference_budget(forward.rows))
    best = fastest(forward.rows)
    precision, budget = str(best.settings["precision"]), int(best.settings["batch.tokens"])
    yield pipeline(subject, models[precision], precision, budget)


def fastest(rows: list[Row]) -> Row:
    """The row of most tokens/s."""
    return max(rows, key=lambda row: row.median(TOKENS))


def reference_budget(rows: list[Row]) -> int:
    """The default of batch.tokens, or the budget nearest to it that was measured."""
    default = BatchSection().tokens
    return min((int(row.settings["batch.tokens"]) for row in rows), key=lambda budget: abs(budget - default))


def reading(subject: Subject) -> StageResult:
    """Sequences copied out of the store, in its order and at random; and at random for the first time."""
    once = "at random, for the first time"
    parts = cycle(_unread_parts(len(subject.store)))
    variant = Variant(once, lambda: _read(subject, _chunks(next(parts))), {"order": once})
    first, notes = subject.measure([variant], _SHARES["reading"], warm_up=False, most_rounds=_FIRST_READINGS)
    some = subject.some_records(_READ_RECORDS)
    orders = {"in order": np.arange(some.size), "at random": np.random.default_rng(SEED).permutation(some)}
    variants = [
        Variant(name, partial(_read, subject, _chunks(records_N)), {"order": name})
        for name, records_N in orders.items()
    ]
    rows, more = subject.measure(variants, _SHARES["reading"])
    return StageResult("reading", "Reading the store", [*rows, *first], [*notes, *more])


def _unread_parts(records: int) -> Chunks:
    """Parts of the store that this process has not read, each in random order."""
    size = min(_READ_RECORDS, -(-records // _FIRST_READINGS))
    starts = range(0, records, max(size, records // _FIRST_READINGS))
    random = np.random.default_rng(SEED)
    return [random.permutation(np.arange(at, min(at + size, records))) for at in starts][:_FIRST_READINGS]


def _chunks(records_N: NDArray[np.int64]) -> Chunks:
    return np.array_split(records_N, -(-records_N.size // _CHUNK_RECORDS))


def _read(subject: Subject, chunks: Chunks) -> Done:
    size = sum(len(b"".join(_sequences(subject, records_N))) for records_N in chunks)
    return Done({"records/s": sum(records_N.size for records_N in chunks), "MB/s": size / 1e6})


def _sequences(subject: Subject, records_N: NDArray[np.int64]) -> list[memoryview]:
    """Whole sequences, as views of the store's memory."""
    lengths_N = subject.store.lengths[records_N].astype(np.int64)
    return subject.store.windows(records_N, np.zeros_like(lengths_N), lengths_N)


def tokenizing(subject: Subject) -> StageResult:
    """Residues to ids, and all that is done for a batch: reading, cropping, ids, targets or masks."""
    some = subject.some_records(_READ_RECORDS)
    chunks = _chunks(np.random.default_rng(SEED).permutation(some))
    pieces = [_sequences(subject, records_N) for records_N in chunks]

    def tokenized() -> Done:
        return Done({"sequences/s": some.size, TOKENS: sum(tokenize_pieces(piece).size for piece in pieces)})

    def prepared(masking: MaskedLMSection | None) -> Done:
        settings = PreparationSettings(subject.max_length, SEED, random_crops=True, masking=masking)
        batches = (prepare_batch(subject.store, settings, 0, records_N) for records_N in chunks)
        return Done({"sequences/s": some.size, TOKENS: sum(batch.tokens.size for batch in batches)})

    variants = [
        Variant("residues to ids", tokenized, {}),
        Variant("a batch, autoencoder", lambda: prepared(None), {}),
        Variant("a batch, masked_lm", lambda: prepared(MaskedLMSection()), {}),
    ]
    rows, notes = subject.measure(variants, _SHARES["tokenizing"])
    return StageResult("tokenizing", "Tokenizing", rows, notes)


def packing(subject: Subject) -> StageResult:
    """An epoch planned from the lengths: how fast, and how much of each budget is filled."""
    some = subject.some_records(_PACKED_RECORDS)
    tokens_N = subject.tokens_of(some)

    def planned(budget: int, window: int) -> Done:
        plan = plan_epoch(tokens_N, budget, window, SEED, 0)
        return Done({"records/s": some.size}, {FILLED: 100 * plan.fill_share})

    variants = [
        Variant(
            f"{budget:,} tokens, window {window:,}",
            partial(planned, budget, window),
            {"batch.tokens": budget, "batch.packing_window": window},
        )
        for window in _PACKING_WINDOWS
        for budget in subject.budgets(*_PACKING_BUDGETS)
    ]
    rows, notes = subject.measure(variants, _SHARES["packing"], most_rounds=5)
    if some.size < len(subject.store):
        notes.append(f"{some.size:,} of the records, at random")
    return StageResult("packing", "Packing (planning an epoch)", rows, notes)


def inference(subject: Subject, models: dict[str, PackedBackbone]) -> StageResult:
    """The forward pass and the mean of each sequence, by budget and precision."""
    budgets, notes = _affordable_budgets(subject, models)
    records = subject.plan(subject.some_records(), budgets[-1]).batch_records(0)
    batches = {}
    for budget in budgets:
        plan = subject.plan(records, budget)
        batches[budget] = [_batch(subject, plan.batch_records(number)) for number in range(plan.num_batches)]
    variants = [
        Variant(
            f"{precision}, {budget:,} tokens",
            partial(_forward, backbone, batches[budget]),
            {"batch.tokens": budget, "precision": precision},
        )
        for precision, backbone in models.items()
        for budget in budgets
    ]
    rows, more = subject.measure(variants, _SHARES["inference"])
    title = f"Inference with {subject.backbone.source} on {subject.device.type}"
    return StageResult("inference", title, rows, [*notes, *more])


def _affordable_budgets(subject: Subject, models: dict[str, PackedBackbone]) -> tuple[list[int], list[str]]:
    """As many budgets as can be measured in the time, the two smallest always; and a note on the others."""
    wanted = subject.budgets(*_FORWARD_BUDGETS[subject.device.type])
    batch = _batch(subject, subject.plan(subject.some_records(), wanted[0]).batch_records(0))
    seconds_per_token = 0.0
    for precision, backbone in models.items():
        subject.show(f"{precision}: trying the smallest budget")
        trials_s = [timed(partial(_forward, backbone, [batch]))[1] for _ in range(_TRIALS)]
        seconds_per_token += min(trials_s) / batch.num_tokens  # the first compiles and allocates
    round_s = subject.left_s(_SHARES["inference"]) / (LEAST_ROUNDS + 1)
    chosen = [b for number, b in enumerate(wanted, 1) if number <= 2 or number * b * seconds_per_token <= round_s]
    left_out = ", ".join(f"{budget:,}" for budget in wanted[len(chosen) :])
    return chosen, [f"no time for {left_out} tokens: --seconds gives more"] if left_out else []


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
    return Done({TOKENS: tokens, "sequences/s": sum(batch.num_sequences for batch in batches)})


_MASKING = {"autoencoder": None, "masked_lm": MaskedLMSection()}
"""Masking of each task whose batches are loaded."""


def loading(subject: Subject, budget: int) -> StageResult:
    """Store to packed batches in torch, by loader processes, for both tasks."""
    with ExitStack() as stack:
        variants = [
            Variant(
                f"{task}, {_processes(number)}",
                partial(_load, _endless(stack, subject, budget, task, number)),
                {"data.num_workers": number, "task": task},
            )
            for task in _MASKING
            for number in _NUM_WORKERS
        ]
        rows, notes = subject.measure(variants, _SHARES["loading"])
    return StageResult("loading", f"Loading batches of {budget:,} tokens", rows, notes)


def _processes(number: int) -> str:
    return counted(number, "loader process{es}")


def _endless(stack: ExitStack, subject: Subject, budget: int, task: str, num_workers: int) -> Iterator[PackedBatch]:
    """Batches of one epoch after the other, as a training worker loads them, until the stack closes."""
    settings = PreparationSettings(subject.max_length, SEED, random_crops=True, masking=_MASKING[task])
    source = ResidueSource(subject.store, settings, num_workers, DataSection().prefetch)
    batch = BatchSection(tokens=budget, global_tokens=budget)
    batches = stack.enter_context(TrainingSteps(source, subject.some_records(), batch=batch, seed=SEED))
    return (batch for epoch in count() for step in batches.epoch(epoch) for batch in step)


def _load(coming: Iterator[PackedBatch]) -> Done:
    sequences = tokens = 0
    end_s = time.perf_counter() + _LOADING_PIECE_S
    while time.perf_counter() < end_s:
        batch = next(coming)
        sequences += batch.num_sequences
        tokens += batch.num_tokens
    return Done({"sequences/s": sequences, TOKENS: tokens})


def pipeline(subject: Subject, backbone: PackedBackbone, precision: str, budget: int) -> StageResult:
    """Store, loader, model: tokens/s and the share of time that the model waits for data, by loader processes."""
    with ExitStack() as stack:
        variants = [
            Variant(
                _processes(number),
                partial(_pipe, subject, backbone, _endless(stack, subject, budget, "masked_lm", number), number),
                {"data.num_workers": number},
            )
            for number in _NUM_WORKERS
        ]
        rows, notes = subject.measure(variants, _SHARES["pipeline"])
    title = f"Whole pipeline: store, loader, forward ({precision}, {budget:,} tokens)"
    return StageResult("pipeline", title, rows, notes)


def _pipe(subject: Subject, backbone: PackedBackbone, coming: Iterator[PackedBatch], num_workers: int) -> Done:
    for _ in range(num_workers * DataSection().prefetch):
        next(coming)  # prepared while other variants had their turn: it would hide waiting
    _forward(backbone, [next(coming).to(subject.device)])
    wait_for_device()
    tokens, waited_s = 0, 0.0
    start_s = asked_s = time.perf_counter()
    while not tokens or asked_s - start_s < _PIPELINE_PIECE_S:
        batch = next(coming).to(subject.device, non_blocking=True)
        wait_for_device()
        waited_s += time.perf_counter() - asked_s
        _forward(backbone, [batch])
        wait_for_device()
        tokens += batch.num_tokens
        asked_s = time.perf_counter()
    passed_s = asked_s - start_s
    return Done({}, {TOKENS: tokens / passed_s, WAITING: 100 * waited_s / passed_s})
