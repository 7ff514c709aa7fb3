"""Embedding as its users start it: FASTA to files, a proteome as large as the human one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from itertools import islice, pairwise
from pathlib import Path

from benchmarks.gpu.bench import SIZES, Bench, Row
from common.timing import timed
from dataset.store.sample import sample_records
from train_config.schema import IngestSection

PROTEINS = 20_400
"""Of the human proteome (UniProt UP000005640); pairs of the sample's joined have its 11 million residues."""

KEPT = ("proteins", "residues", "residues_per_s", "computing_s", "flops_utilization", "memory_peak_bytes")
"""Of the job's report."""


def proteome(bench: Bench) -> Iterator[Row]:
    """20,400 proteins, 11 million residues, FASTA to files by one command, bf16; nothing where pyarrow is missing."""
    if find_spec("pyarrow") is None:
        yield {"verdict": "left out: pyarrow is not installed"}
        return
    from inference.embedding.job import run_job
    from inference.embedding.request import JobRequest
    from inference.embedding.settings import EmbeddingSettings

    name = bench.arguments.sizes[min(1, len(bench.arguments.sizes) - 1)]
    with tempfile.TemporaryDirectory() as folder:
        fasta = Path(folder, "proteome.fasta")
        count = PROTEINS if name in SIZES else 40
        with fasta.open("w", encoding="ascii") as file:
            for number, (first, second) in enumerate(islice(pairwise(sample_records(count + 1, 200, seed=0)), count)):
                file.write(f">protein{number}\n{first[1]}{second[1]}\n")
        for outputs in (["mean"], ["mean", "residues"]):
            job = JobRequest(
                [SIZES.get(name, "esm2_t6_8M")],
                [str(fasta)],
                Path(folder, "-".join(outputs)),
                EmbeddingSettings(outputs=outputs, batch_tokens=bench.arguments.tokens, dtype="fp16", precision="bf16"),
                IngestSection(),
                device=bench.device,
                random_weights=True,
            )
            (report,), seconds = timed(partial(run_job, job))
            kept = {key: report[key] for key in KEPT}
            yield {"model": name, "outputs": " ".join(outputs), "seconds": seconds, **kept}
