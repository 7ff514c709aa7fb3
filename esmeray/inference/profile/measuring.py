"""Measure a model: time by stage with torch.profiler, time and memory by batch size, and accuracy.

On the CPU the time of a stage is the self time of its operators and Python code. On CUDA it is the kernel time on the
device. Stages in :data:`ON_HOST` don't use the device: their time is host time, which overlaps with the device.

Shape legend: N texts.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from esmeray.common.errors import ResourceError
from esmeray.common.publishing import atomic_file
from esmeray.common.timing import timed
from esmeray.dataset.batches.plan import longest_first
from esmeray.dataset.store.conversion import job_store
from esmeray.dataset.store.reader import Store
from esmeray.inference.classifier import ClassifierPipeline
from esmeray.inference.classify.labelled import LabelledTexts, TextStream, read_texts
from esmeray.inference.embedding.plan import Shard, make_plan
from esmeray.inference.embedding.section import EmbedSection
from esmeray.inference.embedding.worker import ShardWorker
from esmeray.inference.models.kinds import Limit, Output
from esmeray.inference.models.model import BatchRows, Model, TokenizedTexts, run
from esmeray.inference.models.opening import open_model
from esmeray.inference.models.source import config_of, find_model, limit_of
from esmeray.inference.profile.section import ModelProfileSection
from esmeray.model.device import DTYPES, choose_device
from esmeray.model.metrics.classification import classification_metrics
from esmeray.monitoring.advice import Facts, advise
from esmeray.monitoring.sampling.memory_meter import MemoryMeter
from esmeray.monitoring.sampling.peaks import copy_bytes_per_s, peak_tflops, product_flops_per_s
from esmeray.train_config.section import Overrides
from esmeray.training.config import load_config

NORMS = "norm and activation"
OPERATORS = {
    "attention": ("attention", "attn", "softmax"),
    "products": ("linear", "matmul", "addmm", "::mm", "bmm"),
    NORMS: ("norm", "elu", "silu", "tanh"),
}
"""Substrings of operator names, by stage; the first match counts."""
ON_HOST = ("read", "tokenize", "pack", "write")
NOT_COMPUTED = (*ON_HOST, "copy to device", "copy back")
RANGES = ("pooling", *NOT_COMPUTED)
"""Stages that inference records as profiler ranges."""
INSIDE = {("pooling", stage) for stage in OPERATORS} | {("tokenize", "pack")}
"""Ranges, and inner stages that count separately: an output that reads tokens runs the whole model inside its range."""
WARMUP_RUNS, RUNS = 3, 20
"""Batches of each size that are not measured, and batches that are."""


class Subject(NamedTuple):
    """A model with the outputs to measure.

    ``tokens``: token budget of a batch. ``limit``: limit of texts.
    """

    model: Model
    outputs: Sequence[Output]
    tokens: int
    limit: Limit

    def run(self, texts: Sequence[str], token_budget: int | None = None) -> list[BatchRows]:
        tokenized = TokenizedTexts(self.model.tokenize(texts, *self.limit), self.model)
        return list(run(self.model, tokenized, self.outputs, token_budget))

    def token_counts(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """(N,) tokens per text, special tokens included."""
        return self.model.tokenize(texts, *self.limit).lengths + self.model.facts.special_tokens


class Job(NamedTuple):
    """Work to trace: function that returns results, (N,) token counts of the texts, and number of batches."""

    work: Callable[[], Sequence[NDArray]]
    tokens: NDArray[np.int64]
    batches: int


def open_subject(name: str, settings: EmbedSection, device: str, outputs: Sequence[str] = ()) -> Subject:
    """Open a model with the device's defaults. Without ``outputs``, the mean, or the classes of a classifier."""
    precision, tokens = settings.resolved(device == "cuda")
    # Random weights take the same time.
    model = open_model(name, precision, device, random_weights=True)
    kinds = outputs or ["classes" if "classifier" in model.heads else "mean"]
    return Subject(model, model.outputs(kinds, settings.layers), tokens, Limit(model.facts.longest))


def spread(lengths_N: NDArray[np.integer], count: float) -> NDArray[np.int64]:
    """Indices of about ``count`` texts, at least one, evenly spaced over the sorted lengths; at most all."""
    # Not random: the sample contains the shortest and the longest text, and two profiles use the same texts.
    ranks = np.linspace(0, len(lengths_N) - 1, min(round(count) or 1, len(lengths_N))).round().astype(int)
    return np.argsort(lengths_N, kind="stable")[ranks]


