"""Forward passes on a GPU: agreement with the CPU, and the speed of the backbone and of the Smith-Waterman kernel."""

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.bench import SIZES, Bench, captured
from benchmarks.harness.stage import REPOSITORY, Row
from esmeray.common.timing import median_seconds, timed
from esmeray.dataset.batches.steps import StepBatches
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.dataset.store.sample import sample_records
from esmeray.dataset.tokens.esm import pack_sequences
from esmeray.dataset.tokens.model_folder import quiet_transformers
from esmeray.model.backbones.loading import load_network
from esmeray.model.cost.flops import training_flops_per_token
from esmeray.model.kernels.smith_waterman import SmithWaterman
from esmeray.tasks.masked_lm.model import MaskedLM


def correctness(bench: Bench) -> Iterator[Row]:
    """Loss, features and gradients on the device compared with fp32 on the CPU."""
    name = bench.sizes[0]
    batch = bench.work(2048)[0].batches[0]
    # The CPU's fp32 is the reference, since tests compare it with transformers.
    expected_loss, expected_gradients = _gradients(bench.masked_lm(name, torch.float32).cpu(), batch.to("cpu"))
    for dtype, compiled in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        model = bench.masked_lm(name, dtype)
        if compiled:
            model.backbone.compile_layers(bench.backend)
        loss, gradients = _gradients(model, batch)
        difference = abs(loss / expected_loss - 1)
        # All gradients as one vector: single ones are near zero, so their relative differences mean nothing.
        cosine = float(torch.nn.functional.cosine_similarity(gradients, expected_gradients, dim=0))
        least, most = (0.999, 1e-2) if dtype == torch.bfloat16 else (0.999999, 1e-4)
        yield {
            "model": name,
            "dtype": str(dtype).removeprefix("torch."),
            "layers": "compiled" if compiled else "eager",
            "loss, relative difference": difference,
            "cosine of the gradients": cosine,
            "verdict": "ok" if cosine >= least and difference <= most else "WRONG",
        }
    if bench.device == "cuda":
        # Of the last model, whose one-time set-up is done. Until the part ends, an operation that waits is an error.
        torch.cuda.set_sync_debug_mode("error")
        verdict = "ok"
        try:
            model(batch).loss_sum.backward()
        except RuntimeError as error:
            verdict = f"WRONG: {str(error).splitlines()[0]}"
        yield {"model": name, "layers": "no wait in a step", "verdict": verdict}
        command = [sys.executable, "-m", "pytest", "-m", "cuda", "--continue-on-collection-errors", "tests/model"]
        # Some may not be collected: the machine may lack Ray and DeepSpeed.
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=180)
        words = ["ok" if done.returncode == 0 else "WRONG", *done.stdout.strip().splitlines()[-1:]]
        yield {"layers": "tests marked cuda", "verdict": " ".join(words)}


def _gradients(model: MaskedLM, batch: PackedBatch) -> tuple[float, Tensor]:
    """Return the summed loss, and all gradients as one vector on the CPU."""
    output = model(batch)
    output.loss_sum.backward()
    gradients = [p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None]
    return float(output.loss_sum.detach()), torch.cat(gradients)


def forward(bench: Bench) -> Iterator[Row]:
    """Tokens per second of the backbone's forward pass in bf16, in large and small batches, and of other packages."""
    for name in bench.sizes:
        model = bench.masked_lm(name, torch.bfloat16).eval()
        step, context = bench.work(bench.tokens)
        flops = training_flops_per_token(model, context) / 3  # the backward pass has two products per product
        yield _row(bench, name, "eager", step.num_tokens, partial(_run, model, step), flops)
        model.backbone.compile_layers(bench.backend)
        yield _row(bench, name, "compiled", step.num_tokens, partial(_run, model, step), flops)
        for tokens in (1024, 4096):
            small = bench.work(tokens)[0].batches[:1]
            count = small[0].num_tokens
            work = partial(_run, model, small)
            yield _row(bench, name, f"compiled, one batch of {count}", count, work, flops)
            # Small batches wait for the host to launch kernels: a graph shows the device's own time.
            if bench.device == "cuda":
                with torch.inference_mode():
                    row = _row(bench, name, f"CUDA graph, one batch of {count}", count, captured(work), flops)
                yield row
        yield from _esm_efficient(bench, name, model.backbone.config, step, flops)
        del model  # otherwise the next network of 3B parameters would not fit
        yield from _transformers(bench, name, flops)


