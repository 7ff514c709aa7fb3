"""A FASTA file to a file of embeddings on disk: the whole command, compared with the scripts that people write.

All contenders load the same weights of ESM-2, read the same FASTA file of real proteins (spread over the lengths,
cropped to 1022 residues, in the file's order) and write one file of fp32 means with the ids. The stock script is
transformers as documented: fp32 (on CUDA fp16), batches of 16 in file order, padded, ``np.savez``. Tuned by hand:
sorted by length, bf16, the batch size that a search before the timing finds fastest. Without bf16 instructions all
compute in fp32. Ours is the job of ``esmeray embed``: store, plan, shards with fsync, Parquet, manifest. Our forward
pass alone shows what the rest costs.

Rows of whole processes include the start of Python and its imports, for the command and the script tuned by hand. For a
single protein that is start-up. In the other rows each fresh process embeds a few proteins to warm up, then all of
them, which is timed and gives the peak memory without the libraries. Nothing is reported for them unless all vectors
have a cosine of 0.999 with the stock script's.
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import dnaio
import numpy as np

from benchmarks.harness.comparison import compare, compare_runs
from benchmarks.harness.inputs import read_proteins, require_agreement, spread_by_length, write_fasta
from benchmarks.harness.stage import Device, Row, Setting, Stage
from benchmarks.peers.transformers_embedding import Tuning, embed_file, search_tuning, write_model
from benchmarks.programs.processes import call, peak_memory
from esmeray.common.processor import default_precision
from esmeray.common.timing import timed
from esmeray.dataset.embeddings.reader import read_embeddings
from esmeray.inference.embedding.job import run_job
from esmeray.inference.embedding.section import EmbedJobSection
from esmeray.inference.models.opening import open_model
from esmeray.train_config.section import Precision

OURS, STOCK, TUNED, FORWARD = "esmeray embed", "stock script", "transformers tuned by hand", "esmeray, forward alone"
SIZES = {"8M": "esm2_t6_8M", "35M": "esm2_t12_35M", "150M": "esm2_t30_150M"}
FLOORS = {"8M": {STOCK: 8.0, TUNED: 1.7, FORWARD: 0.9}, "35M": {STOCK: 8.0, TUNED: 1.5, FORWARD: 0.9}, "150M": {}}
PROCESS_FLOORS = {"8M": 2.0, "35M": 1.6, "150M": 1.4}
PROTEINS: dict[Device, dict[str, int]] = {
    "cpu": {"8M": 240, "35M": 80, "150M": 24},
    "cuda": dict.fromkeys(SIZES, 10_000),
}
"""On a CPU fewer for the larger ones: the slowest peer takes half a second per protein of 35M."""
SEARCH_PROTEINS, WARM_UP_PROTEINS = 16, 6


def _rows(setting: Setting) -> Iterator[Row]:
    proteins = read_proteins(setting)
    sizes = ("8M",) if setting.quick else SIZES
    inputs = {size: _inputs(size, setting, proteins) for size in sizes}
    for size in sizes:
        yield from _process_rows(size, setting, **inputs[size])
    for size in sizes:
        yield from _size_rows(size, setting, **inputs[size])


def _inputs(size: str, setting: Setting, proteins: list[str]) -> dict[str, Any]:
    """Return a folder of weights, FASTA files, the precision and the peer's tuning, on disk as its users have them."""
    folder = setting.folder / SIZES[size]
    number = 8 if setting.quick else PROTEINS[setting.device][size]
    # Whole processes embed twice as many proteins, so that start-up counts less.
    counts = {"many": 2 * number, "whole": number, "short": WARM_UP_PROTEINS, "one": 1}
    model = write_model(folder, SIZES[size])
    files = {
        name: str(write_fasta(folder / f"{name}.fasta", spread_by_length(proteins, count)))
        for name, count in counts.items()
    }
    setting.note(f"{size}: searching the peer's best batch size")
    tuning = search_tuning(model, setting, spread_by_length(proteins, SEARCH_PROTEINS))
    precision = default_precision(setting.device == "cuda")
    setting.facts.update({f"{size}, proteins": number, f"{size}, tuned by hand": str(tuning), "precision": precision})
    return {"model": model, "device": setting.device, "precision": precision, "tuned": asdict(tuning), **files}


def _process_rows(size: str, setting: Setting, many: str, one: str, **inputs: Any) -> Iterator[Row]:
    """Compare whole processes, from the start of Python to the end of the process: many proteins, and one."""
    for case, fasta in (("whole process", many), ("whole process, one protein", one)):
        target = f"{fasta}-{{}}"
        script = {key: inputs[key] for key in ("model", "device", "tuned")}
        options = {"models": inputs["model"], "input": fasta, "output": target.format("ours"), "device": setting.device}
        argv = [word for key, value in options.items() for word in (f"--embed.{key}", value)]
        runs = {
            OURS: partial(_seconds, "esmeray.tools.__main__:main", argv=["embed", "run", "--overwrite", *argv]),
            TUNED: partial(
                _seconds, f"{embed_file.__module__}:embed_file", fasta=fasta, target=target.format("theirs"), **script
            ),
        }
        floors = {TUNED: PROCESS_FLOORS[size]} if fasta == many else {}
        yield from compare(setting, f"{case}, ESM-2 {size}", "s", runs, floors, "lower")


def _seconds(function: str, **arguments: Any) -> float:
    return timed(partial(call, function, **arguments))[1]


def _size_rows(size: str, setting: Setting, many: str, one: str, **inputs: Any) -> Iterator[Row]:
    """Compare the work after a warm-up, and its peak memory."""
    targets = {
        name: str(setting.folder / f"{size}-out-{number}") for number, name in enumerate((OURS, STOCK, TUNED, FORWARD))
    }
    run = partial(call, f"{__name__}:measured", **inputs)
    runs = {name: partial(run, name=name, target=target) for name, target in targets.items()}
    rows = [*compare_runs(setting, f"FASTA to file, ESM-2 {size}", "proteins/s", runs, floors=FLOORS[size])]
    vectors = {name: np.load(f"{targets[name]}.npz")["vectors"] for name in (STOCK, TUNED)}
    vectors[OURS] = read_embeddings(targets[OURS])[:]
    require_agreement(STOCK, vectors)
    yield from rows


def measured(name: str, whole: str, short: str, **options: Any) -> tuple[float, float]:
    """Return proteins per second of a contender in this process, and its peak memory in MB."""
    embed(name, short, **options)
    peak_bytes = peak_memory()
    proteins, seconds = timed(partial(embed, name, whole, **options))
    return proteins / seconds, peak_bytes() / 1e6


def embed(
    name: str, fasta: str, model: str, device: Device, precision: Precision, tuned: dict[str, Any], target: str
) -> int:
    """Do one contender's work, from the FASTA file to its file; return the number of proteins."""
    with dnaio.open(fasta) as reader:
        sequences = [record.sequence for record in reader]
    if name == OURS:
        shutil.rmtree(target, ignore_errors=True)  # otherwise the job would find its output done
        run_job(EmbedJobSection(models=[model], input=[fasta], output=target, precision=precision, device=device))
    elif name == FORWARD:
        open_model(model, precision, device, heads=[]).embed(sequences)
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
