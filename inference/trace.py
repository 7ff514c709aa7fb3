"""A piece of work under torch.profiler, and the files of its trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from common.publishing import atomic_file


def traced(work: Callable[[], object], folder: Path, on_cuda: bool) -> profile:
    """Profile the work, with shapes and stacks.

    Writes ``trace.json`` (for Perfetto or chrome://tracing) and ``stacks.txt`` (one stack a line and its microseconds,
    for flame graphs) into the folder.
    """
    # Without 'verbose' the events carry no Python stacks (torch 2.0 and later, pytorch/pytorch#100253).
    verbose = torch._C._profiler._ExperimentalConfig(verbose=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(
        activities=activities, record_shapes=True, profile_memory=True, with_stack=True, experimental_config=verbose
    ) as profiler:
        work()
    with atomic_file(folder / "trace.json") as path:
        profiler.export_chrome_trace(str(path))
    with atomic_file(folder / "stacks.txt") as path:
        profiler.export_stacks(str(path), "self_cuda_time_total" if on_cuda else "self_cpu_time_total")
    return profiler
