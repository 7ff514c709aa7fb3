"""Where workers go: how many there are on which cores and devices, before any is started.

In: what the config asks for, what each machine has. Out: :class:`Workers`, or a refusal. Imports neither Ray nor torch,
so that a plan and a refusal are there at once.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from train_config.errors import ResourceError
from train_config.schema import RaySection


class NodeResources(NamedTuple):
    """What one machine offers to training."""

    cpus: int
    gpus: int


@dataclass(frozen=True)
class Workers:
    """How many training workers there are and what each reserves."""

    count: int
    cpus_each: int
    use_gpu: bool

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``."""
        return "cuda" if self.use_gpu else "cpu"


def place_workers(section: RaySection, nodes: list[NodeResources]) -> Workers:
    """Turn ``auto`` into numbers, and refuse at once what the cluster can't hold.

    Args:
        section: what was asked for.
        nodes: what each machine has; a worker lies on one of them whole.

    Raises:
        ResourceError: more workers or cores than there are; says what there is.
    """
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    use_gpu = gpus > 0
    count = section.num_workers if section.num_workers != "auto" else gpus if use_gpu else min(2, max(1, cpus))
    has = f"the cluster has {cpus} CPU cores and {gpus} GPUs on {len(nodes)} machine{'s' if len(nodes) > 1 else ''}"
    available = _places(nodes, 1, use_gpu)
    if count > available:
        unit = "GPU and CPU core" if use_gpu else "CPU core"
        raise ResourceError(
            f"ray.num_workers: {count} workers asked, one {unit} each, but {has}: ask for at most {available}"
        )
    most_cpus_each = max(each for each in range(1, cpus + 1) if _places(nodes, each, use_gpu) >= count)
    cpus_each = section.cpus_per_worker if section.cpus_per_worker != "auto" else most_cpus_each
    if cpus_each > most_cpus_each:
        raise ResourceError(
            f"ray.cpus_per_worker: {count} workers with {cpus_each} CPU cores each asked, but {has}: "
            f"ask for at most {most_cpus_each}"
        )
    return Workers(count, cpus_each, use_gpu)


def _places(nodes: list[NodeResources], cpus_each: int, use_gpu: bool) -> int:
    """Workers that fit when each takes so many cores, and a GPU where ``use_gpu``."""
    return sum(min(node.cpus // cpus_each, node.gpus) if use_gpu else node.cpus // cpus_each for node in nodes)


def local_resources() -> list[NodeResources]:
    """CPU cores that this process may use and GPUs of this machine, without starting anything."""
    import torch

    return [NodeResources(min(len(os.sched_getaffinity(0)), _cpu_quota()), torch.cuda.device_count())]


def _cpu_quota() -> int:
    """Cores that a container may use at once (cgroup v2), however many it sees."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return sys.maxsize
    return sys.maxsize if quota == "max" else max(1, int(quota) // int(period))
