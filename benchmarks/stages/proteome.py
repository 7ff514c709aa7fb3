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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.models import our_embedder, random_network, save_weights
from benchmarks.harness.proteins import read_proteins, spread_by_length
from benchmarks.harness.stage import Case, Comparison, Contender, Device, Facts, Setting, Stage, WrongWorkError
from benchmarks.peers.transformers_embedding import SEARCHED_BATCHES, search_tuning
from benchmarks.programs.processes import MemoryMeter, peak_of
from dataset.embeddings.reader import open_embeddings

PROTEINS: dict[Device, int] = {"cpu": 240, "cuda": 10_000}
QUICK_PROTEINS, QUICK_RESIDUES = 6, 60
SEARCH_PROTEINS, SHORT_PROTEINS = 32, 6
LEAST_COSINE = 0.999

OURS, STOCK, TUNED, FORWARD = "esmeray embed", "stock script", "transformers tuned by hand", "esmeray, forward alone"
RATE, MEMORY = "FASTA to file, ESM-2 8M", "peak memory, ESM-2 8M"


def _cases(setting: Setting) -> Iterator[Case]:
    device, folder = setting.device, setting.folder
    proteins = read_proteins(setting.fasta)
    sequences = spread_by_length(proteins.sequences, PROTEINS[device])
    if setting.quick:
        sequences = [sequence[:QUICK_RESIDUES] for sequence in sequences[:QUICK_PROTEINS]]
    texts = {"whole": sequences, "short": sequences[:: -(-len(sequences) // SHORT_PROTEINS)]}
    files = {name: folder / f"{name}.fasta" for name in texts}
    for name, named_texts in texts.items():
        files[name].write_text("".join(f">protein{n}\n{sequence}\n" for n, sequence in enumerate(named_texts)))
    model = save_weights(random_network("esm2_t6_8M"), folder / "esm2_t6_8M")
    setting.note("searching the peer's best batch size")
    searched = sequences[:: max(1, len(sequences) // SEARCH_PROTEINS)]
    tuning = search_tuning(model, device, searched, SEARCHED_BATCHES[device][: 1 if setting.quick else None])
    settings = {"precision": tuning.precision, "batch_size": tuning.batch_size}
    facts: Facts = {
        **proteins.facts,
        "proteins embedded": len(sequences),
        "residues embedded": sum(map(len, sequences)),
        "tuned by hand": str(tuning),
    }
    options: dict[str, Any] = {"model": str(model), "device": device, "tuned": settings}
    targets = {name: folder / f"out-{number}" for number, name in enumerate((OURS, STOCK, TUNED))}

    def embed(name: str, length: str = "whole") -> float:
        work(name, **options, fasta=str(files[length]), target=str(targets[name]))
        return len(sequences)

    forward = our_embedder(model, device, torch.bfloat16)
    contenders = [Contender(name, partial(embed, name), short=partial(embed, name, "short")) for name in targets]
    contenders.append(Contender(FORWARD, lambda: float(len(forward(sequences))), short=lambda: len(forward(searched))))
    yield Case(RATE, "proteins/s", tuple(contenders), rounds=3, check=lambda: _check(embed, targets), facts=facts)

    def peak(name: str) -> float:
        arguments = {"name": name, **options, "fasta": str(files["whole"]), "target": str(targets[name])}
        return peak_of("benchmarks.stages.proteome:work_measured", arguments).computing_bytes / 1e6

    measured = tuple(Contender(name, partial(peak, name), "value") for name in targets)
    yield Case(MEMORY, "MB", measured, better="lower", rounds=1, facts=facts)


def work(name: str, model: str, fasta: str, device: Device, tuned: dict[str, Any], target: str) -> None:
    """One contender's work, from the FASTA file to its file, which is removed first."""
    shutil.rmtree(target, ignore_errors=True)
    Path(f"{target}.npz").unlink(missing_ok=True)
    if name == OURS:
        from inference.embedding.job import run_job
        from inference.embedding.request import JobRequest
        from train_config.embed_schema import EmbedSection
        from train_config.schema import IngestSection

        settings = EmbedSection(precision="bf16")
        run_job(JobRequest([model], [fasta], Path(target), settings, IngestSection(), device))
        return
    from benchmarks.peers.transformers_embedding import TransformersEmbedder, Tuning, documented

    lines = Path(fasta).read_text(encoding="ascii").split("\n")
    ids, sequences = [line[1:] for line in lines[0:-1:2]], lines[1::2]
    tuning = documented("cpu") if name == STOCK else Tuning(**tuned, sort_by_length=True)
    vectors = TransformersEmbedder(Path(model), device, tuning)(sequences)
    np.savez(target, ids=np.array(ids), vectors=vectors.numpy())


def work_measured(meter: MemoryMeter, name: str, **options: Any) -> None:
    """The same in a process of its own, whose libraries are loaded before."""
    import inference.embedding.job  # noqa: F401

    meter.libraries_loaded()
    meter.work_begins()
    work(name, **options)


def _check(embed: Callable[[str], float], targets: dict[str, Path]) -> Facts:
    """Hold all files to the stock script's."""
    vectors: dict[str, np.ndarray] = {}
    for name, target in targets.items():
        embed(name)
        vectors[name] = open_embeddings(target)[:] if name == OURS else np.load(f"{target}.npz")["vectors"]
    facts: Facts = {}
    for name in (OURS, TUNED):
        cosine = float(_cosines(vectors[name], vectors[STOCK]).min())
        if not cosine >= LEAST_COSINE:
            raise WrongWorkError(f"the vectors of {name} have a cosine of {cosine:.5f} to the stock script's")
        facts[f"least cosine to the stock script, {name}"] = round(cosine, 6)
    return facts


def _cosines(a_ND: np.ndarray, b_ND: np.ndarray) -> np.ndarray:
    return (a_ND * b_ND).sum(1) / (np.linalg.norm(a_ND, axis=1) * np.linalg.norm(b_ND, axis=1))


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
