"""What the card can do at most; a training step by kernel, and how near each kind comes to what bounds it."""

from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache

from esmeray.benchmarks.gpu.bench import WARM_UPS, Bench
from esmeray.benchmarks.gpu.training import TrainingRun
from esmeray.benchmarks.harness.stage import Row
from esmeray.common.timing import median_seconds
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.model.cost.flops import training_flops_per_token

Kernels: TypeAlias = Counter[tuple[str, str]]
"""A value by kind and name of the kernel."""

NAMES_OF_KERNELS = {
    "fused": ("triton_poi", "triton_red", "triton_per", "triton_mix"),
    "attention": ("flash", "fmha", "attention"),
    "product": ("gemm", "nvjet", "cutlass", "matmul", "::mm", "addmm", "linear", "triton_tem"),
    "optimizer": ("adam", "multi_tensor"),
    "copy": ("memcpy", "memset", "copy"),
}
"""What the name of a kernel holds, by kind; the first that fits counts."""

OPTIMIZER_BYTES = 28
"""Of a parameter's update: weight and two moments read and written, gradient read, fp32."""


def ceilings(bench: Bench) -> Iterator[Row]:
    """The most that the card does: matrix products, those of a layer of 650M among them, and copies."""
    yield {"what": "bf16 matrix product", "TFLOP/s": bench.product_tflops}
    D, rows = (1280, bench.tokens // 2) if bench.device == "cuda" else (64, 256)
    # Query, key and value in one product gain what the second of these has over the first.
    for what, width, count in (("three products of D by D", D, 3), ("one product of D by 3 D", 3 * D, 1)):
        yield {"what": f"{what}, {rows} tokens", "TFLOP/s": _tflops(bench, rows, D, width, count)}
    yield {"what": f"D by 4 D, {rows} tokens", "TFLOP/s": _tflops(bench, rows, D, 4 * D)}
    yield {"what": f"4 D by D, {rows} tokens", "TFLOP/s": _tflops(bench, rows, 4 * D, D)}
    yield {"what": "copy, bytes read and written", "TB/s": bench.copy_tb_per_s}


def _tflops(bench: Bench, rows: int, inner: int, width: int, count: int = 1) -> float:
    """TFLOP/s of so many Linears one after the other."""
    x, weight, bias = (
        torch.randn(*shape, device=bench.device, dtype=torch.bfloat16)
        for shape in ((rows, inner), (width, inner), (width,))
    )
    repeats = range(20 * count)
    taken_s = median_seconds(lambda: [torch.nn.functional.linear(x, weight, bias) for _ in repeats])
    return 2e-12 * rows * inner * width * len(repeats) / taken_s


def profile(bench: Bench) -> Iterator[Row]:
    """A training step of the second size by kernel, eager and compiled: share of the time, and of its kind's limit.

    The limit of products and attention is a large product's FLOP/s, that of the others the bytes of a copy.
    """
    name = bench.sizes[min(1, len(bench.sizes) - 1)]
    step, context = bench.work(bench.tokens // 2)
    batch = step.batches[0]
    for layers in ("eager", "compiled"):
        model = bench.masked_lm(name, torch.bfloat16)
        run, fused_bytes = TrainingRun(model), 0
        if layers == "compiled":
            model.backbone.compile_layers(bench.backend)
            fused_bytes = _bytes_of_a_layer(run, batch)
            moved = f"{fused_bytes / batch.num_tokens:,.0f} B a token and layer"
            yield {"layers": layers, "kind": "fused", "kernel": moved}
        for _ in range(WARM_UPS):
            run.step(batch)
        spent, calls = _recorded(bench, run, batch)
        products = 1e-12 * batch.num_tokens * training_flops_per_token(model, 0.0)
        attention = 1e-12 * batch.num_tokens * training_flops_per_token(model, context) - products
        least_s = {
            "product": products / bench.product_tflops,
            "attention": attention / bench.product_tflops,
            "fused": 1e-12 * fused_bytes * model.backbone.num_layers / bench.copy_tb_per_s,
            "optimizer": 1e-12 * OPTIMIZER_BYTES * sum(p.numel() for p in model.parameters()) / bench.copy_tb_per_s,
        }
        yield from ({"layers": layers, **row} for row in _rows(spent, calls, least_s))


def _bytes_of_a_layer(run: TrainingRun, batch: PackedBatch) -> int:
    """What inductor's kernels of one layer read and write, forward and backward, as it counts them when it compiles."""
    metrics.reset()
    torch._logging.set_logs(inductor_metrics=True)
    with fresh_cache():
        run.step(batch)
    torch._logging.set_logs()
    return sum(4 * elements for node, elements in metrics.nodes_num_elem if not node.is_extern())


def _rows(spent: Kernels, calls: Kernels, least_s: dict[str, float]) -> Iterator[Row]:
    """Kinds, then single kernels, the longest first; ``least_s``: seconds that a kind takes at its limit."""
    total, by_kind, count = sum(spent.values()), Counter[str](), Counter[str]()
    for (kind, kernel), microseconds in spent.items():
        by_kind[kind] += microseconds
        count[kind] += calls[kind, kernel]
    for kind, own in by_kind.most_common():
        limit = least_s[kind] / (own * 1e-6) if least_s.get(kind) else None
        row: Row = {"kind": kind, "kernel": "all of them", "share": own / total, "ms": own / 1e3, "calls": count[kind]}
        yield row | {"of its limit": limit}
    for (kind, kernel), own in spent.most_common(20):
        row = {"kind": kind, "kernel": kernel, "share": own / total, "ms": own / 1e3}
        yield row | {"calls": calls[kind, kernel]}


def _recorded(bench: Bench, run: TrainingRun, batch: PackedBatch) -> tuple[Kernels, Kernels]:
    """Microseconds and calls of a step by kind and kernel."""
    on_gpu = bench.device == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as recorded:
        run.step(batch)
        if on_gpu:
            torch.cuda.synchronize()
    spent, calls = Kernels(), Kernels()
    for event in recorded.key_averages():
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kinds = (kind for kind, words in NAMES_OF_KERNELS.items() if any(w in event.key.lower() for w in words))
        if own:
            key = next(kinds, "other"), event.key[:80]
            spent[key] += own
            calls[key] += event.count
    return spent, calls
