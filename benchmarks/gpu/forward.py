"""Inference: the backbone alone, beside what people use."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from esmeray.benchmarks.gpu.bench import Bench, captured
from esmeray.benchmarks.harness.stage import Row
from esmeray.common.timing import median_seconds, timed
from esmeray.dataset.batches.steps import StepBatches
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.dataset.store.sample import sample_records
from esmeray.dataset.tokens.esm import pack_sequences
from esmeray.model.backbones.huggingface_loading import quiet_transformers
from esmeray.model.backbones.loading import load_network
from esmeray.model.cost.flops import training_flops_per_token
from esmeray.tasks.masked_lm.model import MaskedLM


def forward(bench: Bench) -> Iterator[Row]:
    """Tokens a second of the backbone's forward pass in bf16, of large batches and of small, beside other packages."""
    for name in bench.sizes:
        model = bench.masked_lm(name, torch.bfloat16).eval()
        step, context = bench.work(bench.tokens)
        flops = training_flops_per_token(model, context) / 3  # the backward pass has two products for each
        yield _row(bench, name, "eager", step.num_tokens, partial(_run, model, step), flops)
        model.backbone.compile_layers(bench.backend)
        yield _row(bench, name, "compiled", step.num_tokens, partial(_run, model, step), flops)
        for tokens in (1024, 4096):
            small = bench.work(tokens)[0].batches[:1]
            count = small[0].num_tokens
            work = partial(_run, model, small)
            yield _row(bench, name, f"compiled, one batch of {count}", count, work, flops)
            # Small batches wait for the host to launch kernels: a graph shows what the device itself takes.
            if bench.device == "cuda":
                with torch.inference_mode():
                    row = _row(bench, name, f"CUDA graph, one batch of {count}", count, captured(work), flops)
                yield row
        yield from _esm_efficient(bench, name, model.backbone.config, step, flops)
        del model  # the next network of 3B parameters would not fit beside it
        yield from _transformers(bench, name, flops)


@torch.inference_mode()
def _run(model: MaskedLM, batches: Iterable[PackedBatch]) -> None:
    for batch in batches:
        model.backbone(batch)


def _row(bench: Bench, name: str, contender: str, tokens: int, work: Callable[[], None], flops_per_token: float) -> Row:
    # The first call apart: compiling is paid once, by a service at its start and by a short job as a whole.
    first_s = timed(work)[1]
    taken_s = median_seconds(work)
    share = bench.share_of_peak(flops_per_token * tokens, taken_s)
    rate: Row = {"tokens/s": tokens / taken_s, "share of a product": share, "first call s": first_s}
    return {"model": name, "contender": contender, **rate}


def _esm_efficient(bench: Bench, name: str, config: Any, step: StepBatches, flops_per_token: float) -> Iterator[Row]:
    """esm-efficient on the same batches; nothing where it or flash-attn can't be imported."""
    try:
        from esme import ESM2
    except ImportError:
        return
    sizes = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads)
    network = ESM2(*sizes).to(bench.device).eval()

    @torch.inference_mode()
    def theirs() -> None:
        for batch in step:
            network.forward_representation(batch.tokens, (batch.cu_seqlens, batch.max_seqlen))

    yield _row(bench, name, "esm-efficient", step.num_tokens, theirs, flops_per_token)


def _transformers(bench: Bench, name: str, flops_per_token: float) -> Iterator[Row]:
    """transformers in bf16 with SDPA, sorted by length, at the best of some batch sizes; of real tokens."""
    with quiet_transformers():
        loaded: Any = load_network(bench.size(name), 0)
    network = loaded.esm.to(bench.device, torch.bfloat16).eval()
    records = sample_records(256 if bench.device == "cuda" else 16, 4, seed=0)
    # By length, as a careful user has them: else padding alone would decide.
    chosen = sorted((sequence for _, sequence in records), key=len, reverse=True)
    best: Row = {}
    for size in (16, 64, 128) if bench.device == "cuda" else (4,):
        padded = [chosen[start : start + size] for start in range(0, len(chosen), size)]
        inputs = [_padded(sequences, bench.device) for sequences in padded]

        # Bound as a default: the closure of a loop would see the last inputs.
        @torch.inference_mode()
        def theirs(inputs: list[tuple[Tensor, Tensor]] = inputs) -> None:
            for ids, mask in inputs:
                network(input_ids=ids, attention_mask=mask)

        rate = sum(len(sequence) + 2 for sequence in chosen) / median_seconds(theirs)
        if rate > best.get("tokens/s", 0.0):  # type: ignore[operator]
            share = bench.share_of_peak(rate * flops_per_token, 1.0)
            best = {"model": name, "contender": f"transformers, SDPA, batches of {size}", "tokens/s": rate}
            best["share of a product"] = share
    yield best


def _padded(sequences: list[str], device: str) -> tuple[Tensor, Tensor]:
    """(B, L) ids of each sequence, padded, and their attention mask."""
    rows = [pack_sequences([sequence]).tokens for sequence in sequences]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1).to(device)
    return ids, (ids != 1).long()
