"""Smith-Waterman by the kernel in Triton, held to the path in torch on the CPU."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from esmeray.benchmarks.gpu.bench import Bench
from esmeray.benchmarks.harness.stage import Row
from esmeray.common.timing import median_seconds
from esmeray.model.kernels.smith_waterman import SmithWaterman

LETTERS, FIRST, EXTEND = 24, 12, 1
CUDASW = 5710
"""GCUPS of CUDASW++4.0 on an H100, as published."""


def alignment(bench: Bench) -> Iterator[Row]:
    """GCUPS of a query with many sequences of the lengths of UniRef90, random letters; exact int32 scores."""
    random = np.random.default_rng(0)
    count, queries = (500_000, (100, 300, 1000, 5000)) if bench.device == "cuda" else (40, (20,))
    lengths = np.clip(random.lognormal(5.6, 0.7, count), 10, 8000 if bench.device == "cuda" else 60).astype(int)
    sequences = np.split(random.integers(LETTERS, size=lengths.sum(), dtype=np.uint8), lengths.cumsum()[:-1])
    # Symmetric, with a positive diagonal, as substitution matrices are: else alignments would end at once.
    half = random.integers(-4, 3, (LETTERS, LETTERS))
    matrix = np.triu(half, 1) + np.triu(half, 1).T + np.diag(random.integers(4, 12, LETTERS))
    align = SmithWaterman(sequences, matrix, FIRST, EXTEND, bench.device)
    for length in queries:
        # Beginnings of the longest, so that all queries are like the same proteins.
        query = sequences[int(lengths.argmax())][:length]
        checked = random.choice(count, 20, replace=False)
        # Some of the sequences: the CPU would take minutes for all of them.
        few = SmithWaterman([sequences[index] for index in checked], matrix, FIRST, EXTEND, "cpu")
        same = np.array_equal(few(query), align(query)[checked])
        gcups = 1e-9 * len(query) * align.residues / median_seconds(partial(align, query))
        speed = {"GCUPS": gcups, "of CUDASW++4.0": gcups / CUDASW}
        yield {"query": len(query), **speed, "verdict": "ok" if same else "WRONG"}
    if bench.device == "cuda":
        yield {"query": None, "peak GB": torch.cuda.max_memory_allocated() / 1e9}
