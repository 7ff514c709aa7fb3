"""How cost grows: with sequence length, token budget, model size, loader processes and the size of the store.

There is no peer and no floor here: a curve that bends where it should be straight is what one looks for. Each case is
a curve and each contender a point of it, measured in turns like everything else. Forward passes are ESM-2 with random
weights as inference runs it; a sequence length is measured with sequences that all have it, a budget with real
proteins cropped at 1022. Loader processes prepare masked LM batches of 8,192 tokens.

Memory is that of a fresh process that opens a store, plans an epoch of training and loads 50 batches. Its resident set
counts the pages of the store that are mapped, which the kernel takes back when it needs them; its own memory does
not. Time is taken with the store in the page cache.
The stores are made of the sample generator's records. It makes 15,000 records/s, which would take eleven minutes
for 10 million, so 20,000 are generated and repeated with ids of their own, written as FASTA and converted like
any file; the conversion runs in a process of its own, whose peak is measured too. Stores are removed once measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.proteins import MAX_RESIDUES, read_proteins, write_fasta
from benchmarks.stage import Case, Contender, Device, Facts, Setting, Stage

if TYPE_CHECKING:
    import torch

    from benchmarks.results import Results
    from dataset.batches.loader import TrainingBatches
    from dataset.packed_batch import PackedBatch
    from model.backbones.esm2 import EsmBackbone

LENGTHS = (64, 128, 256, 512, 1_024, 2_048, 4_096)
BUDGETS = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
CUDA_BUDGETS = (*BUDGETS, 65_536, 131_072)
NUM_WORKERS = (0, 1, 2, 4)
RECORDS = (10_000, 100_000, 1_000_000, 10_000_000)
QUICK_LENGTHS, QUICK_BUDGETS, QUICK_NUM_WORKERS, QUICK_RECORDS = (64, 128), (1_024, 2_048), (0, 1), (200, 2_000)
QUICK_SIZE = {"layers": 1, "hidden_size": 32, "heads": 2}
SMALLEST = "esm2_t6_8M"
SIZES: dict[Device, tuple[str, ...]] = {
    "cpu": (SMALLEST, "esm2_t12_35M", "esm2_t30_150M"),
    "cuda": (SMALLEST, "esm2_t12_35M", "esm2_t30_150M", "esm2_t33_650M", "esm2_t36_3B"),
}
PASS_TOKENS: dict[Device, int] = {"cpu": 4_096, "cuda": 131_072}
"""Of a forward pass where the budget is not what is varied."""

SIZE_TOKENS: dict[Device, int] = {"cpu": 2_048, "cuda": 32_768}
LOADED_TOKENS, LOADED_RECORDS = 8_192, 100_000
LOADED_BATCHES, QUICK_LOADED_BATCHES = 500, 4
PROBED_BATCHES, QUICK_PROBED_BATCHES = 50, 4
GENERATED, FAMILIES = 20_000, 400
ROUNDS, FORWARD_ROUNDS, STORE_ROUNDS = 5, 3, 3

BY_LENGTH = "forward by sequence length"
BY_BUDGET = "forward by token budget"
BY_SIZE = "forward by model size"
BY_PROCESSES = "loading by loader processes"
RESIDENT = "resident memory by store size"
OWN = "own memory by store size"
CONVERTING = "memory of converting by store size"
OPENING = "opening time by store size"
PLANNING = "planning time by store size"


def _cases(setting: Setting) -> Iterator[Case]:
    yield from _store_cases(setting)
    yield from _forward_cases(setting)


def _forward_cases(setting: Setting) -> Iterator[Case]:
    import torch

    proteins = read_proteins(setting.fasta)
    sequences = [sequence[:MAX_RESIDUES] for sequence in proteins.sequences]
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        setting.note(f"{name} · building ESM-2 8M")
        backbone = _backbone(SMALLEST, dtype, setting)
        facts: Facts = {**proteins.facts, "model": "toy" if setting.quick else "ESM-2 8M", "precision": name}
        yield _by_length(name, backbone, sequences, setting, facts)
        yield _by_budget(name, backbone, sequences, setting, facts)
        yield _by_size(name, dtype, sequences, setting, {**proteins.facts, "precision": name})


def _by_length(name: str, backbone: EsmBackbone, sequences: list[str], setting: Setting, facts: Facts) -> Case:
    """Every length gets equally many tokens, cut out of the proteins laid end to end."""
    from dataset.tokens.esm import pack_sequences

    text = "".join(sequences)
    total = max(QUICK_LENGTHS) if setting.quick else PASS_TOKENS[setting.device]
    points = []
    for length in QUICK_LENGTHS if setting.quick else LENGTHS:
        residues, number = length - 2, total // length
        repeated = text * -(-number * residues // len(text))
        pieces = [repeated[start : start + residues] for start in range(0, number * residues, residues)]
        points.append(_point(f"{length:,} tokens", backbone, [pack_sequences(pieces).to(setting.device)]))
    facts = {**facts, "tokens of a pass": total}
    return Case(f"{BY_LENGTH}, {name}", "tokens/s", tuple(points), rounds=FORWARD_ROUNDS, facts=facts)


def _by_budget(name: str, backbone: EsmBackbone, sequences: list[str], setting: Setting, facts: Facts) -> Case:
    """Every budget gets the same proteins: as many as fill the largest."""
    budgets = QUICK_BUDGETS if setting.quick else CUDA_BUDGETS if setting.device == "cuda" else BUDGETS
    chosen = _first_tokens(sequences, max(budgets))
    points = [_point(f"{budget:,} tokens", backbone, _batches(chosen, budget, setting.device)) for budget in budgets]
    return Case(f"{BY_BUDGET}, {name}", "tokens/s", tuple(points), rounds=FORWARD_ROUNDS, facts=facts)


def _by_size(name: str, dtype: torch.dtype, sequences: list[str], setting: Setting, facts: Facts) -> Case:
    budget = QUICK_BUDGETS[0] if setting.quick else SIZE_TOKENS[setting.device]
    batch = _batches(_first_tokens(sequences, budget), budget, setting.device)
    points = []
    for size in SIZES[setting.device][: 1 if setting.quick else None]:
        setting.note(f"building {size}")
        backbone = _backbone(size, dtype, setting)
        points.append(_point(f"{size.rpartition('_')[2]} parameters", backbone, batch))
    facts = {**facts, "tokens of a pass": batch[0].num_tokens}
    return Case(f"{BY_SIZE}, {name}", "tokens/s", tuple(points), rounds=FORWARD_ROUNDS, facts=facts)


def _backbone(size: str, dtype: torch.dtype, setting: Setting) -> EsmBackbone:
    from benchmarks.models import SEED
    from model.backbones.esm2 import load_backbone
    from model.tasks.embedding import optimize_for_inference
    from train_config.schema import BackboneSection

    section = BackboneSection.model_validate({"source": size, **(QUICK_SIZE if setting.quick else {})})
    return optimize_for_inference(load_backbone(section, SEED).to(setting.device), dtype)


def _first_tokens(sequences: list[str], tokens: int) -> list[str]:
    """The first sequences that fill so many tokens and don't exceed them; the longest are skipped at the end."""
    chosen, left = [], tokens
    for sequence in sequences:
        if len(sequence) + 2 <= left:
            chosen.append(sequence)
            left -= len(sequence) + 2
    return chosen