def profile_model(
    name: str, settings: ModelProfileSection, overrides: Overrides, folder: Path, show: Callable[[str], None]
) -> dict[str, Any]:
    """Run the steps of the settings; trace files are written to ``folder``."""
    show(f"opening {name}")
    device = settings.device or choose_device().type
    shared = settings.model_dump(include={"layers", "long", "max_length", "tokens", "precision"})
    embed = EmbedSection(outputs=settings.outputs or ["mean"], **shared)
    subject = open_subject(name, embed, device, settings.outputs)
    facts, backbone = subject.model.facts, subject.model.backbone
    result: dict[str, Any] = {
        "model": facts.name,
        "task": facts.task,
        "architecture": type(backbone.model).__name__,
        "random_weights": facts.random_weights,
        "parameters": sum(parameter.numel() for parameter in backbone.parameters()),
        "model_size_mb": sum(tensor.nbytes for tensor in (*backbone.parameters(), *backbone.buffers())) / 1e6,
        "device": facts.device_name,
        "precision": facts.precision,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    with tempfile.TemporaryDirectory() as scratch:
        if "classifier" in subject.model.heads:
            config = config_of(find_model(name).folder, overrides)
            data, tokenizer, space = config.data, config.model.tokenizer, subject.model.heads["classifier"].label_space
            subject = subject._replace(limit=limit_of(data))
            if "accuracy" in settings.steps:
                labelled = read_texts(data.source, data, tokenizer, space, overrides=overrides)
                result["accuracy"] = _accuracy(subject, labelled, show)
                texts = labelled.texts
            else:  # a file without labels is enough
                stream = TextStream(data.source, data.labels, tokenizer, data.ingest)
                texts = [text for part in stream.parts() for text in part.texts]
            job = _texts_job(subject, texts, settings.batches)
        else:
            data = load_config(None, overrides).data
            store = job_store(data.source, data.ingest, Path(scratch))
            texts = [store.text(record) for record in range(len(store))]
            embed = embed.model_copy(update={"tokens": subject.tokens})  # the device's default, which the plan needs
            job = _store_job(ShardWorker(subject.model, store, embed), store, embed, settings.batches)
        if "stages" in settings.steps:
            show("tracing")
            subject.run(texts[:1])  # warm-up
            result |= profile_stages(subject, job, folder)
        if "batch_sizes" in settings.steps and settings.batch_sizes:
            result["batch_sizes"] = measure_batches(subject, texts, settings, show)
    return result


def _texts_job(subject: Subject, texts: Sequence[str], batches: int) -> Job:
    """About ``batches`` batches of texts, evenly spaced over the lengths."""
    tokens_N = subject.token_counts(texts)
    chosen = spread(tokens_N, batches * subject.tokens / float(tokens_N.mean()))
    sample = [texts[index] for index in chosen.tolist()]
    return Job(
        lambda: [rows for batch in subject.run(sample, subject.tokens) for rows in batch.arrays.values()],
        tokens_N[chosen],
        len(longest_first(tokens_N[chosen], subject.tokens)),
    )


def _store_job(worker: ShardWorker, store: Store, settings: EmbedSection, batches: int) -> Job:
    """About ``batches`` batches of a store's sequences, read and computed as in an embedding job."""
    plan, special = make_plan(store, settings, worker.facts.longest), worker.facts.special_tokens
    chosen = spread(plan.lengths, batches * plan.budget / float(plan.lengths.mean() + special))
    shard = Shard(0, plan.records[chosen], plan.lengths[chosen], plan.budget, plan.window)
    return Job(
        lambda: [values for arrays in worker.compute(shard)[0].values() for values in arrays.values()],
        shard.lengths + special,
        len(shard.batches()),
    )


def _accuracy(subject: Subject, labelled: LabelledTexts, show: Callable[[str], None]) -> dict[str, Any]:
    """All metrics of the predictions for the whole file, and their time."""
    pipeline = ClassifierPipeline(subject.model, tokens=subject.tokens, **subject.limit._asdict())
    count = len(labelled.texts)
    predictions, seconds = timed(
        lambda: pipeline.predict_clean(
            labelled.texts, progress=lambda done, total: show(f"accuracy: {done:,} of {total:,}")
        )
    )
    rows = predictions.kept_residues()
    targets = labelled.targets if rows is None else labelled.targets[rows]
    return {
        "samples": count,
        "seconds": seconds,
        "samples_per_s": count / seconds,
        "metrics": classification_metrics(pipeline.label_space.kind, predictions.probabilities, targets),
    }


# --- time by stage


def profile_stages(subject: Subject, job: Job, folder: Path) -> dict[str, Any]:
    """Trace the job with the profiler, after a run without it, and write the trace."""
    model, on_cuda = subject.model, subject.model.device.type == "cuda"
    _, seconds = timed(job.work)  # rates are from this run, because the profiler has its own overhead
    with profiler_of(on_cuda) as profiler:
        results = job.work()
        # A job writes its shards. Here they are written to a temporary file, to measure that stage.
        with record_function("write"), tempfile.TemporaryFile() as file:
            for values in results:
                np.save(file, values)
    write_trace(profiler, folder, on_cuda)
    spent_s, elements = _by_stage(profiler, on_cuda)
    peaks = _peaks(model)
    least_s = _least_seconds(subject, job.tokens, elements, peaks)
    total_s = sum(spent_s.values())
    stages: dict[str, dict[str, Any]] = {
        name: {
            "seconds": spent_s[name],
            "share": spent_s[name] / total_s,
            "share_of_limit": least_s[name] / spent_s[name] if name in least_s and spent_s[name] else None,
        }
        for name in (*OPERATORS, *RANGES, "rest")
    }
    # On CUDA host and device overlap: the sum over stages is not wall time, which comes from the run without the
    # profiler.
    computing_s = total_s - sum(spent_s[name] for name in NOT_COMPUTED)
    shares = {
        "model_waits": max(0.0, 1 - computing_s / (seconds if on_cuda else total_s)),
        "attention": stages["attention"]["share"],
        "products_of_peak": stages["products"]["share_of_limit"],
    }
    tokens, count = int(job.tokens.sum()), len(job.tokens)
    return {
        "tokens_of_a_batch": subject.tokens,
        "batches": job.batches,
        "sequences": count,
        "residues": tokens - count * model.facts.special_tokens,
        "tokens": tokens,
        "seconds": seconds,
        "peaks": peaks,
        "stages": stages,
        "operators": operators(profiler, on_cuda),
        "advice": [str(advice) for advice in advise(Facts(shares))],
    }


def profiler_of(on_cuda: bool, **options: Any) -> profile:
    """A profiler with shapes and stacks; ``options`` are torch's."""
    return profile(
        activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_cuda],
        # Without 'verbose' the events carry no Python stacks (torch 2.0 and later, pytorch/pytorch#100253).
        experimental_config=torch._C._profiler._ExperimentalConfig(verbose=True),
        record_shapes=True,
        profile_memory=True,
        with_stack=True,
        **options,
    )


