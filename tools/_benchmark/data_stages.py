"""The stages before the model: reading, tokenizing, packing, loading.

In: a :class:`~tools._benchmark.subject.Subject`. Out: samples of each variant. A piece of work takes some hundredths of
a second; small stores are gone through again and again.

Shape legend: N records.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from dataset.batches.loader import TrainingBatches
from dataset.batches.masking import MaskingShares
from dataset.batches.plan import plan_epoch
from dataset.batches.preparation import PreparationSettings, prepare_batch
from dataset.packed_batch import PackedBatch
from dataset.tokens.esm import tokenize_pieces
from tools._benchmark.measuring import Done, StageResult, Variant, measure
from tools._benchmark.subject import SEED, Subject
from train_config.schema import BatchSection, MaskedLMSection

NUM_WORKERS = (0, 1, 2)
TASKS = ("autoencoder", "masked_lm")
READ_RECORDS = 20_000
FIRST_READINGS = 4
CHUNK_RECORDS = 64
"""Sequences that are read, or tokenized, at once: about a batch."""

PACKED_RECORDS = 1_000_000
PACKING_WINDOWS = (BatchSection().packing_window, 4 * BatchSection().packing_window)
LOADING_PIECE_S = 0.15
"""Time of a round, in which many times as much is loaded as waits, prepared ahead, when it begins."""

Chunks = list[NDArray[np.int64]]


def reading(subject: Subject, until_share: float) -> StageResult:
    """Sequences copied out of the store, in its order and at random; and at random for the first time."""
    clock, device, show = subject.clock, subject.device, subject.show
    once = [_first_reading(subject)]
    first, notes = measure(once, clock, until_share, device, show, warm_up=False, most_rounds=FIRST_READINGS)
    some = subject.some_records(READ_RECORDS)
    span = np.arange(some.size, dtype=np.int64)  # neighbours: from the start of the store
    variants = [
        _reading(subject, "in order", _chunks(span)),
        _reading(subject, "at random", _chunks(np.random.default_rng(SEED).permutation(some))),
    ]
    rows, more = measure(variants, clock, until_share, device, show)
    return StageResult("reading", "Reading the store", [*rows, *first], [*notes, *more])


def _first_reading(subject: Subject) -> Variant:
    """Each piece a part of the store that this process has not read: checksums included, page cache as it is."""
    records = len(subject.store)
    size = min(READ_RECORDS, -(-records // FIRST_READINGS))
    starts = range(0, records, max(size, records // FIRST_READINGS))
    random = np.random.default_rng(SEED)
    parts = [random.permutation(np.arange(start, min(start + size, records))) for start in starts]
    coming = cycle(parts[:FIRST_READINGS])
    name = "at random, for the first time"
    return Variant(name, lambda: _read(subject, _chunks(next(coming))), {"order": name})


def _reading(subject: Subject, name: str, chunks: Chunks) -> Variant:
    return Variant(name, lambda: _read(subject, chunks), {"order": name})


def _read(subject: Subject, chunks: Chunks) -> Done:
    records = num_bytes = 0
    for records_N in chunks:
        records += records_N.size
        num_bytes += len(b"".join(_sequences(subject, records_N)))
    return Done({"records/s": records, "MB/s": num_bytes / 1e6})


def _sequences(subject: Subject, records_N: NDArray[np.int64]) -> list[memoryview]:
    """Whole sequences, as views of the mapped file."""
    lengths_N = subject.store.lengths[records_N].astype(np.int64)
    return subject.store.windows(records_N, np.zeros_like(lengths_N), lengths_N)


def _chunks(records_N: NDArray[np.int64]) -> Chunks:
    return np.array_split(records_N, -(-records_N.size // CHUNK_RECORDS))


def tokenizing(subject: Subject, until_share: float) -> StageResult:
    """Residues to ids, and all that is done for a batch: reading, cropping, ids, targets or masks."""
    some = subject.some_records(READ_RECORDS)
    chunks = _chunks(np.random.default_rng(SEED).permutation(some))
    pieces = [_sequences(subject, records_N) for records_N in chunks]

    def tokenized() -> Done:
        return _tokens_done(some.size, sum(tokenize_pieces(piece).size for piece in pieces))

    variants = [Variant("residues to ids", tokenized)]
    section = MaskedLMSection()
    shares = MaskingShares(section.mask_share, section.mask_token_share, section.random_token_share)
    for name, masking in (("a batch, autoencoder", None), ("a batch, masked_lm", shares)):
        settings = PreparationSettings(subject.max_length, SEED, random_crops=True, masking=masking)

        def prepared(settings: PreparationSettings = settings) -> Done:
            batches = (prepare_batch(subject.store, settings, 0, records_N) for records_N in chunks)
            return _tokens_done(some.size, sum(batch.tokens.size for batch in batches))

        variants.append(Variant(name, prepared))
    rows, notes = measure(variants, subject.clock, until_share, subject.device, subject.show)
    return StageResult("tokenizing", "Tokenizing", rows, notes)


def _tokens_done(sequences: int, tokens: int) -> Done:
    return Done({"sequences/s": sequences, "tokens/s": tokens})


def packing(subject: Subject, budgets: list[int], until_share: float) -> StageResult:
    """An epoch planned from the lengths: how fast, and how much of each budget is filled."""
    some = subject.some_records(PACKED_RECORDS)
    tokens_N = subject.tokens_of(some)
    variants = []
    for window in PACKING_WINDOWS:
        for budget in budgets:

            def planned(budget: int = budget, window: int = window) -> Done:
                plan = plan_epoch(tokens_N, budget, window, SEED, 0)
                return Done({"records/s": some.size}, {"% filled": 100 * plan.fill_share})

            settings: dict[str, int | str] = {"batch.tokens": budget, "batch.packing_window": window}
            variants.append(Variant(f"{budget:,} tokens, window {window:,}", planned, settings))
    rows, notes = measure(variants, subject.clock, until_share, subject.device, subject.show, most_rounds=5)
    if some.size < len(subject.store):
        notes.append(f"{some.size:,} of the records, at random")
    return StageResult("packing", "Packing (planning an epoch)", rows, notes)


def loading(subject: Subject, budget: int, until_share: float) -> StageResult:
    """Store to packed batches in torch, by loader processes, for both tasks."""
    with ExitStack() as open_batches:
        variants = []
        for task in TASKS:
            for num_workers in NUM_WORKERS:
                batches = open_batches.enter_context(training_batches(subject, budget, task, num_workers))
                coming = endless(batches)

                def loaded(coming: Iterator[PackedBatch] = coming) -> Done:
                    return _load(coming)

                settings: dict[str, int | str] = {"data.num_workers": num_workers, "task": task}
                variants.append(Variant(f"{task}, {processes(num_workers)}", loaded, settings))
        rows, notes = measure(variants, subject.clock, until_share, subject.device, subject.show)
    return StageResult("loading", f"Loading batches of {budget:,} tokens", rows, notes)


def _load(coming: Iterator[PackedBatch]) -> Done:
    sequences = tokens = 0
    end_s = time.perf_counter() + LOADING_PIECE_S
    while time.perf_counter() < end_s:
        batch = next(coming)
        sequences += batch.num_sequences
        tokens += batch.num_tokens
    return Done({"sequences/s": sequences, "tokens/s": tokens})


def training_batches(subject: Subject, budget: int, task: str, num_workers: int) -> TrainingBatches:
    """As a training worker opens them."""
    return TrainingBatches(
        subject.store.path,
        subject.some_records(),
        data=subject.data_section(num_workers),
        batch=BatchSection(tokens=budget, global_tokens=budget),
        masked_lm=MaskedLMSection() if task == "masked_lm" else None,
        seed=SEED,
    )


def endless(batches: TrainingBatches) -> Iterator[PackedBatch]:
    """Batches of one epoch after the other."""
    epoch = 0
    while True:
        for step in batches.epoch(epoch):
            yield from step
        epoch += 1


def processes(num_workers: int) -> str:
    """How many loader processes, in words."""
    return f"{num_workers} loader process{'' if num_workers == 1 else 'es'}"
