"""Cost of a classifier: time and memory by batch size, over a whole file, and the operations that take the time.

In: a pipeline and texts. Out: samples and their summaries; :mod:`tools.profile_classifier` writes them. Time is taken
from texts to probabilities on the host (tokenizing, packing, copying, computing, copying back), and the device is
waited for around each clock; some runs warm up and don't count. Each run takes other texts, drawn from a shuffled file,
so that the spread of latencies is that of the data as well as of the machine. A batch that is out of memory is a row
that says so.

Shape legend: N texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from common.publishing import atomic_file
from common.timing import timed
from dataset.packed_batch import PackedBatch
from inference.classifier import ClassifierPipeline, Predictions, Progress
from training.engine.memory_meter import MemoryMeter, is_out_of_memory

Unit: TypeAlias = Literal["batch_size", "batch_tokens"]

PERCENTILES = (5, 50, 95, 99)
TRACED_RUNS = 3
BOTTLENECKS = 3
_SEED = 0


@dataclass(frozen=True)
class Run:
    """One measured batch.

    Attributes:
        sequences, tokens, longest: what it held; special tokens included.
        prepare_s: tokenizing and packing, on the host.
        compute_s: copying to the device, computing, copying back.
    """

    sequences: int
    tokens: int
    longest: int
    prepare_s: float
    compute_s: float

    @property
    def latency_s(self) -> float:
        """From texts to probabilities on the host."""
        return self.prepare_s + self.compute_s


@dataclass(frozen=True)
class Memory:
    """Bytes; the GPU's are None where there is none. ``gpu_allocated`` is before the runs: the weights."""

    cpu_peak: int
    gpu_allocated: int | None
    gpu_peak: int | None

    def in_mb(self) -> dict[str, float | None]:
        """The same in MB (1e6 bytes)."""
        return {
            "cpu_memory_peak_mb": self.cpu_peak / 1e6,
            "gpu_memory_allocated_mb": None if self.gpu_allocated is None else self.gpu_allocated / 1e6,
            "gpu_memory_peak_mb": None if self.gpu_peak is None else self.gpu_peak / 1e6,
        }

    @property
    def peak(self) -> int:
        """Of the device that computes."""
        return self.cpu_peak if self.gpu_peak is None else self.gpu_peak


@dataclass(frozen=True)
class BatchResult:
    """Everything of one batch size or token budget; ``error`` says why there are no runs."""

    unit: Unit
    value: int
    runs: list[Run] = field(default_factory=list)
    memory: Memory | None = None
    error: str | None = None

    def summary(self) -> dict[str, Any]:
        """Plain values: latencies in milliseconds, memory in MB (1e6 bytes), rates in 1/s."""
        base: dict[str, Any] = {self.unit: self.value, "runs": len(self.runs), "error": self.error}
        if not self.runs or self.memory is None:
            return base
        seconds, sequences, tokens = (
            sum(values) for values in zip(*((r.latency_s, r.sequences, r.tokens) for r in self.runs), strict=True)
        )
        return base | {
            "sequences_per_batch": sequences / len(self.runs),
            "tokens_per_batch": tokens / len(self.runs),
            "latency_per_sample_ms": spread([1e3 * run.latency_s / run.sequences for run in self.runs]),
            "latency_per_batch_ms": spread([1e3 * run.latency_s for run in self.runs]),
            "prepare_share": sum(run.prepare_s for run in self.runs) / seconds,
            "samples_per_s": sequences / seconds,
            "batches_per_s": len(self.runs) / seconds,
            "tokens_per_s": tokens / seconds,
            **self.memory.in_mb(),
            "samples_per_s_per_mb": sequences / seconds / (self.memory.peak / 1e6),
        }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation (0 of a single value) and percentiles."""
    array = np.asarray(values, dtype=np.float64)
    percentiles = {f"p{p}": float(np.percentile(array, p)) for p in PERCENTILES}
    return {"mean": float(array.mean()), "std": float(array.std(ddof=1)) if array.size > 1 else 0.0, **percentiles}


def describe(pipeline: ClassifierPipeline) -> dict[str, Any]:
    """The model and what it runs on, as plain values."""
    tensors = [*pipeline.model.parameters(), *pipeline.model.buffers()]
    cuda = pipeline.device.type == "cuda"
    return {
        "parameters": sum(parameter.numel() for parameter in pipeline.model.parameters()),
        "model_size_mb": sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6,
        "architecture": type(pipeline.model.backbone.model).__name__,
        "kind": pipeline.label_space.kind,
        "outputs": pipeline.label_space.num_outputs,
        "device": torch.cuda.get_device_name(pipeline.device) if cuda else str(pipeline.device),
        "amp_dtype": pipeline.amp_dtype,
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

    Args:
        pipeline: what is measured.
        texts: to draw batches from; batches start again where there are too few.
        unit: of ``values``: texts or tokens of a batch.
        values: sizes or budgets.
        warmup_runs, runs: batches that don't count, and that do.
        show: receives what is being measured.
    """
    order = np.random.default_rng(_SEED).permutation(len(texts))
    shuffled = [texts[index] for index in order]
    for value in values:
        show(f"{unit} {value}")
        batches = _batches(pipeline, shuffled, unit, value)
        try:
            for _ in range(warmup_runs):
                run_once(pipeline, next(batches))
            watch = _MemoryWatch(pipeline.device)
            measured = [run_once(pipeline, next(batches)) for _ in range(runs)]
        except Exception as error:
            if not _lacks_memory(error):
                raise
            if pipeline.device.type == "cuda":
                torch.cuda.empty_cache()
            yield BatchResult(unit, value, error="out of memory")
        else:
            yield BatchResult(unit, value, measured, watch.read())


