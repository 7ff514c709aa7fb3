"""A FASTA file to a file of embeddings on disk: the whole command, beside the scripts that people write.

All contenders load the same weights of ESM-2 8M, read the same FASTA file of real proteins (spread over the lengths,
cropped to 1022 residues, in the file's order) and leave one file of fp32 means with the ids. The stock script is
transformers as documented: fp32, batches of 16 in file order, padded, ``np.savez``. Tuned by hand: sorted by length,
bf16, the batch size that a search before the timing finds fastest. Ours is the job of ``esmeray embed``: store,
plan, shards with fsync, Parquet, manifest. The same proteins through our forward pass alone show what the rest costs.
Before anything is timed, all vectors must have a cosine of 0.999 with the stock script's. Peak memory is taken in fresh
processes, without what the libraries take when they are imported.
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

from esmeray.benchmarks.harness.models import least_cosines, our_embedder, random_network, save_weights
from esmeray.benchmarks.harness.proteins import every_nth, few_short, read_proteins, spread_by_length, write_fasta
from esmeray.benchmarks.harness.stage import Case, Comparison, Contender, Device, Facts, Setting, Stage
from esmeray.benchmarks.peers.transformers_embedding import (
    TransformersEmbedder,
    Tuning,
    documented,
    search_tuning,
)
from esmeray.benchmarks.programs.processes import peak_of
from esmeray.dataset.embeddings.reader import read_embeddings
from esmeray.inference.embedding.job import run_job
from esmeray.inference.embedding.section import EmbedJobSection

PROTEINS: dict[Device, int] = {"cpu": 240, "cuda": 10_000}
SEARCH_PROTEINS, SHORT_PROTEINS = 32, 6

OURS, STOCK, TUNED, FORWARD = "esmeray embed", "stock script", "transformers tuned by hand", "esmeray, forward alone"
RATE, MEMORY = "FASTA to file, ESM-2 8M", "peak memory, ESM-2 8M"


def _cases(setting: Setting) -> Iterator[Case]:
    device = setting.device
    folder = setting.folder
    proteins = read_proteins(setting.fasta)
    sequences = few_short(setting, spread_by_length(proteins.sequences, PROTEINS[device]))
    files = {"whole": folder / "whole.fasta", "short": folder / "short.fasta"}
    write_fasta(files["whole"], sequences, len(sequences))
    short = every_nth(sequences, SHORT_PROTEINS)
    write_fasta(files["short"], short, len(short))
    # Once on disk: every contender starts from a folder, as its users do.
    model = save_weights(random_network("esm2_t6_8M"), folder / "esm2_t6_8M")
    setting.note("searching the peer's best batch size")
    searched = every_nth(sequences, SEARCH_PROTEINS)
    tuning = search_tuning(model, setting, searched)
    facts: Facts = {
        **proteins.facts,
        "proteins embedded": len(sequences),
        "residues embedded": sum(map(len, sequences)),
        "tuned by hand": str(tuning),
    }
    options: dict[str, Any] = {"model": str(model), "device": device, "tuned": asdict(tuning)}
    targets = {name: folder / f"out-{number}" for number, name in enumerate((OURS, STOCK, TUNED))}

    # Warmed up by a short file: a whole one takes the stock script minutes.
    def embed(name: str, length: str = "whole") -> float:
        work(name, fasta=str(files[length]), target=str(targets[name]), **options)
        return len(sequences)

    def check() -> Facts:
        # Of the whole file, since it is what is timed: padding and order can't change a vector unseen.
        for name in targets:
            embed(name)
        stock, tuned = (torch.from_numpy(np.load(f"{targets[name]}.npz")["vectors"]) for name in (STOCK, TUNED))
        ours = torch.tensor(read_embeddings(targets[OURS])[:])
        return least_cosines("the stock script", stock, {OURS: ours, TUNED: tuned})

    forward = our_embedder(model, device, "bf16")
    contenders = [Contender(name, partial(embed, name), short=partial(embed, name, "short")) for name in targets]
    contenders.append(Contender(FORWARD, lambda: float(len(forward(sequences))), short=lambda: len(forward(searched))))
    yield Case(RATE, "proteins/s", tuple(contenders), rounds=3, check=check, facts=facts)

    def peak(name: str) -> float:
        paths = {"fasta": str(files["whole"]), "target": str(targets[name])}
        return peak_of(f"{__name__}:work", name=name, **paths, **options).computing_bytes / 1e6

    measured = tuple(Contender(name, partial(peak, name), "value") for name in targets)
    yield Case(MEMORY, "MB", measured, better="lower", rounds=1, facts=facts)


def work(name: str, model: str, fasta: str, device: Device, tuned: dict[str, Any], target: str) -> None:
    """One contender's work, from the FASTA file to its file, which is removed first."""
    # Within the timed work, for all contenders alike: a job would find its own folder done.
    shutil.rmtree(target, ignore_errors=True)
    Path(f"{target}.npz").unlink(missing_ok=True)
    if name == OURS:
        run_job(EmbedJobSection(models=[model], input=[fasta], output=target, precision="bf16", device=device))
        return
    with dnaio.open(fasta) as reader:
        sequences = {record.id: record.sequence for record in reader}
    embedder = TransformersEmbedder(Path(model), device, documented("cpu") if name == STOCK else Tuning(**tuned))
    np.savez(target, ids=np.array(list(sequences)), vectors=embedder(list(sequences.values())).numpy())


STAGE = Stage(
    name="proteome",
    summary="FASTA to a file of embeddings on disk, beside the scripts that people write",
    cases=_cases,
    comparisons=(
        Comparison(RATE, OURS, STOCK, {"cpu": 8.0}),
        Comparison(RATE, OURS, TUNED, {"cpu": 1.7}),
        Comparison(RATE, OURS, FORWARD, {"cpu": 0.9}),
        Comparison(MEMORY, OURS, STOCK, {"cpu": 1.0}),
        Comparison(MEMORY, OURS, TUNED, {"cpu": 1.0}),
    ),
    packages=("transformers",),
)
