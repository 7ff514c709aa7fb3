"""Smith-Waterman by the kernel in Triton, held to the path in torch on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.gpu.bench import WARM_UPS, Bench, Row
from model.kernels.smith_waterman import SmithWaterman

LETTERS, FIRST, EXTEND = 24, 12, 1
CUDASW = 5710
"""GCUPS of CUDASW++4.0 on an H100, as published."""


def alignment(bench: Bench) -> Iterator[Row]:
    """GCUPS of a query with many sequences of the lengths of UniRef90, random letters; exact int32 scores."""
    random = np.random.default_rng(0)
    count, queries = (500_000, (100, 300, 1000, 5000)) if bench.device == "cuda" else (40, (20,))
    lengths = np.clip(random.lognormal(5.6, 0.7, count), 10, 8000 if bench.device == "cuda" else 60).astype(int)
    sequences = np.split(random.integers(LETTERS, size=lengths.sum(), dtype=np.uint8), lengths.cumsum()[:-1])
    half = random.integers(-4, 3, (LETTERS, LETTERS))
    matrix = np.triu(half, 1) + np.triu(half, 1).T + np.diag(random.integers(4, 12, LETTERS))
    align = SmithWaterman(sequences, matrix, FIRST, EXTEND, bench.device)
    for length in queries:
        query = sequences[int(lengths.argmax())][:length]
        checked = random.choice(count, 20, replace=False)
        few = SmithWaterman([sequences[place] for place in checked], matrix, FIRST, EXTEND, "cpu")
        same = np.array_equal(few(query), align(query)[checked])
        times_s = []
        for _ in range(WARM_UPS):
            start_s = time.perf_counter()
            align(query)  # waits for the scores
            times_s.append(time.perf_counter() - start_s)
        gcups = 1e-9 * len(query) * align.residues / float(np.median(times_s))
        yield {
            "query": len(query),
            "GCUPS": gcups,
            "of CUDASW++4.0": gcups / CUDASW,
            "verdict": "ok" if same else "WRONG",
        }
    if bench.device == "cuda":
        yield {"query": None, "peak GB": torch.cuda.max_memory_allocated() / 1e9}
