"""Training steps: tokens a second, memory, and where the time goes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.bench import LONGEST, Bench, Row, seconds
from dataset.batches.steps import StepBatches
from dataset.packed_batch import PackedBatch
from model.cost.flops import training_flops_per_token
from model.tasks.masked_lm import MaskedLM


class TrainingRun:
    """Steps of masked LM: bf16 weights and gradients, fp32 weights and moments in the optimizer, as ZeRO has them."""

    def __init__(self, model: MaskedLM) -> None:
        self.model = model
        self._weights: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._master: list[Tensor] = [torch.nn.Parameter(p.detach().float()) for p in self._weights]
        fused = self._weights[0].device.type == "cuda"
        self._optimizer = torch.optim.AdamW(self._master, lr=1e-4, fused=fused)

    def step(self, batch: PackedBatch) -> Tensor:
        """Forward, backward and update; returns the loss on the device."""
        output = self.model(batch)
        (output.loss_sum / output.num_targets).backward()
        for master, weight in zip(self._master, self._weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._master)
        return output.loss_sum.detach()

    def steps(self, batches: StepBatches) -> None:
        """An update with each batch."""
        for batch in batches:
            self.step(batch)


def _trained(bench: Bench, name: str, tokens: int, layers: str = "compiled", checkpointing: bool = False) -> Row:
    """Tokens a second of steps, and their memory."""
    (step, context), model = bench.work(tokens), bench.masked_lm(name, torch.bfloat16)
    model.backbone.gradient_checkpointing = checkpointing
    if layers == "compiled":
        model.backbone.compile_layers(bench.arguments.backend)
    row: Row = {"model": name, "tokens a batch": tokens, "layers": layers, "checkpointing": str(checkpointing)}
    if bench.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        taken_s = seconds(partial(TrainingRun(model).steps, step))
    except torch.OutOfMemoryError:
        return row | {"tokens/s": None, "verdict": "out of memory"}
    flops = training_flops_per_token(model, context) * step.num_tokens
    peak = torch.cuda.max_memory_allocated() / 2**30 if bench.device == "cuda" else None
    share = bench.share_of_peak(flops, taken_s)
    return row | {"tokens/s": step.num_tokens / taken_s, "share of a product": share, "peak GiB": peak}


def training(bench: Bench) -> Iterator[Row]:
    """Tokens a second of training steps, and their memory: eager, compiled, with checkpointing."""
    variants = itertools.product(bench.arguments.sizes[:2], ("eager", "compiled"), (False, True))
    for name, layers, checkpointing in variants:
        yield _trained(bench, name, bench.arguments.tokens // 2, layers, checkpointing)


def budgets(bench: Bench) -> Iterator[Row]:
    """Tokens a second of training by token budget."""
    name = bench.arguments.sizes[min(1, len(bench.arguments.sizes) - 1)]
    for tokens in sorted({max(LONGEST, bench.arguments.tokens // share) for share in (8, 4, 2, 1)}):
        yield _trained(bench, name, tokens)
