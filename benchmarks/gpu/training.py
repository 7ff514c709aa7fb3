"""Training steps: tokens a second, memory, and where the time goes."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from esmeray.benchmarks.gpu.bench import LONGEST, Bench, captured
from esmeray.benchmarks.harness.stage import Row
from esmeray.common.errors import ConfigError
from esmeray.common.timing import median_seconds, timed
from esmeray.dataset.batches.steps import StepBatches
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.model.backbones.base import Checkpointing
from esmeray.model.cost.flops import training_flops_per_token
from esmeray.model.optimization import use_fp8
from esmeray.tasks.masked_lm.model import MaskedLM


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
        for master, weight in zip(self._master, self._weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._master)
        self.loss = output.loss_sum.detach() / output.num_targets

    def steps(self, batches: StepBatches) -> None:
        """An update with each batch."""
        for batch in batches:
            self.step(batch)


class Variant(NamedTuple):
    """A way to train."""

    compiled: bool = True
    checkpointing: Checkpointing = False
    fp8: bool = False
    graph: bool = False

    def __str__(self) -> str:
        parts = {"compiled": self.compiled, f"checkpointing {self.checkpointing}": self.checkpointing}
        parts |= {"FP8": self.fp8, "CUDA graph of one batch": self.graph}
        return ", ".join(part for part, used in parts.items() if used) or "eager"


VARIANTS = (
    Variant(compiled=False),
    Variant(),
    Variant(checkpointing="selective"),
    Variant(checkpointing=True),
    Variant(graph=True),
    Variant(fp8=True),
)


def _trained(bench: Bench, name: str, tokens: int, variant: Variant) -> Row:
    """Tokens a second of steps, and their memory."""
    row: Row = {"model": name, "tokens a batch": tokens, "way": str(variant)}
    on_gpu = bench.device == "cuda"
    if variant.graph and not on_gpu:
        return row | {"verdict": "not on this device"}
    (step, context), model = bench.work(tokens), bench.masked_lm(name, torch.bfloat16)
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
        run = TrainingRun(model, capturable=variant.graph)
        work = partial(run.steps, step)
        first_s = timed(work)[1]
        taken_s = median_seconds(captured(work) if variant.graph else work)
    except torch.OutOfMemoryError:
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
    for name, variant in itertools.product(reversed(bench.sizes[:2]), VARIANTS):
        yield _trained(bench, name, bench.tokens // 2, variant)


def budgets(bench: Bench) -> Iterator[Row]:
    """Tokens a second of training by token budget."""
    name = bench.sizes[min(1, len(bench.sizes) - 1)]
    for tokens in sorted({max(LONGEST, bench.tokens // share) for share in (8, 4, 2, 1)}):
        yield _trained(bench, name, tokens, Variant())
