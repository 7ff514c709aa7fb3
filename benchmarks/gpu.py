"""Check and time what runs on a GPU, most important first; results are on disk after each part.

Needs torch, transformers, NumPy, pydantic, and what model/ and dataset/ import; no Ray, no DeepSpeed, no network and no
data. Weights are random: no value depends on them. Batches are those of training, of the embedded sample.

Examples:
  python -m benchmarks gpu
  python -m benchmarks gpu --part correctness training --output results
  python -m benchmarks gpu --device cpu --sizes tiny --tokens 2048 --backend eager
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import torch
import tyro
from pydantic import BaseModel, Field
from torch import Tensor

from benchmarks.harness.machine import describe_machine, revision, versions
from common.errors import ConfigError
from common.publishing import write_atomically
from common.text import did_you_mean
from common.timing import timed
from dataset.batches.loader import ResidueSource
from dataset.batches.preparation import PreparationSettings
from dataset.batches.steps import StepBatches, TrainingSteps
from dataset.packed_batch import PackedBatch
from dataset.store.conversion import ensure_store
from dataset.store.reader import Store
from dataset.store.sample import sample_records
from model.backbones.loading import load_network, quiet_transformers
from model.cost.flops import training_flops_per_token
from model.tasks.masked_lm import MaskedLM
from model.tasks.sequences import pack_in_order
from train_config.schema import BackboneSection, BatchSection, DataSection, MaskedLMSection, ModelSection

Row: TypeAlias = dict[str, str | int | float | None]

LONGEST = 1024
"""Tokens of the longest sequence."""

SIZES = {"8M": "esm2_t6_8M", "150M": "esm2_t30_150M", "650M": "esm2_t33_650M", "3B": "esm2_t36_3B"}
ROUNDS, WARM_UPS, MICRO_BATCHES = 5, 3, 4
NAMES_OF_KERNELS = {
    "product": ("gemm", "nvjet", "cutlass", "matmul", "::mm", "addmm", "linear"),
    "attention": ("flash", "fmha", "attention"),
    "optimizer": ("adam", "multi_tensor"),
    "copy": ("memcpy", "memset", "copy"),
    "fused": ("triton",),
}
"""What the name of a kernel holds, by kind; the first that fits counts."""


class Arguments(BaseModel):
    """Parts to run, and the place of their results."""

    part: tuple[str, ...] = Field((), description="Parts to run; all if none is named.")
    output: Path = Field(Path("gpu-results"), description="Folder of gpu.json and gpu.md.")
    device: str = Field("cuda", description="cuda, or cpu to try the script.")
    sizes: tuple[str, ...] = Field(("8M", "650M", "150M", "3B"), description="Sizes of ESM-2, in order; 'tiny' to try.")
    tokens: int = Field(65_536, description="Token budget of a batch in forward passes; training takes half of it.")
    backend: str = Field("inductor", description="Of torch.compile; 'eager' traces alone, to try the script.")
    minutes: float = Field(8.0, description="No part starts later than this.")


@dataclass
class Bench:
    """What the parts share, and what they found."""

    arguments: Arguments
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return self.arguments.device

    @cached_property
    def store(self) -> Store:
        """The embedded sample, kept among temporary files."""
        return Store(ensure_store(DataSection(), Path(tempfile.gettempdir()) / "esmeray-gpu"))

    @cached_property
    def product_tflops(self) -> float:
        """TFLOP/s of a large bf16 matrix product, the most that the device does."""
        size = 8192 if self.device == "cuda" else 256
        left, right = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2e-12 * size**3 * 20 / seconds(lambda: [left @ right for _ in range(20)])

    def work(self, tokens: int) -> tuple[StepBatches, float]:
        """A step of masked batches of one shape on the device, and the tokens that a token attends to on average."""
        settings = PreparationSettings(LONGEST - 2, 0, random_crops=True, masking=MaskedLMSection())
        batch = BatchSection(tokens=tokens, global_tokens=MICRO_BATCHES * tokens)
        records = np.arange(len(self.store))
        steps = TrainingSteps(ResidueSource(self.store, settings), records, batch=batch, seed=0, fixed_shapes=True)
        step = next(steps.epoch(0))
        return replace(step, batches=[batch.to(self.device) for batch in step]), steps.mean_context

    def size(self, name: str) -> BackboneSection:
        """Settings of a size of ESM-2."""
        if name == "tiny":
            return BackboneSection(source="esm2_t6_8M", layers=2, hidden_size=32, heads=4)
        if name not in SIZES:
            raise ConfigError(f"--sizes: no size {name!r}{did_you_mean(name, SIZES)}; there are {', '.join(SIZES)}")
        return BackboneSection(source=SIZES[name])

    def masked_lm(self, name: str, dtype: torch.dtype) -> MaskedLM:
        """A masked language model on the device."""
        section = ModelSection(task="masked_lm", backbone=self.size(name))
        return MaskedLM.build(section, seed=0).to(self.device, dtype)

    def share_of_peak(self, flops: float, taken_s: float) -> float:
        """Model FLOP/s as a share of a large product's (MFU against what the card reaches)."""
        return flops / taken_s / 1e12 / self.product_tflops


