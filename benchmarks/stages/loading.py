"""Store to packed batches, on one core in one process, beside the usual TAPE-style loader.

Ours runs an epoch of :class:`~esmeray.dataset.batches.loader.ResidueSource`: it plans from the lengths, crops,
tokenizes, packs and makes targets. The peer is a DataLoader over an LMDB of pickles that tokenizes each batch of 16
with EsmTokenizer and pads it; for masked LM, DataCollatorForLanguageModeling masks it. Both shuffle, crop at 1022
residues, take the same real proteins and one thread, and have no loader processes, so that the rate is per core. Work
is counted in sequences. The store holds the proteins several times over, since ours would be through with them in
milliseconds.

Tokenization alone is measured beside EsmTokenizer, over the same strings. Ours packs them (ids, boundaries and
positions as tensors, what a model takes); the peer returns lists of ids, without padding and tensors, which is the
least that it can be asked for.

The last case asks what a training loop waits for: ESM-2 8M trains on the batches of one loader process; after each step
the device is waited for, and then the time until the next batch is on it is counted as waiting.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.harness.proteins import MAX_RESIDUES, read_proteins, spread_by_length, write_store
from benchmarks.harness.stage import (
    Case,
    Comparison,
    Contender,
    Device,
    Facts,
    Reference,
    Setting,
    Stage,
    WrongWorkError,
)
from benchmarks.peers.transformers_embedding import MAX_TOKENS, esm_tokenizer
from esmeray.common.timing import timed
from esmeray.dataset.batches.loader import ResidueSource
from esmeray.dataset.batches.preparation import PreparationSettings
from esmeray.dataset.batches.steps import TrainingSteps
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.dataset.section import BatchSection, DataSection
from esmeray.dataset.store.reader import Store
from esmeray.dataset.tokens.esm import pack_sequences
from esmeray.model.section import BackboneSection
from esmeray.tasks.masked_lm.model import MaskedLM
from esmeray.tasks.masked_lm.section import MaskedLMSection
from esmeray.tasks.section import ModelSection

RECORDS, QUICK_RECORDS = 100_000, 5_000
PEER_SEQUENCES, QUICK_PEER_SEQUENCES = 2_000, 200
PEER_BATCH = 16
MASK_SHARE = 0.15
STEPS, QUICK_STEPS = 20, 2
SETTLING_STEPS = 3
"""Steps before any is counted: the loader's process starts, and the allocator learns its sizes."""
TOKENS, QUICK_TOKENS = {"cpu": 2_048, "cuda": 32_768}, 1_024

PASSES = 50
"""Ours tokenizes all sequences so often in one measurement: once takes milliseconds."""

OURS = "esmeray ResidueSource"
PACKING, TOKENIZER = "esmeray pack_sequences", "transformers EsmTokenizer"
PEER = "EsmTokenizer, DataLoader, LMDB of pickles"
GOAL = Reference("300,000 sequences/s a core", 300_000)
AUTOENCODER, MASKED_LM = "every residue a target", "masked LM"
IDS = "text to token ids"
WAITING, WAIT = "training waits for data", "share of a step, ESM-2 8M"
ONE_PERCENT = Reference("1 % of a step", 1.0)


def _cases(setting: Setting) -> Iterator[Case]:
    proteins = read_proteins(setting.fasta)
    records = QUICK_RECORDS if setting.quick else RECORDS
    setting.note(f"converting {records:,} records")
    store = write_store(setting.folder, proteins.sequences, records)
    sequences = spread_by_length(proteins.sequences, QUICK_PEER_SEQUENCES if setting.quick else PEER_SEQUENCES)
    facts: Facts = {
        **proteins.facts,
        "records of the store": records,
        "sequences of the peer": len(sequences),
    }
    # Undone for the last case, whose training takes every core.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # rates are per core
    try:
        yield _tokenizing(setting.folder, sequences, facts)
        for name in (AUTOENCODER, MASKED_LM):
            yield _throughput(name, store, setting.folder / name.replace(" ", "-"), sequences, facts)
    finally:
        torch.set_num_threads(threads)
    setting.note("building ESM-2 8M")
    yield _waiting(store, setting)


def _tokenizing(folder: Path, sequences: Sequence[str], facts: Facts) -> Case:
    tokenizer = esm_tokenizer(folder)

    def ours() -> float:
        for _ in range(PASSES):
            pack_sequences(sequences)
        return PASSES * len(sequences)

    def peer() -> float:
        return len(tokenizer(sequences)["input_ids"])

    def check() -> Facts:
        # Equal ids, and not only as many: a wrong vocabulary would be as fast.
        theirs = [token for ids in tokenizer(sequences)["input_ids"] for token in ids]
        if pack_sequences(sequences).tokens.tolist() != theirs:
            raise WrongWorkError("the token ids differ from EsmTokenizer's")
        return {"token ids checked to be equal": len(theirs)}

    contenders = Contender(PACKING, ours), Contender(TOKENIZER, peer)
    return Case(IDS, "sequences/s", contenders, check=check, facts=dict(facts))


