"""Description of the machine, the versions and the revision that results belong to."""

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from importlib.metadata import version

import psutil
from pydantic import BaseModel

from benchmarks.harness.stage import REPOSITORY
from esmeray.common.processor import CPU_INFO

_NOISE = re.compile(r"\((r|tm)\)|processor|cpu|\d+-core|@.*", re.IGNORECASE)


class Machine(BaseModel):
    """A machine, as far as speed depends on it."""

    cpu: str
    cores: int
    memory_gib: float
    gpu: str | None
    gpu_memory_gib: float | None
    system: str
    python: str

    @property
    def slug(self) -> str:
        """Name of its folder: the GPU where there is one, else the CPU and its cores."""
        return slugify(self.gpu) if self.gpu else f"{slugify(self.cpu)}-{self.cores}-cores"


def describe_machine() -> Machine:
    """This machine; of several GPUs the first, since one is measured."""
    import torch  # takes a second, which --help and --list need not wait for

    # The model's name stands there alone: platform.processor() is the architecture, or empty, on Linux.
    cpu = re.search(r"^model name\s*: (.+)$", CPU_INFO.read_text(encoding="utf-8"), re.MULTILINE)
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return Machine(
        cpu=cpu[1] if cpu else platform.machine(),
        cores=len(os.sched_getaffinity(0)),  # of this process: a container or taskset may restrict it
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpu=gpu.name if gpu else None,
        gpu_memory_gib=round(gpu.total_memory / 2**30, 1) if gpu else None,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def slugify(name: str) -> str:
    """Lower case, hyphens, without trade marks: ``NVIDIA H200`` gives ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", _NOISE.sub(" ", name).lower()).strip("-") or "machine"


def versions(distributions: Iterable[str]) -> dict[str, str]:
    """Installed versions of these packages and of those that matter to every stage."""
    return {name: version(name) for name in ("torch", "numpy", "transformers", *distributions)}


def revision() -> str:
    """Commit of the working tree, with ``+`` where tracked files differ from it; empty outside a repository."""
    # Of the state that was measured, not of the nearest tag; results of a changed tree can't be repeated from a commit.
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
