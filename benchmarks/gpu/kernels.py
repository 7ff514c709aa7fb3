"""Pooling by its kernel in Triton, held to its path in torch."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

import numpy as np
import torch

from benchmarks.gpu.bench import LONGEST, Bench
from benchmarks.harness.stage import Row
from common.timing import median_seconds
from model.kernels.pooling import Pooling, pool, pool_in_torch


def kernels(bench: Bench) -> Iterator[Row]:
    """bf16 features pooled to fp32, of the lengths of UniRef90."""
    random, channels = np.random.default_rng(0), 1280 if bench.device == "cuda" else 32
    counts_N = torch.from_numpy(np.clip(random.lognormal(5.6, 0.7, 10_000), 10, LONGEST).astype(np.int64))
    counts_N = counts_N[counts_N.cumsum(0) <= bench.arguments.tokens].to(bench.device)
    firsts_N = counts_N.cumsum(0) - counts_N
    both_TD = torch.randn(2, int(counts_N.sum()), channels, device=bench.device).bfloat16()
    for how in get_args(Pooling):
        arguments = how, both_TD[0], firsts_N, counts_N, both_TD[1] if how == "attention" else None, torch.float32
        kernel, in_torch = partial(pool, *arguments), partial(pool_in_torch, *arguments)
        same = torch.allclose(kernel(), in_torch(), rtol=0, atol=1e-5)
        moved = both_TD.nbytes // (1 if how == "attention" else 2) + kernel().nbytes
        yield {**_row(bench, f"pooling, {how}", moved, kernel, same), "torch, ms": 1e3 * _seconds(in_torch)}


def _row(bench: Bench, what: str, moved: int, work: Callable[[], object], same: bool) -> Row:
    taken_s = _seconds(work)
    speed = {"ms": 1e3 * taken_s, "TB/s": 1e-12 * moved / taken_s, "a copy's TB/s": bench.copy_tb_per_s}
    return {"what": what, **speed, "verdict": "ok" if same else "WRONG"}


def _seconds(work: Callable[[], object], calls: int = 20) -> float:
    return median_seconds(lambda: [work() for _ in range(calls)]) / calls
