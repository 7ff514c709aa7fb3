"""Cost of a classifier: time and memory by batch size, over a whole file, and the operations that take the time.

Time is taken from texts to probabilities on the host, and the device is waited for around each clock. Each run takes
other texts, drawn from a shuffled file, so that the spread of latencies is that of the data as well as of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import record_function

from common.timing import timed
from inference.classifier import ClassifierPipeline, Predictions, Progress
from inference.models.packing import Packed
from inference.trace import traced
from model.device import DTYPES, is_out_of_memory
from monitoring.sampling.memory_meter import MemoryMeter

Unit: TypeAlias = Literal["batch_size", "batch_tokens"]

TRACED_RUNS = 3
BOTTLENECKS = 3
_SEED = 0


@dataclass(frozen=True)
class Run:
    """One measured batch: what it held, special tokens included, and its time.

    ``prepare_ms`` is tokenizing and packing on the host, ``compute_ms`` copying to the device, computing, copying back.
    """

    sequences: int
    tokens: int
    longest: int
    prepare_ms: float
    compute_ms: float
    latency_ms: float
    latency_per_sample_ms: float


@dataclass(frozen=True)
class BatchResult:
    """All runs of one batch size or token budget; ``error`` says why there are none. ``memory_mb`` is in 1e6 bytes."""

    unit: Unit
    value: int
    runs: Sequence[Run] = ()
    memory_mb: dict[str, float | None] | None = None
    error: str | None = None

    def summary(self) -> dict[str, Any]:
        """Plain values: latencies in milliseconds, memory in MB (1e6 bytes), rates in 1/s."""
        base: dict[str, Any] = {self.unit: self.value, "runs": len(self.runs), "error": self.error}
        if self.error or self.memory_mb is None:
            return base
        seconds = sum(run.latency_ms for run in self.runs) / 1e3
        samples, tokens = sum(run.sequences for run in self.runs), sum(run.tokens for run in self.runs)
        peak_mb = self.memory_mb["gpu_memory_peak_mb"] or self.memory_mb["cpu_memory_peak_mb"] or 0.0
        return base | {
            "sequences_per_batch": samples / len(self.runs),
            "latency_per_sample_ms": spread([run.latency_per_sample_ms for run in self.runs]),
            "latency_per_batch_ms": spread([run.latency_ms for run in self.runs]),
            "samples_per_s": samples / seconds,
            "batches_per_s": len(self.runs) / seconds,
            "tokens_per_s": tokens / seconds,
            **self.memory_mb,
            "samples_per_s_per_mb": samples / seconds / peak_mb,
        }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation (0 of a single value) and percentiles."""
    percentiles = {f"p{p}": float(np.percentile(values, p)) for p in (5, 50, 95, 99)}
    std = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {"mean": float(np.mean(values)), "std": std, **percentiles}


