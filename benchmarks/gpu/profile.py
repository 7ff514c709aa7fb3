"""A training step by kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch

from benchmarks.gpu.bench import WARM_UPS, Bench, Row
from benchmarks.gpu.training import TrainingRun

NAMES_OF_KERNELS = {
    "product": ("gemm", "nvjet", "cutlass", "matmul", "::mm", "addmm", "linear"),
    "attention": ("flash", "fmha", "attention"),
    "optimizer": ("adam", "multi_tensor"),
    "copy": ("memcpy", "memset", "copy"),
    "fused": ("triton",),
}
"""What the name of a kernel holds, by kind; the first that fits counts."""


def profile(bench: Bench) -> Iterator[Row]:
    """A training step of the second size by kernel: the share of each in the time."""
    name = bench.arguments.sizes[min(1, len(bench.arguments.sizes) - 1)]
    batch = bench.work(bench.arguments.tokens // 2)[0].batches[0]
    model = bench.masked_lm(name, torch.bfloat16)
    model.backbone.compile_layers(bench.arguments.backend)
    run = TrainingRun(model)
    for _ in range(WARM_UPS):
        run.step(batch)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.device == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        run.step(batch)
        if bench.device == "cuda":
            torch.cuda.synchronize()
    spent: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for event in recorded.key_averages():
        own = event.self_device_time_total if bench.device == "cuda" else event.self_cpu_time_total
        kinds = (kind for kind, words in NAMES_OF_KERNELS.items() if any(w in event.key.lower() for w in words))
        if own:
            spent[next(kinds, "other"), event.key[:80]] += [own, event.count]
    total = sum(values[0] for values in spent.values())
    by_kind: defaultdict[str, float] = defaultdict(float)
    for (kind, _), values in spent.items():
        by_kind[kind] += values[0]
    for kind, own in sorted(by_kind.items(), key=lambda item: -item[1]):
        yield {"kind": kind, "kernel": "all of them", "share": own / total, "ms": own / 1e3}
    for (kind, kernel), values in sorted(spent.items(), key=lambda item: -item[1][0])[:20]:
        yield {"kind": kind, "kernel": kernel, "share": values[0] / total, "ms": values[0] / 1e3, "calls": values[1]}