def run_once(pipeline: ClassifierPipeline, texts: Sequence[str]) -> Run:
    """One batch from texts to probabilities on the host."""

    def prepare() -> PackedBatch:
        with record_function("tokenize and pack"):
            return pipeline.pack(texts)

    def compute() -> None:
        with record_function("copy to the device"):
            moved = batch.to(pipeline.device)
        with record_function("forward"):
            result = pipeline.forward(moved)
        with record_function("copy to the host"):
            result.cpu()

    batch, prepare_s = timed(prepare)
    _, compute_s = timed(compute)
    return Run(batch.num_sequences, batch.num_tokens, batch.max_seqlen, prepare_s, compute_s)


def measure_whole(
    pipeline: ClassifierPipeline, texts: Sequence[str], progress: Progress | None = None
) -> tuple[dict[str, Any], Predictions]:
    """Predict all texts once, as ``predict`` takes them: sorted and packed to the pipeline's budget."""
    pipeline.predict(texts[:1])
    watch = _MemoryWatch(pipeline.device)
    predictions, seconds = timed(lambda: pipeline.predict(texts, progress=progress))
    memory = watch.read().in_mb()
    facts = {
        "samples": len(texts),
        "seconds": seconds,
        "samples_per_s": len(texts) / seconds,
        "batch_tokens": pipeline.batch_tokens,
        "cropped_samples": int(np.count_nonzero(predictions.cropped)),
        "cpu_memory_peak_mb": memory["cpu_memory_peak_mb"],
        "gpu_memory_peak_mb": memory["gpu_memory_peak_mb"],
    }
    return facts, predictions


@dataclass(frozen=True)
class Bottleneck:
    """An operation and the time spent in it itself; ``share`` is of all operations' time on that device."""

    name: str
    calls: int
    self_ms: float
    share: float
    device: str


def trace(pipeline: ClassifierPipeline, texts: Sequence[str], folder: Path, batch_size: int) -> list[dict[str, Any]]:
    """Profile a few batches by torch.profiler.

    Args:
        pipeline: what is profiled.
        texts: to draw batches from.
        folder: exists; gets ``trace.json`` (for Perfetto or chrome://tracing) and ``stacks.txt`` (one stack a line and
            its microseconds, for flame graphs).
        batch_size: texts of a batch.

    Returns:
        :class:`Bottleneck` of the operations that take most time themselves, the largest first, as plain values.
    """
    batches = _batches(pipeline, texts, "batch_size", batch_size)
    run_once(pipeline, next(batches))
    cuda = pipeline.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    # Without 'verbose' the events carry no Python stacks (torch 2.0 and later, pytorch/pytorch#100253).
    verbose = torch._C._profiler._ExperimentalConfig(verbose=True)
    with profile(
        activities=activities, record_shapes=True, profile_memory=True, with_stack=True, experimental_config=verbose
    ) as profiler:
        for _ in range(TRACED_RUNS):
            run_once(pipeline, next(batches))
    with atomic_file(folder / "trace.json") as path:
        profiler.export_chrome_trace(str(path))
    with atomic_file(folder / "stacks.txt") as path:
        profiler.export_stacks(str(path), "self_cuda_time_total" if cuda else "self_cpu_time_total")
    largest = _largest(profiler, "self_device_time_total" if cuda else "self_cpu_time_total", pipeline.device.type)
    return [asdict(bottleneck) for bottleneck in largest]


def _largest(profiler: profile, metric: str, device: str) -> list[Bottleneck]:
    operations = [event for event in profiler.key_averages() if event.device_type == DeviceType.CPU]
    total_us = sum(getattr(event, metric) for event in operations) or 1.0
    ranked = sorted(operations, key=lambda event: -getattr(event, metric))[:BOTTLENECKS]
    return [
        Bottleneck(event.key, event.count, getattr(event, metric) / 1e3, getattr(event, metric) / total_us, device)
        for event in ranked
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


class _MemoryWatch:
    """Peaks from now on."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device if device.type == "cuda" else None
        self._resident = MemoryMeter(torch.device("cpu"))
        if self._gpu is not None:
            torch.cuda.reset_peak_memory_stats(self._gpu)
            self._allocated = torch.cuda.memory_allocated(self._gpu)

    def read(self) -> Memory:
        """Read the peaks."""
        peak = self._resident.peak_bytes()
        if self._gpu is None:
            return Memory(peak, None, None)
        return Memory(peak, self._allocated, torch.cuda.max_memory_allocated(self._gpu))


def _lacks_memory(error: BaseException | None) -> bool:
    """Return whether this, or an error that it was raised from, is a lack of memory."""
    while error is not None and not is_out_of_memory(error):
        error = error.__cause__
    return error is not None
