"""Where the time of an embedding job goes, by stage, and how near each stage comes to what its device can do.

In: the job's own worker and a sample of its sequences. Out: plain values and the files of a trace. On the CPU a stage's
time is what its operators and Python take themselves. On CUDA it is its kernels' time on the device, but for tokenizing
and writing, which the device has no part in: these are the host's time, beside which the device computes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import record_function

from common.timing import timed
from inference.embedding.plan import Shard
from inference.embedding.shard_files import ShardFiles
from inference.embedding.worker import ShardWorker
from inference.trace import traced
from model.device import DTYPES
from monitoring.advice import Facts, advise
from monitoring.sampling.measured_peaks import copy_bytes_per_s, product_flops_per_s
from monitoring.sampling.peak_flops import peak_tflops

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
"""What the name of an operator, or of a range of the worker, holds, by stage; the first that fits counts."""


def profile_shard(worker: ShardWorker, shard: Shard, folder: Path, scratch: Path) -> dict[str, Any]:
    """Compute and write the shard under the profiler, after a warm-up and a run without it.

    ``trace.json`` and ``stacks.txt`` go to ``folder``, the shard's own files to ``scratch``.
    """
    facts, precision = worker.facts, worker.facts.precision
    on_cuda = worker.model.device.type == "cuda"

    def work() -> None:
        with record_function("shard"):
            computed, row = worker.compute(shard)
            with record_function("write"):
                ShardFiles(scratch).write(computed, row)

    worker.compute(shard.part(shard.batches()[0]))
    (_, row), seconds = timed(lambda: worker.compute(shard))
    spent_s, elements = _by_stage(traced(work, folder, on_cuda), on_cuda)
    peaks = _peaks(worker.model.device, facts.device_name, precision)
    least_s = _least_seconds(worker, shard, elements, peaks)
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
    found = Facts(
        model_waits=max(0.0, 1 - computing_s / (seconds if on_cuda else total_s)),
        attention=stages["attention"]["share"],
        products_of_peak=stages["products"]["share_of_limit"],
    )
    return {
        "model": facts.name,
        "random_weights": facts.random_weights,
        "device": facts.device_name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "precision": precision,
        "batch_tokens": shard.budget,
        **row.model_dump(include={"batches", "sequences", "residues", "tokens"}),
        "seconds": seconds,
        "peaks": peaks,
        "stages": stages,
        "advice": [str(advice) for advice in advise(found)],
    }


def _peaks(device: torch.device, name: str, precision: str) -> dict[str, float | str]:
    """Peaks of products, of the data sheet where the device is known, and of memory, bytes read and written."""
    on_cuda = device.type == "cuda"
    known = peak_tflops(name, precision) if on_cuda else None  # type: ignore[arg-type]
    flops = 1e12 * known if known else product_flops_per_s(device, DTYPES[precision], 8192 if on_cuda else 2048)
    source = torch.zeros(2**30 if on_cuda else 2**26, dtype=torch.int8, device=device)
    bytes_per_s = 2 * copy_bytes_per_s(source, torch.empty_like(source))
    return {"flops_per_s": flops, "flops_from": "data sheet" if known else "measured", "bytes_per_s": bytes_per_s}


def _by_stage(profiler: torch.profiler.profile, on_cuda: bool) -> tuple[Counter[str], int]:
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
        if not around.is_python_function and (name := next(fits)) != "rest":
            stage, known = name, around
        around = around.cpu_parent
    return stage, known


def _least_seconds(worker: ShardWorker, shard: Shard, elements: int, peaks: dict[str, Any]) -> dict[str, float]:
    """Seconds of a stage at its limit, by the model's shapes and those that were recorded."""
    facts = worker.facts
    tokens_n = shard.lengths.astype(float) + facts.special_tokens
    bytes_each = DTYPES[facts.precision].itemsize
    pooled = sum(output.channels for output in facts.outputs) * float(tokens_n.sum())
    return {
        "products": facts.flops_per_token * float(tokens_n.sum()) / peaks["flops_per_s"],
        "attention": facts.attention_flops * float((tokens_n**2).sum()) / peaks["flops_per_s"],
        NORMS: 2 * bytes_each * elements / peaks["bytes_per_s"],
        "pooling": bytes_each * pooled / peaks["bytes_per_s"],
    }
