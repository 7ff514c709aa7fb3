"""Placement of workers before anything starts: the cluster, the number of workers, and their cores and devices.

Does not import Ray, and imports torch only to count GPUs if there is a driver. A plan or an error appears at once.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil

from esmeray.cluster.section import RaySection
from esmeray.common.command_line import warn
from esmeray.common.errors import ResourceError
from esmeray.common.processor import has_gpu_driver, usable_cpus
from esmeray.common.text import counted

LOCAL, AUTO = "local", "auto"


class NodeResources(NamedTuple):
    """CPU cores and GPUs of one machine."""

    cpus: int
    gpus: int


@dataclass(frozen=True)
class Workers:
    """Number of training workers, and resources per worker.

    ``sizes``: allowed numbers of workers as machines come and go, ascending; empty if the number is fixed.
    """

    count: int
    cpus_each: int
    use_gpu: bool
    sizes: tuple[int, ...] = ()

    @property
    def device(self) -> str:
        return "cuda" if self.use_gpu else "cpu"

    @property
    def allowed(self) -> tuple[int, ...]:
        return self.sizes or (self.count,)

    @property
    def per_worker(self) -> str:
        """Resources per worker, in words."""
        return f"{counted(self.cpus_each, 'CPU core{s}')}{' and a GPU' if self.use_gpu else ''}"

    @property
    def numbers(self) -> str:
        """Allowed numbers of workers, in words."""
        return f"{self.sizes[0]} to {self.sizes[-1]}" if self.sizes else f"{self.count:,}"

    def largest(self, nodes: list[NodeResources]) -> int:
        """Largest allowed number of workers that these machines have room for, or 0."""
        return _largest(self.allowed, _room_for(nodes, self.cpus_each, self.use_gpu))


@dataclass(frozen=True)
class Capacity:
    """Largest allowed number of workers that a cluster has room for, or 0.

    Attributes:
        now: number with the resources that others leave free.
        whole: number if the cluster had no other user.
        machines: resources of the cluster, in words.
        leaving: machines with a worker that will be preempted; their resources do not count.
    """

    now: int
    whole: int
    machines: str = ""
    leaving: tuple[str, ...] = ()


def place_workers(section: RaySection, nodes: list[NodeResources]) -> Workers:
    """Turn ``auto`` into numbers. Each worker fits on a single machine.

    Raises ResourceError if the machines have too few cores or GPUs.
    """
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    use_gpu = gpus > 0
    has = described_nodes(nodes)
    if isinstance(section.num_workers, tuple):
        least = 1 if section.cpus_per_worker == "auto" else section.cpus_per_worker
        count = _largest(section.sizes, _room_for(nodes, least, use_gpu))
        if not count:
            raise ResourceError(
                f"ray.num_workers: at least {section.sizes[0]} workers requested, but {has}: request fewer"
            )
    else:
        count = section.num_workers if section.num_workers != "auto" else gpus if use_gpu else min(2, max(1, cpus))
        available = _room_for(nodes, 1, use_gpu)
        if count > available:
            unit = "GPU and CPU core" if use_gpu else "CPU core"
            raise ResourceError(
                f"ray.num_workers: {count} workers with one {unit} each requested, but {has}: request at most "
                f"{available}"
            )
    # Counted per machine: a worker can't use spare cores of two machines.
    most_cpus_each = max(cores for cores in range(1, cpus + 1) if _room_for(nodes, cores, use_gpu) >= count)
    cpus_each = section.cpus_per_worker if section.cpus_per_worker != "auto" else most_cpus_each
    if cpus_each > most_cpus_each:
        raise ResourceError(
            f"ray.cpus_per_worker: {count} workers with {cpus_each} CPU cores each requested, but {has}: "
            f"request at most {most_cpus_each}"
        )
    return Workers(count, cpus_each, use_gpu, section.sizes)


def described_nodes(nodes: list[NodeResources]) -> str:
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    return f"the cluster has {cpus} CPU cores and {gpus} GPUs on {counted(len(nodes), 'machine{s}')}"


def _largest(sizes: tuple[int, ...], room: int) -> int:
    return max((size for size in sizes if size <= room), default=0)


def _room_for(nodes: list[NodeResources], cpus_each: int, use_gpu: bool) -> int:
    return sum(min(node.cpus // cpus_each, node.gpus) if use_gpu else node.cpus // cpus_each for node in nodes)


def local_resources() -> list[NodeResources]:
    """CPU cores that this process may use, and GPUs of this machine."""
    gpus = 0
    if has_gpu_driver():
        import torch  # imported here: it takes a second, which machines without a driver save

        gpus = torch.cuda.device_count()
    return [NodeResources(usable_cpus(), gpus)]


def check_interface() -> None:
    """Raise ResourceError if GLOO_SOCKET_IFNAME names no network interface of this machine.

    Workers would fail at start, and Ray Train would restart them again and again.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    interfaces = psutil.net_if_addrs().keys()
    if {*filter(None, named.split(","))} - interfaces:
        raise ResourceError(
            f"GLOO_SOCKET_IFNAME: {named}: no such network interface; available: {', '.join(interfaces)}"
        )


def find(section: RaySection) -> str:
    """Address of the cluster: HOST:PORT, or ``local`` to start one.

    Raises ResourceError if a given address can't be used. If a cluster that ``ray start`` left here no longer answers,
    warns and returns ``local``.
    """
    is_set = section.address not in (None, AUTO)
    wanted = section.address if is_set else os.environ.get("RAY_ADDRESS")
    # Errors name the source of the address, because an old RAY_ADDRESS in the environment is easily overlooked.
    source = "RAY_ADDRESS" if wanted and not is_set else "ray.address"
    is_given = bool(wanted) and wanted != AUTO
    # Local clusters of other runs leave no address here, so they are not joined: they end with their run.
    address = wanted if is_given else _started_here()
    if address and address != LOCAL:
        from esmeray.cluster.access import NoAnswerError, authentication_mode  # imported here: it imports Ray

        try:
            authentication_mode(address)
        except NoAnswerError as error:
            if is_given:
                raise ResourceError(
                    f"{source}: no Ray cluster answers at {address}; start it, correct the address (HOST:PORT "
                    "or ray://HOST:PORT), or remove it to start a local cluster"
                ) from error
            _warn_once(f"{address_file()}: no cluster answers at {address} any more, so a local cluster is used")
            address = ""
    if not address and AUTO in (section.address, wanted):
        raise ResourceError(f"{source}: auto, but no cluster runs on this machine: start one with 'ray start --head'")
    return address or LOCAL


_warn_once = cache(warn)  # a command calls find several times


def _started_here() -> str:
    """Address that ``ray start`` left on this machine, or ''."""
    with suppress(OSError), address_file().open() as file:
        # Ray's folder has mode 0777: another user could redirect the token and the code to their own cluster.
        if os.fstat(file.fileno()).st_uid in (0, os.geteuid()):
            return file.read().strip()
        _warn_once(f"{address_file()} belongs to another user, so its cluster is not used")
    return ""


def address_file() -> Path:
    """File in which ``ray start`` (2.60) stores the address of its cluster."""
    return Path(os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp")), "ray", "ray_current_cluster")
