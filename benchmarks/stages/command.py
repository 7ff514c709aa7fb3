"""A FASTA file to a file of embeddings, start-up included: ``esmeray embed`` compared with a tuned transformers script.

Each run is a whole process, from the start of Python to the end of the process. Both get the same folder of random
weights and the same FASTA file of real proteins (spread over the lengths, cropped to 1022 residues), and write one file
of fp32 means. Without bf16 instructions both compute in fp32, otherwise in bf16. The script sorts by length and has the
batch size that a search before the timing finds fastest. Start-up is the time of the same process for one protein.

Nothing is reported unless all vectors of the two have a cosine of 0.999.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness.comparison import compare
from benchmarks.harness.inputs import (
    random_network,
    read_proteins,
    require_agreement,
    save_weights,
    spread_by_length,
    write_fasta,
)
from benchmarks.harness.stage import REPOSITORY, Row, Setting, Stage
from benchmarks.peers.transformers_embedding import search_tuning
from benchmarks.programs.processes import call
from esmeray.common.processor import default_precision
from esmeray.common.timing import timed
from esmeray.dataset.embeddings.reader import read_embeddings

OURS, TUNED = "esmeray embed", "transformers tuned by hand"
SIZES = {"8M": ("esm2_t6_8M", 480, 2.0), "35M": ("esm2_t12_35M", 160, 1.6), "150M": ("esm2_t30_150M", 48, 1.4)}
"""Size, proteins on a CPU, and floor of the ratio."""
SEARCH_PROTEINS = 12


def _rows(setting: Setting) -> Iterator[Row]:
    proteins = read_proteins(setting)
    setting.facts["precision"] = default_precision(setting.device == "cuda")
    for size in ("8M",) if setting.quick else SIZES:
        name, number, floor = SIZES[size]
        folder = setting.folder / name
        model = save_weights(random_network(name), folder)
        sequences = spread_by_length(proteins, 8 if setting.quick else number)
        setting.note(f"{size}: searching the peer's best batch size")
        tuning = search_tuning(model, setting, spread_by_length(sequences, SEARCH_PROTEINS))
        setting.facts.update({f"{size}, proteins": len(sequences), f"{size}, tuned by hand": str(tuning)})
        script = {"folder": str(model), "device": setting.device, "tuned": asdict(tuning), "target": f"{folder}.npz"}
        for case, texts in ((f"start-up, ESM-2 {size}", sequences[:1]), (f"whole process, ESM-2 {size}", sequences)):
            fasta = str(write_fasta(folder / f"{len(texts)}.fasta", texts))
            runs = {OURS: partial(_command, model, fasta), TUNED: partial(_script, fasta, script)}
            yield from compare(setting, case, "s", runs, {TUNED: floor if texts is sequences else None}, "lower")
        vectors = {TUNED: np.load(script["target"])["vectors"], OURS: read_embeddings(f"{model}-out")[:]}
        require_agreement(TUNED, vectors)


def _command(model: Path, fasta: str) -> float:
    """Return the seconds of our command."""
    target = f"{model}-out"
    shutil.rmtree(target, ignore_errors=True)  # otherwise the job would find its output done
    options = ["--embed.models", str(model), "--embed.input", fasta, "--embed.output", target]
    command = [sys.executable, "-m", "esmeray.tools", "embed", "run", *options]
    return timed(partial(subprocess.run, command, cwd=REPOSITORY, check=True, capture_output=True))[1]


def _script(fasta: str, arguments: dict[str, object]) -> float:
    """Return the seconds of the script."""
    return timed(partial(call, "benchmarks.peers.transformers_embedding:embed_file", fasta=fasta, **arguments))[1]


STAGE = Stage(
    name="command",
    summary="FASTA to a file of embeddings by whole processes, start-up included, compared with a tuned script",
    rows=_rows,
    packages=("transformers",),
    distributions=("tokenizers",),
)