def seconds(work: Callable[[], object]) -> float:
    """Median of a few rounds, the device's work included, after some to warm up."""
    for _ in range(WARM_UPS):
        work()
    return median(timed(work)[1] for _ in range(ROUNDS))


def correctness(bench: Bench) -> Iterator[Row]:
    """Loss, features and gradients on the device against fp32 on the CPU."""
    name = bench.arguments.sizes[0]
    batch = bench.work(2048)[0].batches[0]
    reference = bench.masked_lm(name, torch.float32).cpu()
    wanted = reference(batch.to("cpu"))
    wanted.loss_sum.backward()
    wanted_grads = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None])
    for dtype, compiled in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        model = bench.masked_lm(name, dtype)
        if compiled:
            model.backbone.compile_layers(bench.arguments.backend)
        output = model(batch)
        output.loss_sum.backward()
        grads = torch.cat([p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None])
        loss, expected = float(output.loss_sum.detach()), float(wanted.loss_sum.detach())
        cosine = float(torch.nn.functional.cosine_similarity(grads, wanted_grads, dim=0))
        least, most = (0.999, 1e-2) if dtype == torch.bfloat16 else (0.999999, 1e-4)
        yield {
            "model": name,
            "dtype": str(dtype).removeprefix("torch."),
            "layers": "compiled" if compiled else "eager",
            "loss, relative difference": abs(loss / expected - 1),
            "cosine of the gradients": cosine,
            "verdict": "ok" if cosine >= least and abs(loss / expected - 1) <= most else "WRONG",
        }
    yield {"model": name, "layers": "no wait in a step", "verdict": _waits_nowhere(bench, name)}


def _waits_nowhere(bench: Bench, name: str) -> str:
    """Whether a step runs under torch's mode that forbids to wait for the device."""
    model, batch = bench.masked_lm(name, torch.bfloat16), bench.work(2048)[0].batches[0]
    if bench.device != "cuda":
        return "not on this device"
    model(batch).loss_sum.backward()  # what is set up once
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(batch).loss_sum.backward()
    except RuntimeError as error:
        return f"WRONG: {str(error).splitlines()[0]}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "ok"


def ceilings(bench: Bench) -> Iterator[Row]:
    """The most that the card does: matrix products and copies."""
    yield {"what": "bf16 matrix product", "TFLOP/s": bench.product_tflops}
    count = 2**30 if bench.device == "cuda" else 2**20
    source = torch.empty(count, dtype=torch.int8, device=bench.device)
    target = torch.empty_like(source)
    yield {"what": "copy, bytes read and written", "TB/s": 2e-12 * count / seconds(lambda: target.copy_(source))}


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


class _Training:
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
        taken_s = seconds(partial(_Training(model).steps, step))
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


