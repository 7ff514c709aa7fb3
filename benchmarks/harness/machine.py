"""Description of the machine, the versions and the revision that results belong to."""

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import psutil
from pydantic import BaseModel

_REPOSITORY = Path(__file__).resolve().parents[2]
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

    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
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
    commit = _git("rev-parse", "--short=12", "HEAD")
    return commit + ("+" if commit and _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=_REPOSITORY, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