def _throughput(name: str, store: Path, folder: Path, sequences: Sequence[str], facts: Facts) -> Case:
    batches = _batches(store, name == MASKED_LM)
    epochs = count()
    # Of fewer sequences than the store has: a pass of the peer takes seconds all the same.
    loader = _peer_loader(folder / "peer", sequences, masked=name == MASKED_LM)

    def ours() -> float:
        # Another epoch each time: it is planned and shuffled anew, as in training.
        return sum(batch.num_sequences for step in batches.epoch(next(epochs)) for batch in step)

    def peer() -> float:
        return sum(len(batch["input_ids"]) for batch in loader)

    contenders = Contender(OURS, ours), Contender(PEER, peer)
    return Case(name, "sequences/s", contenders, check=partial(_check, folder / "checked", sequences), facts=facts)


def _waiting(store: Path, setting: Setting) -> Case:
    tokens = QUICK_TOKENS if setting.quick else TOKENS[setting.device]
    steps = QUICK_STEPS if setting.quick else STEPS
    batches = _batches(store, True, tokens, num_workers=1)
    train = _training_step(setting.device)  # the smallest model: its steps are the shortest to load for

    def waiting_percent() -> float:
        shares = []
        with batches:
            coming = (batch for epoch in count() for step in batches.epoch(epoch) for batch in step)
            for _ in range(SETTLING_STEPS + steps):
                batch, waited_s = timed(lambda: next(coming).to(setting.device, non_blocking=True))
                # Waits for the device at its end: what follows is then waiting for data and no kernel's rest.
                _, trained_s = timed(partial(train, batch))
                shares.append(waited_s / (waited_s + trained_s))
        return 100 * sum(shares[SETTLING_STEPS:]) / steps

    facts: Facts = {"tokens of a batch": tokens, "steps": steps, "loader processes": 1}
    ways = (Contender(WAIT, waiting_percent, kind="value"),)
    return Case(WAITING, "% of a step", ways, better="lower", rounds=3, facts=facts)


def _training_step(device: Device) -> Callable[[PackedBatch], None]:
    """A step of masked LM with ESM-2 8M, in bf16 with AdamW."""
    section = ModelSection(task="masked_lm", backbone=BackboneSection(source="esm2_t6_8M"))
    model = MaskedLM.build(section, seed=0).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def train(batch: PackedBatch) -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            output = model(batch)
        (output.loss_sum / output.num_targets).backward()
        optimizer.step()

    return train


def _batches(store: Path, masked: bool, tokens: int = 8192, num_workers: int = 0) -> TrainingSteps:
    opened = Store(store)
    masking = MaskedLMSection(mask_share=MASK_SHARE) if masked else None
    settings = PreparationSettings(MAX_RESIDUES, seed=0, random_crops=True, masking=masking)
    # One batch a step: accumulation is no matter of loading.
    batch = BatchSection(tokens=tokens, global_tokens=tokens)
    return TrainingSteps(
        ResidueSource(opened, settings),
        np.arange(len(opened)),
        batch=batch,
        seed=0,
        num_workers=num_workers,
        prefetch=DataSection().prefetch,
    )


def _peer_loader(folder: Path, sequences: Sequence[str], *, masked: bool, shuffle: bool = True) -> Any:
    from transformers import DataCollatorForLanguageModeling

    from benchmarks.peers.pickle_lmdb import PickleDataset, padded_batches, write_pickles

    folder.mkdir(parents=True)
    write_pickles(folder / "pickles", ((str(number), s) for number, s in enumerate(sequences)))
    tokenizer = esm_tokenizer(folder)
    collate = padded_batches(tokenizer, MAX_TOKENS)
    # For masked LM the collator pads: it masks what it is given unpadded, as in its documentation.
    if masked:
        collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASK_SHARE)

        def collate(items: list[dict[str, Any]]) -> Any:
            return collator([tokenizer(i["primary"], truncation=True, max_length=MAX_TOKENS) for i in items])

    dataset: Any = PickleDataset(folder / "pickles")
    return DataLoader(dataset, PEER_BATCH, shuffle=shuffle, num_workers=0, collate_fn=collate)


def _check(folder: Path, sequences: Sequence[str]) -> Facts:
    """Both give the same token ids for the same records."""
    store = write_store(folder / "ours", sequences)
    ours: dict[int, torch.Tensor] = {}
    for batch in chain.from_iterable(_batches(store, False).epoch(0)):
        # Packed batches are in an order of their own: by record, as the peer's are without shuffling.
        tokens = batch.tokens.split(batch.cu_seqlens.diff().tolist())
        ours |= dict(zip(batch.records.tolist(), tokens, strict=True))
    theirs = [
        ids[mask.bool()].tolist()
        for batch in _peer_loader(folder / "peer", sequences, masked=False, shuffle=False)
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    if [ours[record].tolist() for record in range(len(sequences))] != theirs:
        raise WrongWorkError("the batches hold other token ids than EsmTokenizer's")
    return {"records checked to have equal token ids": len(theirs)}


STAGE = Stage(
    name="loading",
    summary="store to packed batches on one core, beside a padding DataLoader over an LMDB of pickles",
    cases=_cases,
    comparisons=(
        Comparison(IDS, PACKING, TOKENIZER, {"cpu": 300.0, "cuda": 300.0}),
        Comparison(AUTOENCODER, OURS, PEER, {"cpu": 150.0, "cuda": 150.0}),
        Comparison(AUTOENCODER, OURS, GOAL, {"cpu": 1.0, "cuda": 1.0}),
        Comparison(MASKED_LM, OURS, PEER),
        Comparison(WAITING, WAIT, ONE_PERCENT, {"cuda": 1.0}),
    ),
    packages=("transformers",),
    distributions=("lmdb", "tokenizers"),
)