def profile(bench: Bench) -> Iterator[Row]:
    """A training step of the second size by kernel: the share of each in the time."""
    name = bench.arguments.sizes[min(1, len(bench.arguments.sizes) - 1)]
    batch = bench.work(bench.arguments.tokens // 2)[0].batches[0]
    model = bench.masked_lm(name, torch.bfloat16)
    model.backbone.compile_layers(bench.arguments.backend)
    run = _Training(model)
    for _ in range(WARM_UPS):
        run.step(batch)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.device == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        run.step(batch)
        if bench.device == "cuda":
            torch.cuda.synchronize()
    spent: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for event in recorded.key_averages():
        own = event.self_device_time_total if bench.device == "cuda" else event.self_cpu_time_total
        kinds = (kind for kind, words in NAMES_OF_KERNELS.items() if any(w in event.key.lower() for w in words))
        if own:
            spent[next(kinds, "other"), event.key[:80]] += [own, event.count]
    total = sum(values[0] for values in spent.values())
    by_kind: defaultdict[str, float] = defaultdict(float)
    for (kind, _), values in spent.items():
        by_kind[kind] += values[0]
    for kind, own in sorted(by_kind.items(), key=lambda item: -item[1]):
        yield {"kind": kind, "kernel": "all of them", "share": own / total, "ms": own / 1e3}
    for (kind, kernel), values in sorted(spent.items(), key=lambda item: -item[1][0])[:20]:
        yield {"kind": kind, "kernel": kernel, "share": values[0] / total, "ms": values[0] / 1e3, "calls": values[1]}


def budgets(bench: Bench) -> Iterator[Row]:
    """Tokens a second of training by token budget."""
    name = bench.arguments.sizes[min(1, len(bench.arguments.sizes) - 1)]
    for tokens in sorted({max(LONGEST, bench.arguments.tokens // share) for share in (8, 4, 2, 1)}):
        yield _trained(bench, name, tokens)


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    part.__name__: part for part in (correctness, ceilings, training, forward, profile, budgets)
}


def parsed(argv: list[str]) -> Arguments:
    """Read the command line. Raises ConfigError for a part that is not there."""
    arguments = tyro.cli(Arguments, args=argv, prog="python -m benchmarks gpu", description=__doc__)
    for name in arguments.part:
        if name not in PARTS:
            raise ConfigError(f"--part: no part {name!r}{did_you_mean(name, PARTS)}; there are {', '.join(PARTS)}")
    return arguments


def main(argv: list[str]) -> int:
    """Run the parts; returns 1 where one broke or found something wrong."""
    arguments = parsed(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no GPU is seen: see python -m tools gpu_check; --device cpu tries the script without one")
    bench, began = Bench(arguments), time.perf_counter()
    for name in arguments.part or PARTS:
        if time.perf_counter() - began > 60 * arguments.minutes:
            print(f"{name}: left out, {arguments.minutes:g} minutes are over", file=sys.stderr)
            continue
        _run(bench, name)
    wrong = [name for name, part in bench.parts.items() if part["error"] or "WRONG" in json.dumps(part["rows"])]
    if wrong:
        print(f"broken or wrong: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def _run(bench: Bench, name: str) -> None:
    """Run a part; its rows are printed and written as they come, and so is what breaks it."""
    part: dict[str, Any] = {"summary": (PARTS[name].__doc__ or "").strip(), "rows": [], "error": None}
    bench.parts[name] = part
    print(f"{name}: {part['summary']}", flush=True)
    began = time.perf_counter()
    try:
        for row in PARTS[name](bench):
            part["rows"].append(row)
            print("  " + ", ".join(f"{key} {_shown(value)}" for key, value in row.items()), flush=True)
            _write(bench)
    except Exception:  # noqa: BLE001 - the next parts are worth their time all the same
        part["error"] = traceback.format_exc()
        print(part["error"], file=sys.stderr)
    part["seconds"] = time.perf_counter() - began
    _write(bench)
    torch._dynamo.reset()
    if bench.device == "cuda":
        torch.cuda.empty_cache()


def _write(bench: Bench) -> None:
    machine = describe_machine()
    result = {
        "machine": machine.model_dump(),
        "versions": versions([]),
        "revision": revision(),
        "arguments": bench.arguments.model_dump(mode="json"),
        "parts": bench.parts,
    }
    bench.arguments.output.mkdir(parents=True, exist_ok=True)
    write_atomically(bench.arguments.output / "gpu.json", json.dumps(result, indent=1) + "\n")
    lines = [f"# {machine.gpu or machine.cpu}", "", f"Revision {result['revision']}, {result['versions']}."]
    for name, part in bench.parts.items():
        lines += ["", f"## {name}", "", part["summary"], ""]
        columns = list(dict.fromkeys(key for row in part["rows"] for key in row))
        if columns:
            lines += [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
            lines += [f"| {' | '.join(_shown(row.get(key)) for key in columns)} |" for row in part["rows"]]
        if part["error"]:
            lines += ["", "```", part["error"], "```"]
    write_atomically(bench.arguments.output / "gpu.md", "\n".join(lines) + "\n")


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)
