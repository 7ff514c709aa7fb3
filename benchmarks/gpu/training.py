"""Training steps: tokens per second, memory, and time by kernel; and the limits of the card."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache

from benchmarks.gpu.bench import WARM_UPS, Bench, captured
from benchmarks.harness.stage import Row
from esmeray.common.errors import ConfigError
from esmeray.common.timing import median_seconds, timed, wait_for_device
from esmeray.dataset.batches.steps import StepBatches
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.model.backbones.base import Checkpointing
from esmeray.model.cost.flops import training_flops_per_token
from esmeray.model.optimization import use_fp8
from esmeray.tasks.masked_lm.model import MaskedLM

NAMES_OF_KERNELS = {
    "fused": ("triton_poi", "triton_red", "triton_per", "triton_mix"),
    "attention": ("flash", "fmha", "attention"),
    "product": ("gemm", "nvjet", "cutlass", "matmul", "::mm", "addmm", "linear", "triton_tem"),
    "optimizer": ("adam", "multi_tensor"),
    "copy": ("memcpy", "memset", "copy"),
}
"""Parts of the kernels' names, by kind; the first match counts."""

ALL = "all of them"
OPTIMIZER_BYTES = 28
"""Bytes of a parameter's update: weight and two moments read and written, gradient read, fp32."""


class Kernel(NamedTuple):
    """A kernel's seconds and calls in a step; or a whole kind's, with the name :data:`ALL`."""

    kind: str
    name: str
    seconds: float
    calls: int


