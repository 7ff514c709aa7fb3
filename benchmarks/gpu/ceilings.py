"""What the card can do at most."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.bench import Bench, Row, seconds


def ceilings(bench: Bench) -> Iterator[Row]:
    """The most that the card does: matrix products and copies."""
    yield {"what": "bf16 matrix product", "TFLOP/s": bench.product_tflops}
    count = 2**30 if bench.device == "cuda" else 2**20
    source = torch.empty(count, dtype=torch.int8, device=bench.device)
    target = torch.empty_like(source)
    yield {"what": "copy, bytes read and written", "TB/s": 2e-12 * count / seconds(lambda: target.copy_(source))}
