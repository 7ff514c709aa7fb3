"""Cost of a model: time by stage under torch.profiler, time and memory by batch size, a step of training by its parts.

In: an opened model and texts, or an experiment. Out: plain values, and the files of a trace. Stages are the ranges that
:mod:`inference.models.running` records and the operators inside them. On the CPU a stage's time is what its operators
and Python take themselves. On CUDA it is its kernels' time on the device, but for tokenizing and writing, which the
device has no part in: these are the host's time, beside which the device computes.

Shape legend: N texts.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from common.errors import ResourceError
from common.publishing import atomic_file
from common.timing import timed
from inference.models.kinds import Output
from inference.models.model import Model
from inference.models.running import BatchRows, TokenizedTexts, run
from model.device import DTYPES
from monitoring.advice import Facts, advise
from monitoring.sampling.measured_peaks import copy_bytes_per_s, product_flops_per_s
from monitoring.sampling.memory_meter import MemoryMeter
from monitoring.sampling.peak_flops import peak_tflops

Unit: TypeAlias = Literal["batch_size", "tokens"]

NORMS = "norm and activation"
ON_HOST = ("tokenize", "write")
NOT_COMPUTED = (*ON_HOST, "copy to device", "copy back")
NAMES_OF_OPERATORS: dict[str, tuple[str, ...]] = {
    "attention": ("attention", "attn", "softmax"),
    "products": ("linear", "matmul", "addmm", "::mm", "bmm"),
    NORMS: ("norm", "elu", "silu", "tanh"),
    **{name: (name,) for name in ("pooling", *NOT_COMPUTED)},
    "rest": ("",),
}
"""What the name of an operator, or of a recorded range, holds, by stage; the first that fits counts."""
COMPUTED = ("attention", "products", NORMS)
MOST_OPERATORS = 3
PERCENTILES = (5, 50, 95, 99)
_SEED = 0


class Subject(NamedTuple):
    """A model with the texts that it is measured on; ``tokens`` is the budget of a batch."""

    model: Model
    texts: Sequence[str]
    outputs: Sequence[Output]
    tokens: int

    def run(self, texts: Sequence[str], token_budget: int | None = None) -> list[BatchRows]:
        """Rows of these texts; without a budget in a single batch. Texts are cropped to what the model can take."""
        with record_function("tokenize"):
            tokenized = self.model.tokenize(texts, self.model.facts.longest)
        source = TokenizedTexts(tokenized, self.model)
        return list(run(self.model, source, self.outputs, token_budget))

    def token_counts(self, texts: Sequence[str]) -> np.ndarray:
        """(N,) tokens of each text, special tokens included."""
        tokenized = self.model.tokenize(texts, self.model.facts.longest)
        return tokenized.lengths + self.model.facts.special_tokens


def spread(texts: Sequence[str], count: int) -> list[str]:
    """So many texts, evenly over the lengths; all where there are no more."""
    by_length = sorted(texts, key=len)
    places = np.linspace(0, len(texts) - 1, min(count, len(texts))).round().astype(int)
    return [by_length[place] for place in places.tolist()]


def describe(model: Model) -> dict[str, Any]:
    """The model and what it runs on, as plain values."""
    tensors = [*model.backbone.parameters(), *model.backbone.buffers()]
    facts = model.facts
    return {
        "model": facts.name,
        "task": facts.task,
        "architecture": type(model.backbone.model).__name__,
        "random_weights": facts.random_weights,
        "parameters": sum(parameter.numel() for parameter in model.backbone.parameters()),
        "model_size_mb": sum(tensor.nbytes for tensor in tensors) / 1e6,
        "device": facts.device_name,
        "precision": facts.precision,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


# --- time by stage


def profile_stages(subject: Subject, folder: Path) -> dict[str, Any]:
    """Run all texts under the profiler, after a warm-up and a run without it, and write its trace."""
    model, on_cuda = subject.model, subject.model.device.type == "cuda"

    def work() -> None:
        batches = subject.run(subject.texts, subject.tokens)
        with record_function("write"), tempfile.TemporaryFile() as file:
            for batch in batches:
                for rows in batch.arrays.values():
                    np.save(file, rows)

    subject.run(subject.texts[:1])
    batches, seconds = timed(lambda: subject.run(subject.texts, subject.tokens))
    profiler = traced(work, folder, on_cuda)
    spent_s, elements = _by_stage(profiler, on_cuda)
    peaks = _peaks(model.device, model.facts.device_name, model.facts.precision)
    tokens_N = subject.token_counts(subject.texts)
    least_s = _least_seconds(subject, tokens_N, elements, peaks)
    total_s = sum(spent_s.values())
    stages: dict[str, dict[str, Any]] = {
        name: {
            "seconds": spent_s[name],
            "share": spent_s[name] / total_s,
            "share_of_limit": least_s[name] / spent_s[name] if name in least_s and spent_s[name] else None,
        }
        for name in NAMES_OF_OPERATORS
    }
    computing_s = total_s - sum(spent_s[name] for name in NOT_COMPUTED)
    facts = Facts(
        model_waits=max(0.0, 1 - computing_s / (seconds if on_cuda else total_s)),
        attention=stages["attention"]["share"],
        products_of_peak=stages["products"]["share_of_limit"],
    )
    return {
        "tokens_of_a_batch": subject.tokens,
        "batches": len(batches),
        "sequences": len(subject.texts),
        "residues": int(sum(batch.lengths.sum() for batch in batches)),
        "tokens": int(tokens_N.sum()),
        "seconds": seconds,
        "peaks": peaks,
        "stages": stages,
        "operators": operators(profiler, on_cuda),
        "advice": [str(advice) for advice in advise(facts)],
    }


def traced(work: Callable[[], object], folder: Path, on_cuda: bool) -> profile:
    """Profile the work and write its trace."""
    with profiler_of(on_cuda) as profiler:
        work()
    write_trace(profiler, folder, on_cuda)
    return profiler


def profiler_of(on_cuda: bool, **options: Any) -> profile:
    """A profiler with shapes and stacks; options are torch's."""
    # Without 'verbose' the events carry no Python stacks (torch 2.0 and later, pytorch/pytorch#100253).
    verbose = torch._C._profiler._ExperimentalConfig(verbose=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    return profile(
        activities=activities,
        record_shapes=True,
        profile_memory=True,
        with_stack=True,
        experimental_config=verbose,
        **options,
    )


def write_trace(profiler: profile, folder: Path, on_cuda: bool) -> None:
    """Write ``trace.json`` (for Perfetto) and ``stacks.txt`` (stacks with their microseconds, for flame graphs)."""
    with atomic_file(folder / "trace.json") as path:
        profiler.export_chrome_trace(str(path))
    with atomic_file(folder / "stacks.txt") as path:
        profiler.export_stacks(str(path), "self_cuda_time_total" if on_cuda else "self_cpu_time_total")


def operators(profiler: profile, on_cuda: bool) -> list[dict[str, Any]]:
    """The operators that take most time themselves, the largest first; ``share`` is of all on that device."""
    metric = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    times_us = {
        event: getattr(event, metric)
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CPU and ".py(" not in event.key and not event.key.startswith("<")
    }
    total_us = sum(times_us.values()) or 1.0
    largest = sorted(times_us, key=times_us.__getitem__, reverse=True)[:MOST_OPERATORS]
    return [
        {
            "name": event.key,
            "calls": event.count,
            "self_ms": times_us[event] / 1e3,
            "share": times_us[event] / total_us,
        }
        for event in largest
    ]


def _peaks(device: torch.device, name: str, precision: str) -> dict[str, float | str]:
    """Peaks of products, of the data sheet where the device is known, and of memory, bytes read and written."""
    on_cuda = device.type == "cuda"
    known = peak_tflops(name, precision) if on_cuda else None  # type: ignore[arg-type]
    flops = 1e12 * known if known else product_flops_per_s(device, DTYPES[precision], 8192 if on_cuda else 2048)
    source = torch.zeros(2**30 if on_cuda else 2**26, dtype=torch.int8, device=device)
    bytes_per_s = 2 * copy_bytes_per_s(source, torch.empty_like(source))
    return {"flops_per_s": flops, "flops_from": "data sheet" if known else "measured", "bytes_per_s": bytes_per_s}


def _by_stage(profiler: profile, on_cuda: bool) -> tuple[Counter[str], int]:
    """Seconds by stage, and elements that norms and activations take."""
    spent_s, elements = Counter[str](), 0
    for event in profiler.events() or ():
        if event.device_type != DeviceType.CPU or event.is_async:
            continue
        stage, known = _stage(event)
        own_us = event.self_cpu_time_total
        if on_cuda and stage not in ON_HOST:
            # A range also has an entry of its own name on the device.
            own_us = sum(kernel.duration for kernel in event.kernels if kernel.name != event.name)
        spent_s[stage] += own_us / 1e6
        if event is known and stage == NORMS:
            elements += torch.Size(event.input_shapes[0]).numel()
    return spent_s, elements


def _stage(event: Any) -> tuple[str, Any]:
    """Stage of an event by the outermost operator or range around it whose name is known, and that one."""
    stage, known, around = "rest", event, event
    while around is not None:
        fits = (name for name, words in NAMES_OF_OPERATORS.items() if any(word in around.name for word in words))
        name = "rest" if around.is_python_function else next(fits)
        # An output that reads tokens runs the whole model inside of the range of pooling.
        if name != "rest" and (name, stage) not in [("pooling", inner) for inner in COMPUTED]:
            stage, known = name, around
        around = around.cpu_parent
    return stage, known


def _least_seconds(subject: Subject, tokens_N: np.ndarray, elements: int, peaks: dict[str, Any]) -> dict[str, float]:
    """Seconds of a stage at its limit, by the model's shapes and those that were recorded."""
    facts = subject.model.facts
    bytes_each = DTYPES[facts.precision].itemsize
    tokens = float(tokens_N.sum())
    pooled = sum(output.channels for output in subject.outputs) * tokens
    return {
        "products": facts.flops_per_token * tokens / peaks["flops_per_s"],
        "attention": facts.attention_flops * float((tokens_N.astype(float) ** 2).sum()) / peaks["flops_per_s"],
        NORMS: 2 * bytes_each * elements / peaks["bytes_per_s"],
        "pooling": bytes_each * pooled / peaks["bytes_per_s"],
    }


# --- time and memory by batch size


def measure_batches(
    subject: Subject,
    unit: Unit,
    values: Sequence[int],
    warmup_runs: int,
    runs: int,
    show: Callable[[str], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """Measure each size or budget, one after the other, so that none's memory hides in another's.

    Each run takes other texts of a shuffled list, so that the spread of latencies is that of the data as well. Yields a
    row of plain values, times from texts to rows on the host in milliseconds, memory in MB (1e6 bytes), rates in 1/s;
    or with an ``error``.
    """
    order = np.random.default_rng(_SEED).permutation(len(subject.texts))
    shuffled = [subject.texts[place] for place in order.tolist()]
    for value in values:
        show(f"{unit} {value}")
        batches = _batches(subject, shuffled, unit, value)
        try:
            for _ in range(warmup_runs):
                _measured(subject, next(batches))
            with _memory(subject.model.device) as memory_mb:
                measured = [_measured(subject, next(batches)) for _ in range(runs)]
        except ResourceError:
            yield {unit: value, "error": "out of memory", "runs": []}
        else:
            yield {unit: value, "error": None, **_summary(measured), **memory_mb, "runs": measured}


def _measured(subject: Subject, texts: Sequence[str]) -> dict[str, float]:
    """One batch from texts to rows on the host. Raises ResourceError where it was halved for memory."""
    batches, seconds = timed(lambda: subject.run(texts))
    if len(batches) > 1:
        raise ResourceError(f"{len(texts)} texts are out of memory in one batch")
    tokens = int(subject.token_counts(texts).sum())
    latency_ms = 1e3 * seconds
    return {"sequences": len(texts), "batch_tokens": tokens, "ms": latency_ms, "ms_per_sample": latency_ms / len(texts)}


def _summary(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    seconds = sum(run["ms"] for run in runs) / 1e3
    sequences = sum(run["sequences"] for run in runs)
    return {
        "sequences_per_batch": sequences / len(runs),
        "latency_per_sample_ms": _distribution([run["ms_per_sample"] for run in runs]),
        "latency_per_batch_ms": _distribution([run["ms"] for run in runs]),
        "samples_per_s": sequences / seconds,
        "tokens_per_s": sum(run["batch_tokens"] for run in runs) / seconds,
    }


def _distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation (0 of a single value) and percentiles."""
    percentiles = {f"p{percent}": float(np.percentile(values, percent)) for percent in PERCENTILES}
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {"mean": float(np.mean(values)), "std": deviation, **percentiles}


def _batches(subject: Subject, texts: Sequence[str], unit: Unit, value: int) -> Iterator[Sequence[str]]:
    """Without end: so many texts, or as many as the budget of tokens holds, one after the other."""
    costs_N = subject.token_counts(texts) if unit == "tokens" else np.ones(len(texts), dtype=np.int64)
    place = 0
    while True:
        batch: list[str] = []
        left = value
        while not batch or costs_N[place % len(texts)] <= left:
            batch.append(texts[place % len(texts)])
            left -= int(costs_N[place % len(texts)])
            place += 1
        yield batch


@contextmanager
def _memory(device: torch.device) -> Iterator[dict[str, float | None]]:
    """Peak memory of the block in MB (1e6 bytes), filled in when it ends; that of a GPU is None without one."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    resident = MemoryMeter(torch.device("cpu"))
    peaks_mb: dict[str, float | None] = {}
    yield peaks_mb
    peaks_mb["cpu_memory_peak_mb"] = resident.peak_bytes() / 1e6
    peaks_mb["gpu_memory_peak_mb"] = torch.cuda.max_memory_allocated(device) / 1e6 if on_cuda else None
