"""Training steps: tokens a second, memory, and where the time goes by kernel; what the card can do at most."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache

from benchmarks.gpu.bench import WARM_UPS, Bench, captured
from benchmarks.harness.stage import Row
from esmeray.common.errors import ConfigError
from esmeray.common.timing import median_seconds, timed
from esmeray.dataset.batches.steps import StepBatches
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.model.backbones.base import Checkpointing
from esmeray.model.cost.flops import training_flops_per_token
from esmeray.model.optimization import use_fp8
from esmeray.tasks.masked_lm.model import MaskedLM

Kernels: TypeAlias = Counter[tuple[str, str]]
"""A value by kind and name of the kernel."""

NAMES_OF_KERNELS = {
    "fused": ("triton_poi", "triton_red", "triton_per", "triton_mix"),
    "attention": ("flash", "fmha", "attention"),
    "product": ("gemm", "nvjet", "cutlass", "matmul", "::mm", "addmm", "linear", "triton_tem"),
    "optimizer": ("adam", "multi_tensor"),
    "copy": ("memcpy", "memset", "copy"),
}
"""Parts of the kernels' names, by kind; the first that fits counts."""

ALL = "all of them"
"""In place of a kernel's name, for a whole kind."""
OPTIMIZER_BYTES = 28
"""Of a parameter's update: weight and two moments read and written, gradient read, fp32."""


class TrainingRun:
    """Steps of masked LM: bf16 weights and gradients, fp32 weights and moments in the optimizer, as ZeRO has them."""

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
        # Gradients in fp32 to the master weights, as ZeRO has them; set to None, they are written and not added to.
        for master, weight in zip(self._master, self._weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        self._optimizer.step()
        with torch.no_grad():
            # One kernel for all parameters, not one for each.
            torch._foreach_copy_(self._weights, self._master)
        self.loss = output.loss_sum.detach() / output.num_targets

    def steps(self, batches: StepBatches) -> None:
        """An update with each batch."""
        for batch in batches:
            self.step(batch)


class Variant(NamedTuple):
    """A way to train, and its name in the table."""

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
    """Tokens a second of steps, and their memory."""
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
        if variant.graph:  # the number of targets differs from batch to batch: the same one again
            step = replace(step, batches=step.batches[:1] * len(step))  # of as many real tokens, to a percent
        # Capturable: the optimizer's step count has to be on the device, where a replayed graph can raise it.
        run = TrainingRun(model, capturable=variant.graph)
        work = partial(run.steps, step)
        first_s = timed(work)[1]
        taken_s = median_seconds(captured(work) if variant.graph else work)
    except torch.OutOfMemoryError:
        # A row of the table like any other: the ways after it may take less.
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
    """Tokens a second of training steps, and their memory, in each way."""
    # The larger size first: it is what the script is run for, should its minutes end.
    for name, variant in itertools.product(reversed(bench.sizes[:2]), VARIANTS):
        yield _trained(bench, name, bench.tokens // 2, variant)


def ceilings(bench: Bench) -> Iterator[Row]:
    """The most that the card does: matrix products, those of a layer of 650M among them, and copies."""
    yield {"what": "bf16 matrix product", "TFLOP/s": bench.product_tflops}
    # D of 650M: its products are the ones that the training of the script's sizes consists of.
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
        run = TrainingRun(model)
        fused_bytes = 0
        if layers == "compiled":
            model.backbone.compile_layers(bench.backend)
            fused_bytes = _bytes_of_a_layer(run, batch)
            moved = f"{fused_bytes / batch.num_tokens:,.0f} B a token and layer"
            yield {"layers": layers, "kind": "fused", "kernel": moved}
        for _ in range(WARM_UPS):
            run.step(batch)
        spent, calls = _recorded(bench, run, batch)
        # Without context there are the products with weights alone; what context adds is attention.
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
    """Bytes that inductor's kernels of one layer read and write, forward and backward, as counted when it compiles."""
    metrics.reset()
    # Inductor counts only what it logs, and only when it compiles: hence a cache that is empty.
    torch._logging.set_logs(inductor_metrics=True)
    with fresh_cache():
        run.step(batch)
    torch._logging.set_logs()
    return sum(4 * elements for node, elements in metrics.nodes_num_elem if not node.is_extern())


def _rows(spent: Kernels, calls: Kernels, least_s: dict[str, float]) -> Iterator[Row]:
    """Kinds, then single kernels, the longest first; ``least_s``: seconds that a kind takes at its limit."""
    total = sum(spent.values())
    by_kind, calls_by_kind = Kernels(), Kernels()
    for (kind, kernel), microseconds in spent.items():
        by_kind[kind, ALL] += microseconds
        calls_by_kind[kind, ALL] += calls[kind, kernel]
    for key, own in [*by_kind.most_common(), *spent.most_common(20)]:
        row: Row = dict(zip(("kind", "kernel"), key, strict=True))
        row |= {"share": own / total, "ms": own / 1e3, "calls": (calls | calls_by_kind)[key]}
        has_limit = key in by_kind and least_s.get(key[0])
        yield row | {"of its limit": least_s[key[0]] / (own * 1e-6) if has_limit else None}


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
        if own:
            key = _kind(event.key.lower()), event.key[:80]
            spent[key] += own
            calls[key] += event.count
    return spent, calls


def _kind(kernel: str) -> str:
    return next(
        (kind for kind, words in NAMES_OF_KERNELS.items() if any(word in kernel for word in words)),
        "other",
    )
