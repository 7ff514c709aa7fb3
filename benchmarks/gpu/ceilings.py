"""What the card can do at most."""

from collections.abc import Iterator

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.harness.stage import Row
from common.timing import median_seconds


def ceilings(bench: Bench) -> Iterator[Row]:
    """The most that the card does: matrix products, those of a layer of 650M among them, and copies."""
    yield {"what": "bf16 matrix product", "TFLOP/s": bench.product_tflops}
    D, rows = (1280, bench.arguments.tokens // 2) if bench.device == "cuda" else (64, 256)
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
