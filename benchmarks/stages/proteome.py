"""A FASTA file to a file of embeddings on disk: the whole command, compared with the scripts that people write.

All contenders load the same weights of ESM-2, read the same FASTA file of real proteins (spread over the lengths,
cropped to 1022 residues, in the file's order) and write one file of fp32 means with the ids. The stock script is
transformers as documented: fp32 (on CUDA fp16), batches of 16 in file order, padded, ``np.savez``. Tuned by hand:
sorted by length, bf16, the batch size that a search before the timing finds fastest. Ours is the job of
``esmeray embed``: store, plan, shards with fsync, Parquet, manifest. Our forward pass alone shows what the rest costs.

Each run is a fresh process: it embeds a few proteins to warm up, then all of them, which is timed and gives the peak
memory without the libraries. Nothing is reported unless all vectors have a cosine of 0.999 with the stock script's.
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import dnaio
import numpy as np

from benchmarks.harness.comparison import compare_runs
from benchmarks.harness.inputs import (
    our_embedder,
    random_network,
    read_proteins,
    require_agreement,
    save_weights,
    spread_by_length,
    write_fasta,
)
from benchmarks.harness.stage import Device, Row, Setting, Stage
from benchmarks.peers.transformers_embedding import Tuning, embed_file, search_tuning
from benchmarks.programs.processes import MemoryMeter, call
from esmeray.common.timing import timed
from esmeray.dataset.embeddings.reader import read_embeddings
from esmeray.inference.embedding.job import run_job
from esmeray.inference.embedding.section import EmbedJobSection

OURS, STOCK, TUNED, FORWARD = "esmeray embed", "stock script", "transformers tuned by hand", "esmeray, forward alone"
SIZES = {"8M": "esm2_t6_8M", "35M": "esm2_t12_35M"}
FLOORS = {"8M": {STOCK: 8.0, TUNED: 1.7, FORWARD: 0.9}, "35M": {STOCK: 8.0, TUNED: 1.5, FORWARD: 0.9}}
PROTEINS: dict[Device, dict[str, int]] = {"cpu": {"8M": 240, "35M": 80}, "cuda": {"8M": 10_000, "35M": 10_000}}
"""On a CPU fewer for the larger one, which takes the slowest peer half a second per protein."""
SEARCH_PROTEINS, WARM_UP_PROTEINS = 32, 6


def _rows(setting: Setting) -> Iterator[Row]:
    proteins = read_proteins(setting)
    for size in ("8M",) if setting.quick else SIZES:
        number = 8 if setting.quick else PROTEINS[setting.device][size]
        yield from _size_rows(size, setting, spread_by_length(proteins, number))


def _size_rows(size: str, setting: Setting, sequences: list[str]) -> Iterator[Row]:
    folder = setting.folder / SIZES[size]
    # On disk: every contender starts from a folder, as its users do.
    model = save_weights(random_network(SIZES[size]), folder)
    whole = write_fasta(folder / "whole.fasta", sequences)
    short = write_fasta(folder / "short.fasta", spread_by_length(sequences, WARM_UP_PROTEINS))
    setting.note(f"{size}: searching the peer's best batch size")
    tuning = search_tuning(model, setting, spread_by_length(sequences, SEARCH_PROTEINS))
    setting.facts.update({f"{size}, proteins": len(sequences), f"{size}, tuned by hand": str(tuning)})
    files = {"model": str(model), "whole": str(whole), "short": str(short)}
    options = {"device": setting.device, "tuned": asdict(tuning)}
    targets = {name: str(folder / f"out-{number}") for number, name in enumerate((OURS, STOCK, TUNED, FORWARD))}
    run = partial(call, f"{__name__}:measured", **files, **options)
    runs = {name: partial(run, name=name, target=target) for name, target in targets.items()}
    rows = [*compare_runs(setting, f"FASTA to file, ESM-2 {size}", "proteins/s", runs, floors=FLOORS[size])]
    vectors = {name: np.load(f"{targets[name]}.npz")["vectors"] for name in (STOCK, TUNED)}
    vectors[OURS] = read_embeddings(targets[OURS])[:]
    require_agreement(STOCK, vectors)
    yield from rows


def measured(name: str, whole: str, short: str, **options: Any) -> tuple[float, float]:
    """Return proteins per second of a contender in this process, and its peak memory in MB."""
    embed(name, short, **options)
    meter = MemoryMeter()
    proteins, seconds = timed(partial(embed, name, whole, **options))
    return proteins / seconds, meter.peak_bytes() / 1e6


def embed(name: str, fasta: str, model: str, device: Device, tuned: dict[str, Any], target: str) -> int:
    """Do one contender's work, from the FASTA file to its file; return the number of proteins."""
    with dnaio.open(fasta) as reader:
        sequences = [record.sequence for record in reader]
    if name == OURS:
        shutil.rmtree(target, ignore_errors=True)  # otherwise the job would find its output done
        run_job(EmbedJobSection(models=[model], input=[fasta], output=target, precision="bf16", device=device))
    elif name == FORWARD:
        our_embedder(Path(model), device, "bf16")(sequences)
    else:
        # On a GPU the documentation advises fp16.
        stock = asdict(Tuning("fp16" if device == "cuda" else "fp32"))
        embed_file(model, device, tuned if name == TUNED else stock, fasta, target)
    return len(sequences)


STAGE = Stage(
    name="proteome",
    summary="FASTA to a file of embeddings on disk, compared with the scripts that people write: speed and peak memory",
    rows=_rows,
    packages=("transformers",),
    distributions=("tokenizers",),
)