def _batches(sequences: list[str], budget: int, device: Device) -> list[PackedBatch]:
    from model.tasks.sequences import pack_in_order

    return [batch.to(device) for batch in pack_in_order(sequences, budget)]


def _point(name: str, backbone: EsmBackbone, batches: list[PackedBatch]) -> Contender:
    return Contender(name, partial(_forward, backbone, batches), short=partial(_forward, backbone, batches[:1]))


def _forward(backbone: EsmBackbone, batches: list[PackedBatch]) -> float:
    import torch

    with torch.inference_mode():
        for batch in batches:
            backbone(batch)
    return sum(batch.num_tokens for batch in batches)


def _store_cases(setting: Setting) -> Iterator[Case]:
    from benchmarks.growth_process import Probes, convert_in_process
    from dataset.store.sample import sample_records

    sizes = QUICK_RECORDS if setting.quick else RECORDS
    generated = min(GENERATED, sizes[-1])
    setting.note(f"generating {generated:,} records")
    sequences = [sequence for _, sequence in sample_records(generated, FAMILIES, seed=0)]
    facts: Facts = {"records from": "sample generator, repeated with ids of their own", "records generated": generated}
    batches = QUICK_PROBED_BATCHES if setting.quick else PROBED_BATCHES
    converting, probes = {}, {}
    for size in sizes:
        setting.note(f"making a store of {size:,} records")
        fasta, store = setting.folder / "records.fasta", setting.folder / f"store-{size}"
        write_fasta(fasta, sequences, size)
        converting[size] = convert_in_process(fasta, store)
        fasta.unlink()
        facts[f"MB on disk, {size:,} records"] = round(sum(file.stat().st_size for file in store.iterdir()) / 1e6, 1)
        probes[size] = Probes(store, batches, setting.folder / "probe.json")
        if size == min(LOADED_RECORDS, sizes[-1]):
            yield from _by_processes(store, setting, {"records of the store": size})
    facts["batches loaded"] = batches
    yield _store_case(CONVERTING, "MB", {size: partial(float, peak) for size, peak in converting.items()}, 1, facts)
    for name, unit in ((RESIDENT, "MB"), (OWN, "MB"), (OPENING, "s"), (PLANNING, "s")):
        points = {size: partial(of_size.value, name) for size, of_size in probes.items()}
        yield _store_case(name, unit, points, STORE_ROUNDS, facts)