def describe(pipeline: ClassifierPipeline) -> dict[str, Any]:
    """The model and what it runs on, as plain values."""
    facts = pipeline.model.facts
    return {
        "parameters": facts.parameters,
        "model_size_mb": facts.parameters * DTYPES[facts.precision].itemsize / 1e6,
        "architecture": type(pipeline.model.backbone.model).__name__,
        "kind": pipeline.label_space.kind,
        "outputs": pipeline.label_space.num_outputs,
        "device": facts.device_name,
        "precision": facts.precision,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def measure_batches(
    pipeline: ClassifierPipeline,
    texts: Sequence[str],
    *,
    unit: Unit = "batch_size",
    values: Sequence[int],
    warmup_runs: int,
    runs: int,
    show: Callable[[str], None] = lambda _: None,
) -> Iterator[BatchResult]:
    """Measure each size or budget, one after the other, so that none's memory hides in another's.

    ``values`` are texts or tokens of a batch, as ``unit`` says; batches start again where there are too few texts.
    """
    order = np.random.default_rng(_SEED).permutation(len(texts))
    shuffled = [texts[index] for index in order]
    for value in values:
        show(f"{unit} {value}")
        batches = _batches(pipeline, shuffled, unit, value)
        try:
            for _ in range(warmup_runs):
                run_once(pipeline, next(batches))
            with _memory(pipeline.model.device) as memory_mb:
                measured = [run_once(pipeline, next(batches)) for _ in range(runs)]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if pipeline.model.device.type == "cuda":
                torch.cuda.empty_cache()
            yield BatchResult(unit, value, error="out of memory")
        else:
            yield BatchResult(unit, value, measured, memory_mb)


def run_once(pipeline: ClassifierPipeline, texts: Sequence[str]) -> Run:
    """One batch from texts to probabilities on the host."""

    def prepare() -> Packed:
        with record_function("tokenize and pack"):
            return pipeline.pack(texts)

    def compute() -> None:
        with record_function("copy to the device"):
            moved = packed.to(pipeline.model.device)
        with record_function("forward"):
            result = pipeline.forward(moved)
        with record_function("copy to the host"):
            result.cpu()

    packed, prepare_s = timed(prepare)
    batch = packed.batch
    _, compute_s = timed(compute)
    times_s = (prepare_s, compute_s, prepare_s + compute_s, (prepare_s + compute_s) / batch.num_sequences)
    return Run(batch.num_sequences, batch.num_tokens, batch.max_seqlen, *(1e3 * time_s for time_s in times_s))


def measure_whole(
    pipeline: ClassifierPipeline, texts: Sequence[str], progress: Progress | None = None
) -> tuple[dict[str, Any], Predictions]:
    """Predict all texts once, as ``predict`` takes them: sorted and packed to the pipeline's budget."""
    pipeline.predict(texts[:1])
    with _memory(pipeline.model.device) as memory_mb:
        predictions, seconds = timed(lambda: pipeline.predict(texts, progress=progress))
    facts = {
        "samples": len(texts),
        "seconds": seconds,
        "samples_per_s": len(texts) / seconds,
        "batch_tokens": pipeline.tokens,
        "cropped_samples": int(np.count_nonzero(predictions.cropped)),
        **memory_mb,
    }
    return facts, predictions


def trace(pipeline: ClassifierPipeline, texts: Sequence[str], folder: Path, batch_size: int) -> list[dict[str, Any]]:
    """Profile a few batches by torch.profiler.

    Writes the files of :func:`inference.trace.traced` into the folder. Returns the operations that take most time
    themselves, the largest first; ``share`` is of all operations' time on that device.
    """
    batches = _batches(pipeline, texts, "batch_size", batch_size)
    run_once(pipeline, next(batches))
    cuda = pipeline.model.device.type == "cuda"
    profiler = traced(lambda: [run_once(pipeline, next(batches)) for _ in range(TRACED_RUNS)], folder, cuda)
    metric = "self_device_time_total" if cuda else "self_cpu_time_total"
    times_us = {
        event: getattr(event, metric) for event in profiler.key_averages() if event.device_type == DeviceType.CPU
    }
    total_us = sum(times_us.values()) or 1.0
    return [
        {
            "name": event.key,
            "calls": event.count,
            "self_ms": times_us[event] / 1e3,
            "share": times_us[event] / total_us,
            "device": pipeline.model.device.type,
        }
        for event in sorted(times_us, key=times_us.__getitem__, reverse=True)[:BOTTLENECKS]
    ]


def _batches(pipeline: ClassifierPipeline, texts: Sequence[str], unit: Unit, value: int) -> Iterator[Sequence[str]]:
    """Without end: so many texts, or as many as the budget of tokens holds, one after the other."""
    budgets = pipeline.token_lengths(texts) if unit == "batch_tokens" else np.ones(len(texts), dtype=np.int64)
    place = 0
    while True:
        batch: list[str] = []
        left = value
        while not batch or budgets[place % len(texts)] <= left:
            batch.append(texts[place % len(texts)])
            left -= int(budgets[place % len(texts)])
            place += 1
        yield batch


@contextmanager
def _memory(device: torch.device) -> Iterator[dict[str, float | None]]:
    """Memory of the block in MB (1e6 bytes), filled in when it ends; that of a GPU is None without one."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    allocated_mb = torch.cuda.memory_allocated(device) / 1e6 if cuda else None
    resident = MemoryMeter(torch.device("cpu"))
    found: dict[str, float | None] = {}
    yield found
    found["cpu_memory_peak_mb"] = resident.peak_bytes() / 1e6
    found["gpu_memory_allocated_mb"] = allocated_mb
    found["gpu_memory_peak_mb"] = torch.cuda.max_memory_allocated(device) / 1e6 if cuda else None