class TrainingRun:
    """Steps of masked LM: bf16 weights and gradients, fp32 weights and moments in the optimizer, as in ZeRO."""

    def __init__(self, model: MaskedLM, capturable: bool = False) -> None:
        self.model = model
        self._weights: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._master: list[Tensor] = [torch.nn.Parameter(p.detach().float()) for p in self._weights]
        fused = self._weights[0].device.type == "cuda"
        self._optimizer = torch.optim.AdamW(self._master, lr=1e-4, fused=fused, capturable=capturable)

    def step(self, batch: PackedBatch) -> None:
        """Forward, backward and update; leaves the mean loss on the device."""
        output = self.model(batch)
        (output.loss_sum / output.num_targets).backward()
        # Gradients in fp32 for the master weights, as in ZeRO. After None a gradient is written, not accumulated.
        for master, weight in zip(self._master, self._weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        self._optimizer.step()
        with torch.no_grad():
            # One kernel for all parameters.
            torch._foreach_copy_(self._weights, self._master)
        self.loss = output.loss_sum.detach() / output.num_targets

    def steps(self, batches: StepBatches) -> None:
        """Do an update with each batch."""
        for batch in batches:
            self.step(batch)


class Variant(NamedTuple):
    """Options of a training, and their name in the table."""

    name: str
    compiled: bool = True
    checkpointing: Checkpointing = False
    fp8: bool = False
    graph: bool = False


VARIANTS = (
    Variant("eager", compiled=False),
    Variant("compiled"),
    Variant("compiled, checkpointing selective", checkpointing="selective"),
    Variant("compiled, checkpointing True", checkpointing=True),
    Variant("compiled, CUDA graph of one batch", graph=True),
    Variant("compiled, FP8", fp8=True),
)


def _trained(bench: Bench, name: str, tokens: int, variant: Variant) -> Row:
    """Return tokens per second and memory of training steps."""
    row: Row = {"model": name, "tokens a batch": tokens, "way": variant.name}
    on_gpu = bench.device == "cuda"
    if variant.graph and not on_gpu:
        return row | {"verdict": "not on this device"}
    step, context = bench.work(tokens)
    model = bench.masked_lm(name, torch.bfloat16)
    model.backbone.gradient_checkpointing = variant.checkpointing
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        if variant.fp8:
            use_fp8(model.backbone, emulate=not on_gpu)
        if variant.compiled:
            model.backbone.compile_layers(bench.backend)
        if variant.graph:
            # Batches differ in their number of targets, so a graph repeats one; real tokens are equal to a percent.
            step = replace(step, batches=step.batches[:1] * len(step))
        # Capturable: the optimizer's step count is on the device, where a replayed graph can increment it.
        run = TrainingRun(model, capturable=variant.graph)
        work = partial(run.steps, step)
        first_s = timed(work)[1]
        taken_s = median_seconds(captured(work) if variant.graph else work)
    except torch.OutOfMemoryError:
        # The next variants may need less.
        return row | {"verdict": "out of memory"}
    except ConfigError as error:
        return row | {"verdict": str(error)}
    flops = training_flops_per_token(model, context) * step.num_tokens
    return row | {
        "tokens/s": step.num_tokens / taken_s,
        "share of a product": bench.share_of_peak(flops, taken_s),
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "first step s": first_s,
        "loss after": float(run.loss),
    }


def training(bench: Bench) -> Iterator[Row]:
    """Tokens per second and memory of training steps, with each variant."""
    # The larger size first: it matters most if the minutes end.
    for name, variant in itertools.product(reversed(bench.sizes[:2]), VARIANTS):
        yield _trained(bench, name, bench.tokens // 2, variant)


def ceilings(bench: Bench) -> Iterator[Row]:
    """Limits of the card: a large matrix product, the products of a layer of 650M, and a copy."""
    yield {"what": "bf16 matrix product", "TFLOP/s": bench.product_tflops}
    # D of 650M, whose products dominate its training.
    D, rows = (1280, bench.tokens // 2) if bench.device == "cuda" else (64, 256)
    # The second row shows what query, key and value as one product would gain.
    for product, width, count in (("three products of D by D", D, 3), ("one product of D by 3 D", 3 * D, 1)):
        yield {"what": f"{product}, {rows} tokens", "TFLOP/s": _tflops(bench, rows, D, width, count)}
    yield {"what": f"D by 4 D, {rows} tokens", "TFLOP/s": _tflops(bench, rows, D, 4 * D)}
    yield {"what": f"4 D by D, {rows} tokens", "TFLOP/s": _tflops(bench, rows, 4 * D, D)}
    yield {"what": "copy, bytes read and written", "TB/s": bench.copy_tb_per_s}


def _tflops(bench: Bench, rows: int, inner: int, width: int, count: int = 1) -> float:
    """Return TFLOP/s of ``count`` Linears one after the other."""
    x, weight, bias = (
        torch.randn(*shape, device=bench.device, dtype=torch.bfloat16)
        for shape in ((rows, inner), (width, inner), (width,))
    )
    repeats = range(20 * count)
    taken_s = median_seconds(lambda: [torch.nn.functional.linear(x, weight, bias) for _ in repeats])
    return 2e-12 * rows * inner * width * len(repeats) / taken_s


def profile(bench: Bench) -> Iterator[Row]:
    """A training step of the second size by kernel, eager and compiled: share of the time, and of its kind's limit.

    Products and attention are limited by the FLOP/s of a large product, other kinds by the bytes/s of a copy.
    """
    name = bench.sizes[min(1, len(bench.sizes) - 1)]
    step, context = bench.work(bench.tokens // 2)
    batch = step.batches[0]
    for layers in ("eager", "compiled"):
        model = bench.masked_lm(name, torch.bfloat16)
        run = TrainingRun(model)
        fused_bytes = 0
        if layers == "compiled":
            model.backbone.compile_layers(bench.backend)
            fused_bytes = _bytes_of_a_layer(run, batch)
            moved = f"{fused_bytes / batch.num_tokens:,.0f} B a token and layer"
            yield {"layers": layers, "kind": "fused", "kernel": moved}
        for _ in range(WARM_UPS):
            run.step(batch)
        kernels = _recorded(bench, run, batch)
        # Without context there are only products with weights; context adds attention.
        products = 1e-12 * batch.num_tokens * training_flops_per_token(model, 0.0)
        attention = 1e-12 * batch.num_tokens * training_flops_per_token(model, context) - products
        least_s = {
            "product": products / bench.product_tflops,
            "attention": attention / bench.product_tflops,
            "fused": 1e-12 * fused_bytes * model.backbone.num_layers / bench.copy_tb_per_s,
            "optimizer": 1e-12 * OPTIMIZER_BYTES * sum(p.numel() for p in model.parameters()) / bench.copy_tb_per_s,
        }
        yield from ({"layers": layers, **row} for row in _rows(kernels, least_s))


def _bytes_of_a_layer(run: TrainingRun, batch: PackedBatch) -> int:
    """Return the bytes that inductor's kernels of one layer move, forward and backward, as counted when it compiles."""
    metrics.reset()
    # Inductor counts only what it logs, and only when it compiles: hence an empty cache.
    torch._logging.set_logs(inductor_metrics=True)
    with fresh_cache():
        run.step(batch)
    torch._logging.set_logs()
    return sum(4 * elements for node, elements in metrics.nodes_num_elem if not node.is_extern())


def _rows(kernels: list[Kernel], least_s: dict[str, float]) -> Iterator[Row]:
    """Yield kinds, then single kernels, the longest first; ``least_s``: seconds that a kind takes at its limit."""
    total = sum(kernel.seconds for kernel in kernels)
    kinds = []
    for kind in {kernel.kind for kernel in kernels}:
        own = [kernel for kernel in kernels if kernel.kind == kind]
        seconds = sum(kernel.seconds for kernel in own)
        kinds.append(Kernel(kind, ALL, seconds, sum(kernel.calls for kernel in own)))
    longest = sorted(kernels, key=lambda kernel: -kernel.seconds)[:20]
    for kernel in [*sorted(kinds, key=lambda kind: -kind.seconds), *longest]:
        has_limit = kernel.name == ALL and kernel.kind in least_s
        yield {
            "kind": kernel.kind,
            "kernel": kernel.name,
            "share": kernel.seconds / total,
            "ms": kernel.seconds * 1e3,
            "calls": kernel.calls,
            "of its limit": least_s[kernel.kind] / kernel.seconds if has_limit else None,
        }


def _recorded(bench: Bench, run: TrainingRun, batch: PackedBatch) -> list[Kernel]:
    """Return the kernels of a step."""
    on_gpu = bench.device == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as recorded:
        run.step(batch)
        wait_for_device()
    kernels = []
    for event in recorded.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds:
            kernels.append(Kernel(_kind(event.key.lower()), event.key[:80], 1e-6 * microseconds, event.count))
    return kernels


def _kind(kernel: str) -> str:
    return next((kind for kind, words in NAMES_OF_KERNELS.items() if any(word in kernel for word in words)), "other")