@torch.inference_mode()
def _run(model: MaskedLM, batches: Iterable[PackedBatch]) -> None:
    for batch in batches:
        model.backbone(batch)


def _row(bench: Bench, name: str, contender: str, tokens: int, work: Callable[[], None], flops_per_token: float) -> Row:
    # Separately, since the first call compiles: once per service, but for all of a short job.
    first_s = timed(work)[1]
    taken_s = median_seconds(work)
    return {
        "model": name,
        "contender": contender,
        "tokens/s": tokens / taken_s,
        "share of a product": bench.share_of_peak(flops_per_token * tokens, taken_s),
        "first call s": first_s,
    }


def _esm_efficient(bench: Bench, name: str, config: Any, step: StepBatches, flops_per_token: float) -> Iterator[Row]:
    """esm-efficient on the same batches, if it and flash-attn can be imported."""
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
    """transformers in bf16 with SDPA, sorted by length, with the best of several batch sizes; real tokens count."""
    with quiet_transformers():
        loaded: Any = load_network(SIZES[name], 0)
    network = loaded.esm.to(bench.device, torch.bfloat16).eval()
    records = sample_records(256 if bench.device == "cuda" else 16, 4, seed=0)
    # Sorted by length, as a careful user would: otherwise padding would dominate.
    chosen = sorted((sequence for _, sequence in records), key=len, reverse=True)
    by_rate: dict[float, Row] = {}
    for size in (16, 64, 128) if bench.device == "cuda" else (4,):
        padded = [chosen[start : start + size] for start in range(0, len(chosen), size)]
        inputs = [_padded(sequences, bench.device) for sequences in padded]

        # Bound as a default: the closure of a loop would see the last inputs.
        @torch.inference_mode()
        def theirs(inputs: list[tuple[Tensor, Tensor]] = inputs) -> None:
            for ids, mask in inputs:
                network(input_ids=ids, attention_mask=mask)

        rate = sum(len(sequence) + 2 for sequence in chosen) / median_seconds(theirs)
        row: Row = {"model": name, "contender": f"transformers, SDPA, batches of {size}", "tokens/s": rate}
        by_rate[rate] = row | {"share of a product": bench.share_of_peak(rate * flops_per_token, 1.0)}
    yield by_rate[max(by_rate)]


def _padded(sequences: list[str], device: str) -> tuple[Tensor, Tensor]:
    """Return (B, L) padded ids and their attention mask."""
    rows = [pack_sequences([sequence]).tokens for sequence in sequences]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1).to(device)
    return ids, (ids != 1).long()


LETTERS, FIRST, EXTEND = 24, 12, 1
CUDASW = 5710
"""GCUPS of CUDASW++4.0 on an H100, as published."""


def alignment(bench: Bench) -> Iterator[Row]:
    """GCUPS of a query with many random sequences with UniRef90's lengths; exact int32 scores."""
    random = np.random.default_rng(0)
    count, queries = (500_000, (100, 300, 1000, 5000)) if bench.device == "cuda" else (40, (20,))
    lengths = np.clip(random.lognormal(5.6, 0.7, count), 10, 8000 if bench.device == "cuda" else 60).astype(int)
    sequences = np.split(random.integers(LETTERS, size=lengths.sum(), dtype=np.uint8), lengths.cumsum()[:-1])
    # Symmetric, with a positive diagonal, like substitution matrices: otherwise alignments would end at once.
    half = random.integers(-4, 3, (LETTERS, LETTERS))
    matrix = np.triu(half, 1) + np.triu(half, 1).T + np.diag(random.integers(4, 12, LETTERS))
    align = SmithWaterman(sequences, matrix, FIRST, EXTEND, bench.device)
    for length in queries:
        # Prefixes of the longest, so that all queries are similar to the same sequences.
        query = sequences[int(lengths.argmax())][:length]
        checked = random.choice(count, 20, replace=False)
        # A sample: the CPU would take minutes for all of them.
        reference = SmithWaterman([sequences[index] for index in checked], matrix, FIRST, EXTEND, "cpu")
        same = np.array_equal(reference(query), align(query)[checked])
        gcups = 1e-9 * len(query) * align.residues / median_seconds(partial(align, query))
        speed = {"GCUPS": gcups, "of CUDASW++4.0": gcups / CUDASW}
        yield {"query": len(query), **speed, "verdict": "ok" if same else "WRONG"}