def write_trace(profiler: profile, folder: Path, on_cuda: bool) -> None:
    """Write ``trace.json`` (for Perfetto) and ``stacks.txt`` (stacks with their microseconds, for flame graphs)."""
    with atomic_file(folder / "trace.json") as path:
        profiler.export_chrome_trace(str(path))
    with atomic_file(folder / "stacks.txt") as path:
        profiler.export_stacks(str(path), "self_cuda_time_total" if on_cuda else "self_cpu_time_total")


def operators(profiler: profile, on_cuda: bool) -> list[dict[str, Any]]:
    """Operators with the most self time, largest first; ``share`` refers to all operators on that device."""
    metric = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    times_us = {
        event: getattr(event, metric)
        for event in profiler.key_averages()
        # Operators only: Python events are recorded for the stacks.
        if event.device_type == DeviceType.CPU and ".py(" not in event.key and not event.key.startswith("<")
    }
    total_us = sum(times_us.values()) or 1.0
    return [
        {"name": e.key, "calls": e.count, "self_ms": times_us[e] / 1e3, "share": times_us[e] / total_us}
        for e in sorted(times_us, key=times_us.__getitem__, reverse=True)[:3]
    ]


def _peaks(model: Model) -> dict[str, float | str]:
    """Peaks of matrix products (from the data sheet, if the device is known) and of memory (read plus write)."""
    device, on_cuda = model.device, model.device.type == "cuda"
    known = peak_tflops(model.facts.device_name, model.facts.precision) if on_cuda else None  # type: ignore[arg-type]
    # Large enough to fill the device, small enough for a second: 8,192² products, and 1 GB, beyond any cache.
    size = 8192 if on_cuda else 2048
    flops = 1e12 * known if known else product_flops_per_s(device, DTYPES[model.facts.precision], size)
    source = torch.zeros(2**30 if on_cuda else 2**26, dtype=torch.int8, device=device)
    return {
        "flops_per_s": flops,
        "flops_from": "data sheet" if known else "measured",
        # A copy reads and writes, so its bytes count twice.
        "bytes_per_s": 2 * copy_bytes_per_s(source, torch.empty_like(source)),
    }


