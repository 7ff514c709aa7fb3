"""Inference: the backbone alone, beside what people use."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import LONGEST, Bench, Row, seconds
from dataset.batches.steps import StepBatches
from dataset.store.sample import sample_records
from model.backbones.loading import load_network, quiet_transformers
from model.cost.flops import training_flops_per_token
from model.tasks.masked_lm import MaskedLM
from model.tasks.sequences import pack_in_order


def forward(bench: Bench) -> Iterator[Row]:
    """Tokens a second of the backbone's forward pass in bf16, beside transformers."""
    for name in bench.arguments.sizes:
        model = bench.masked_lm(name, torch.bfloat16).eval()
        step, context = bench.work(bench.arguments.tokens)
        flops = training_flops_per_token(model, context) / 3 * step.num_tokens

        @torch.inference_mode()
        def ours(model: MaskedLM = model, step: StepBatches = step) -> None:
            for batch in step:
                model.backbone(batch)

        for layers in ("eager", "compiled"):
            if layers == "compiled":
                model.backbone.compile_layers(bench.arguments.backend)
            began = time.perf_counter()
            ours()
            first_s, taken_s = time.perf_counter() - began, seconds(ours)
            yield {
                "model": name,
                "contender": f"esmeray, {layers}",
                "tokens/s": step.num_tokens / taken_s,
                "share of a product": bench.share_of_peak(flops, taken_s),
                "first call s": first_s,
            }
        del model
        yield from _transformers(bench, name, flops / step.num_tokens)


def _transformers(bench: Bench, name: str, flops_per_token: float) -> Iterator[Row]:
    """transformers in bf16 with SDPA, sorted by length, at the best of some batch sizes; of real tokens."""
    with quiet_transformers():
        loaded: Any = load_network(bench.size(name), 0)
    network = loaded.esm.to(bench.device, torch.bfloat16).eval()
    proteins = (sequence for _, sequence in sample_records(256 if bench.device == "cuda" else 16, 4, seed=0))
    chosen = sorted(proteins, key=len, reverse=True)
    best: Row = {}
    for size in (16, 64, 128) if bench.device == "cuda" else (4,):
        padded = [chosen[start : start + size] for start in range(0, len(chosen), size)]
        inputs = [_padded(sequences, bench.device) for sequences in padded]

        @torch.inference_mode()
        def theirs(inputs: list[tuple[Tensor, Tensor]] = inputs) -> None:
            for ids, mask in inputs:
                network(input_ids=ids, attention_mask=mask)

        rate = sum(len(sequence) + 2 for sequence in chosen) / seconds(theirs)
        if rate > best.get("tokens/s", 0.0):  # type: ignore[operator]
            share = bench.share_of_peak(rate * flops_per_token, 1.0)
            best = {"model": name, "contender": f"transformers, SDPA, batches of {size}", "tokens/s": rate}
            best["share of a product"] = share
    yield best


def _padded(sequences: list[str], device: str) -> tuple[Tensor, Tensor]:
    """(B, L) ids of each sequence, padded, and their attention mask."""
    parts = [batch.tokens for sequence in sequences for batch in pack_in_order([sequence], LONGEST)]
    ids = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=1).to(device)
    return ids, (ids != 1).long()
