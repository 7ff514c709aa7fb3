"""Faults injected into real workers."""

import functools
import os
import signal
import threading
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Literal, TypeAlias
from unittest import mock

import torch
from torch import nn

from esmeray.cluster.collective import WorkerContext
from esmeray.cluster.placement import Workers
from esmeray.training.config import Config
from esmeray.tuning.records import Job, Measurement
from esmeray.tuning.trial import TrainingWork, measure_on_worker
from esmeray.tuning.workers import WorkerGroup

Fault: TypeAlias = Literal["out_of_memory", "crash", "hang", "nan"]


def measure_with_faults(
    faults: Mapping[tuple[str, object], Fault], *, config: Config, context: WorkerContext, **options: Any
) -> Measurement:
    """Measure a trial that fails in its second step on the last worker if its settings match a fault.

    ``faults``, e.g.: ``{("batch.tokens", 512): "crash"}``.
    """
    fault = next((fault for (key, value), fault in faults.items() if attrgetter(key)(config) == value), None)
    if fault is None or context.rank < context.world_size - 1:
        return measure_on_worker(config, context, **options)
    step = TrainingWork.step
    taken: list[TrainingWork] = []

    def failing_step(work: TrainingWork, *batches: Any) -> bool:
        if taken:
            _fail(fault, work._engine.module)
        taken.append(work)
        return step(work, *batches)

    with mock.patch.object(TrainingWork, "step", failing_step):
        return measure_on_worker(config, context, **options)


def _fail(fault: Fault, model: nn.Module) -> None:
    """Fail with out of memory, a killed process, a hang, or NaN parameters."""
    if fault == "out_of_memory":
        raise torch.OutOfMemoryError("injected: out of memory")
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        threading.Event().wait()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)


def a_group(faults: Mapping[tuple[str, object], Fault], workers: Workers, job: Job) -> WorkerGroup:
    """A worker group whose trials fail for some settings."""
    return WorkerGroup(workers, job, functools.partial(measure_with_faults, faults))