def _by_stage(profiler: profile, on_cuda: bool) -> tuple[Counter[str], int]:
    """Seconds by stage, and the number of input elements of norms and activations."""
    spent_s, elements = Counter[str](), 0
    for event in profiler.events() or ():
        if event.device_type != DeviceType.CPU or event.is_async:
            continue
        stage, known = _stage(event)
        own_us = event.self_cpu_time_total
        if on_cuda and stage not in ON_HOST:
            # The device also has an entry with the range's own name.
            own_us = sum(kernel.duration for kernel in event.kernels if kernel.name != event.name)
        spent_s[stage] += own_us / 1e6
        if event is known and stage == NORMS:  # outermost only: inner operators have the same elements
            elements += torch.Size(event.input_shapes[0]).numel()
    return spent_s, elements


def _stage(event: Any) -> tuple[str, Any]:
    """Stage of an event, from its outermost known operator or range, and that operator or range."""
    stage, known, around = "rest", event, event
    while around is not None:
        name = _name(around)
        if name != "rest" and (name, stage) not in INSIDE:
            stage, known = name, around
        around = around.cpu_parent
    return stage, known


def _name(event: Any) -> str:
    if event.name in RANGES and not event.is_python_function:
        return event.name
    fits = (stage for stage, words in OPERATORS.items() if any(word in event.name for word in words))
    return "rest" if event.is_python_function else next(fits, "rest")


def _least_seconds(subject: Subject, tokens_N: np.ndarray, elements: int, peaks: dict[str, Any]) -> dict[str, float]:
    """Minimum seconds of a stage at the device's limit, from the model's shapes and recorded shapes."""
    facts = subject.model.facts
    bytes_each = DTYPES[facts.precision].itemsize
    tokens = float(tokens_N.sum())
    return {
        "products": facts.flops_per_token * tokens / peaks["flops_per_s"],
        "attention": facts.attention_flops * float((tokens_N.astype(float) ** 2).sum()) / peaks["flops_per_s"],
        NORMS: 2 * bytes_each * elements / peaks["bytes_per_s"],
        "pooling": bytes_each * tokens * sum(output.channels for output in subject.outputs) / peaks["bytes_per_s"],
    }


# --- time and memory by batch size


def measure_batches(
    subject: Subject, texts: Sequence[str], settings: ModelProfileSection, show: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the sizes one after the other, so that each has its own memory peak.

    Each run takes different texts of a shuffled list, so that latencies also vary with the data. Times are from texts
    to rows on the host in ms, memory is in MB (1e6 bytes), rates in 1/s. A row may have an ``error``.
    """
    rows: list[dict[str, Any]] = []
    device, on_cuda = subject.model.device, subject.model.device.type == "cuda"
    shuffled = [texts[index] for index in np.random.default_rng(0).permutation(len(texts)).tolist()]
    for size in settings.batch_sizes:
        show(f"batch size {size}")
        endless = cycle(shuffled)
        try:
            for _ in range(WARMUP_RUNS):
                _measured(subject, [*islice(endless, size)])
            if on_cuda:
                torch.cuda.reset_peak_memory_stats(device)
            resident = MemoryMeter(torch.device("cpu"))  # created after the warm-up, to measure this size's peak
            measured = [_measured(subject, [*islice(endless, size)]) for _ in range(RUNS)]
        except ResourceError:
            rows.append({"batch_size": size, "error": "out of memory", "runs": []})
        else:
            memory_mb = {
                "cpu_memory_peak_mb": resident.peak_bytes() / 1e6,
                "gpu_memory_peak_mb": torch.cuda.max_memory_allocated(device) / 1e6 if on_cuda else None,
            }
            rows.append({"batch_size": size, "error": None, **_summary(measured), **memory_mb, "runs": measured})
    return {"unit": "batch_size", "rows": rows}


def _measured(subject: Subject, texts: Sequence[str]) -> dict[str, float]:
    """Time one batch from texts to rows on the host. Raises ResourceError if the batch was split for lack of memory."""
    batches, seconds = timed(lambda: subject.run(texts))
    # The loop splits a batch and continues; its time would be for a smaller size than requested.
    if len(batches) > 1:
        raise ResourceError(f"{len(texts)} texts are out of memory in one batch")
    count, tokens = len(texts), int(subject.token_counts(texts).sum())
    return {"sequences": count, "batch_tokens": tokens, "ms": 1e3 * seconds, "ms_per_sample": 1e3 * seconds / count}


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
    """Mean, standard deviation and percentiles."""
    return {
        "mean": float(np.mean(values)),
        "std": float(np.std(values, ddof=1)),
        **{f"p{percent}": float(np.percentile(values, percent)) for percent in (5, 50, 95, 99)},
    }
