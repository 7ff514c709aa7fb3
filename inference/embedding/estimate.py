"""Size and time of an embedding job, before it is started.

In: a request. Out: its plan, bytes and seconds, from a measurement of some batches. Nothing is written that stays.
"""

import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.progress import status_line
from dataset.store.conversion import open_store
from dataset.store.reader import Store
from inference.embedding.job import resolved
from inference.embedding.plan import Plan, make_plan
from inference.embedding.request import JobRequest
from inference.embedding.settings import JobFacts, check_settings, format_of
from inference.embedding.worker import open_worker

MEASURED_S = 10.0


class Estimate(NamedTuple):
    """What a job would take, of one model; ``disk_bytes`` of the outputs, without ids."""

    facts: JobFacts
    plan: Plan
    disk_bytes: int
    residues_per_s: float
    seconds: float


def estimate(request: JobRequest) -> list[Estimate]:
    """Size and time of a job, after a measurement of ten seconds for each model; nothing is written that stays."""
    request = resolved(request)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(request.sources, request.ingest, Path(folder))
        return [_estimate(request, model, store) for model in request.models]


def _estimate(request: JobRequest, source: str, store: Store) -> Estimate:
    settings = request.settings
    worker = open_worker(source, settings, request.device or "cpu", store, request.random_weights)
    facts = worker.facts
    check_settings(settings, facts.outputs)
    plan = make_plan(store, settings, facts.longest)
    flops = facts.flops(plan.lengths)
    measured_flops = measured_tokens = 0.0
    start_s: float | None = None
    random = np.random.default_rng(0)
    with status_line() as show:
        show(f"measuring {source}")
        while start_s is None or time.perf_counter() - start_s < MEASURED_S:
            shard = plan.shard(int(random.integers(plan.num_shards)))
            batches = shard.batches()
            piece = shard.part(batches[int(random.integers(len(batches)))])
            worker.compute(piece)
            if start_s is None:  # the first warms up
                start_s = time.perf_counter()
                continue
            measured_flops += facts.flops(piece.lengths)
            measured_tokens += float(piece.lengths.sum())
    passed_s = time.perf_counter() - start_s
    seconds = flops / (measured_flops / passed_s) / (request.workers or 1)
    disk_bytes, every_length = 0, plan.lengths[plan.sequences]
    for output in facts.outputs:
        file_format = format_of(settings, output)
        disk_bytes += file_format.size(output.per, output.channels, settings.dtype, every_length, plan.lengths)
    return Estimate(facts, plan, disk_bytes, measured_tokens / passed_s, seconds)
