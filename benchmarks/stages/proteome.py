"""A FASTA file to a file of embeddings on disk: the whole command, beside the scripts that people write.

All contenders load the same weights of ESM-2, read the same FASTA file of real proteins (spread over the lengths,
cropped to 1022 residues, in the file's order) and leave one file of fp32 means with the ids. The stock script is
transformers as documented: fp32 (on CUDA fp16), batches of 16 in file order, padded, ``np.savez``. Tuned by hand:
sorted by length, bf16, the batch size that a search before the timing finds fastest. fair-esm's is its extract script,
at its 4096 tokens a batch. Ours is the job of ``esmeray embed``: store, plan, shards with fsync, Parquet, manifest. The
same proteins through our forward pass alone show what the rest costs. Before anything is timed, all vectors must have a
cosine of 0.999 with the stock script's.

Peak memory is taken in fresh processes, without what the libraries take when they are imported, at equal tokens a
batch: the scripts take 16 proteins, ours as many tokens as those have on average. fair-esm is left out of it, since its
batches can't be set to a number of proteins.
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import dnaio
import numpy as np
import torch
from transformers import EsmForMaskedLM

from benchmarks.harness.models import Embedder, least_cosines, our_embedder, random_network, save_weights
from benchmarks.harness.proteins import every_nth, read_proteins, spread_by_length, write_fasta
from benchmarks.harness.stage import Case, Comparison, Contender, Device, Facts, Setting, Stage
from benchmarks.peers.transformers_embedding import (
    DOCUMENTED_BATCH,
    TransformersEmbedder,
    Tuning,
    documented,
    search_tuning,
)
from benchmarks.programs.processes import peak_of
from esmeray.dataset.embeddings.reader import read_embeddings
from esmeray.dataset.tokens.model_folder import quiet_transformers
from esmeray.inference.embedding.job import run_job
from esmeray.inference.embedding.section import EmbedJobSection

SIZES = {"ESM-2 8M": "esm2_t6_8M", "ESM-2 35M": "esm2_t12_35M"}
PROTEINS: dict[Device, tuple[int, int]] = {"cpu": (240, 80), "cuda": (10_000, 10_000)}
"""Of each size; on the CPU fewer for the larger one, of which the slowest peer takes half a second a protein."""
SEARCH_PROTEINS, SHORT_PROTEINS = 32, 6

OURS, STOCK, TUNED, FORWARD = "esmeray embed", "stock script", "transformers tuned by hand", "esmeray, forward alone"
FAIR_ESM = "fair-esm extract"
RATE, MEMORY = "FASTA to file, {}", "peak memory, {}"


def _cases(setting: Setting) -> Iterator[Case]:
    proteins = read_proteins(setting.fasta)
    sizes = list(zip(SIZES, PROTEINS[setting.device], strict=True))
    for size, number in sizes[: 1 if setting.quick else None]:
        sequences = spread_by_length(proteins.sequences, 8 if setting.quick else number)
        yield from _size_cases(size, setting, sequences, proteins.facts)


def _size_cases(size: str, setting: Setting, sequences: list[str], facts: Facts) -> Iterator[Case]:
    device = setting.device
    folder = setting.folder / SIZES[size]
    # Once on disk: every contender starts from a folder, as its users do.
    model = save_weights(random_network(SIZES[size]), folder)
    files = {"whole": folder / "whole.fasta", "short": folder / "short.fasta"}
    write_fasta(files["whole"], sequences, len(sequences))
    short = every_nth(sequences, SHORT_PROTEINS)
    write_fasta(files["short"], short, len(short))
    setting.note(f"{size}, searching the peer's best batch size")
    searched = every_nth(sequences, SEARCH_PROTEINS)
    tuning = search_tuning(model, setting, searched)
    facts = {
        **facts,
        "proteins embedded": len(sequences),
        "residues embedded": sum(map(len, sequences)),
        "tuned by hand": str(tuning),
    }
    options: dict[str, Any] = {"model": str(model), "device": device, "tuned": asdict(tuning)}
    targets = {name: folder / f"out-{number}" for number, name in enumerate((OURS, STOCK, TUNED, FAIR_ESM))}

    # Warmed up by a short file: a whole one takes the stock script minutes.
    def embed(name: str, length: str = "whole") -> float:
        work(name, fasta=str(files[length]), target=str(targets[name]), **options)
        return len(sequences)

    def check() -> Facts:
        # Of the whole file, since it is what is timed: padding and order can't change a vector unseen.
        for name in targets:
            embed(name)
        scripts = {name: np.load(f"{targets[name]}.npz")["vectors"] for name in (STOCK, TUNED, FAIR_ESM)}
        vectors = {name: torch.from_numpy(values) for name, values in scripts.items()}
        vectors[OURS] = torch.tensor(read_embeddings(targets[OURS])[:])
        return least_cosines("the stock script", vectors.pop(STOCK), vectors)

    forward = our_embedder(model, device, "bf16")
    contenders = [Contender(name, partial(embed, name), short=partial(embed, name, "short")) for name in targets]
    contenders.append(Contender(FORWARD, lambda: float(len(forward(sequences))), short=lambda: len(forward(searched))))
    yield Case(RATE.format(size), "proteins/s", tuple(contenders), rounds=3, check=check, facts=facts)

    lengths = [len(sequence) + 2 for sequence in sequences]  # <cls> and <eos> included
    options["tokens"] = max(round(DOCUMENTED_BATCH * sum(lengths) / len(lengths)), max(lengths))
    options["tuned"] = asdict(Tuning("bf16 weights", DOCUMENTED_BATCH, sort_by_length=True))

    def peak(name: str) -> float:
        paths = {"fasta": str(files["whole"]), "target": str(targets[name])}
        return peak_of(f"{__name__}:work", name=name, **paths, **options).computing_bytes / 1e6

    measured = tuple(Contender(name, partial(peak, name), "value") for name in (OURS, STOCK, TUNED))
    facts = {**facts, "tokens of our batches": options["tokens"]}
    yield Case(MEMORY.format(size), "MB", measured, better="lower", rounds=3, facts=facts)


def work(
    name: str, model: str, fasta: str, device: Device, tuned: dict[str, Any], target: str, tokens: int | None = None
) -> None:
    """One contender's work, from the FASTA file to its file, which is removed first."""
    # Within the timed work, for all contenders alike: a job would find its own folder done.
    shutil.rmtree(target, ignore_errors=True)
    Path(f"{target}.npz").unlink(missing_ok=True)
    if name == OURS:
        how: dict[str, Any] = {"precision": "bf16", "device": device, "tokens": tokens}
        run_job(EmbedJobSection(models=[model], input=[fasta], output=target, **how))
        return
    with dnaio.open(fasta) as reader:
        sequences = {record.id: record.sequence for record in reader}
    embedder: Embedder
    if name == FAIR_ESM:
        from benchmarks.peers.fair_esm_extract import FairEsmExtract  # here: memory is measured without it

        with quiet_transformers():  # of the head, which the folder lacks and means do not need
            network = EsmForMaskedLM.from_pretrained(model)
        embedder = FairEsmExtract(network, device)
    else:
        embedder = TransformersEmbedder(Path(model), device, documented(device) if name == STOCK else Tuning(**tuned))
    np.savez(target, ids=np.array(list(sequences)), vectors=embedder(list(sequences.values())).numpy())


STAGE = Stage(
    name="proteome",
    summary="FASTA to a file of embeddings on disk, beside the scripts that people write and fair-esm's extract",
    cases=_cases,
    comparisons=tuple(
        comparison
        for size, least_tuned in zip(SIZES, (1.7, 1.5), strict=True)
        for comparison in (
            Comparison(RATE.format(size), OURS, STOCK, {"cpu": 8.0}),
            Comparison(RATE.format(size), OURS, TUNED, {"cpu": least_tuned}),
            Comparison(RATE.format(size), OURS, FAIR_ESM, {"cpu": 8.0}),
            Comparison(RATE.format(size), OURS, FORWARD, {"cpu": 0.9}),
            # Lower, and on a GPU at least 40 % lower.
            Comparison(MEMORY.format(size), OURS, STOCK, {"cpu": 1.0, "cuda": 1 / 0.6}),
            Comparison(MEMORY.format(size), OURS, TUNED, {"cpu": 1.0, "cuda": 1 / 0.6}),
        )
    ),
    packages=("transformers", "esm"),
    distributions=("fair-esm", "tokenizers"),
)