def _store_case(name: str, unit: str, points: Mapping[int, Callable[[], float]], rounds: int, facts: Facts) -> Case:
    contenders = [Contender(f"{size:,} records", point, kind="value") for size, point in points.items()]
    return Case(name, unit, tuple(contenders), better="lower", rounds=rounds, facts=facts)


def _by_processes(store: Path, setting: Setting, facts: Facts) -> Iterator[Case]:
    import numpy as np

    from dataset.batches.loader import TrainingBatches
    from dataset.store.reader import Store
    from train_config.schema import BatchSection, DataSection, MaskedLMSection

    number = QUICK_LOADED_BATCHES if setting.quick else LOADED_BATCHES
    with ExitStack() as open_batches:
        points = []
        for num_workers in QUICK_NUM_WORKERS if setting.quick else NUM_WORKERS:
            batches = TrainingBatches(
                store,
                np.arange(len(Store(store))),
                data=DataSection(num_workers=num_workers),
                batch=BatchSection(tokens=LOADED_TOKENS, global_tokens=LOADED_TOKENS),
                masked_lm=MaskedLMSection(),
                seed=0,
            )
            coming = _endless(open_batches.enter_context(batches))
            points.append(Contender(f"{num_workers} processes", partial(_take, coming, number)))
        facts = {**facts, "tokens of a batch": LOADED_TOKENS, "batches of a round": number}
        yield Case(BY_PROCESSES, "batches/s", tuple(points), rounds=ROUNDS, facts=facts)


def _endless(batches: TrainingBatches) -> Iterator[PackedBatch]:
    for epoch in count():
        for step in batches.epoch(epoch):
            yield from step


def _take(coming: Iterator[PackedBatch], number: int) -> float:
    for _ in islice(coming, number):
        pass
    return number


def _files(results: Results) -> dict[str, bytes]:
    from benchmarks.growth_plot import png, points_json

    return {"growth.json": points_json(results), "growth.png": png(results)}


STAGE = Stage(
    name="growth",
    summary="how cost grows with length, budget, model, loader processes and records, up to 10 million",
    cases=_cases,
    comparisons=(),
    files=_files,
)
