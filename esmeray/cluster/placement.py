"""Placement of workers: which cluster, how many workers on which cores and devices, before anything is started.

Imports no Ray, and torch only to count GPUs where there is a driver, so that a plan and a refusal are there at once.
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
    """The number of training workers, and what each reserves.

    ``sizes``: numbers that take turns as machines come and go, ascending; none where the number is fixed.
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
    def each(self) -> str:
        """Resources that a worker reserves, in words."""
        return f"{counted(self.cpus_each, 'CPU core{s}')}{' and a GPU' if self.use_gpu else ''}"

    @property
    def numbers(self) -> str:
        """The allowed numbers in words."""
        return f"{self.sizes[0]} to {self.sizes[-1]}" if self.sizes else f"{self.count:,}"

    def largest(self, nodes: list[NodeResources]) -> int:
        """The largest allowed number that these machines hold; 0 where they hold none."""
        return _largest(self.allowed, _room_for(nodes, self.cpus_each, self.use_gpu))


@dataclass(frozen=True)
class Capacity:
    """The largest allowed number of workers that a cluster holds, 0 where it holds none.

    Attributes:
        now: beside what others use.
        whole: if nobody else used it.
        machines: its resources in words.
        leaving: machines with a worker that are about to be taken away, which count for nothing.
    """

    now: int
    whole: int
    machines: str = ""
    leaving: tuple[str, ...] = ()


def place_workers(section: RaySection, nodes: list[NodeResources]) -> Workers:
    """Turn ``auto`` into numbers; ResourceError for more workers or cores than these machines have.

    A worker lies on one machine whole.
    """
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    use_gpu = gpus > 0
    has = in_words(nodes)
    if isinstance(section.num_workers, tuple):
        least = 1 if section.cpus_per_worker == "auto" else section.cpus_per_worker
        count = _largest(section.sizes, _room_for(nodes, least, use_gpu))
        if not count:
            raise ResourceError(f"ray.num_workers: at least {section.sizes[0]} workers asked, but {has}: ask for fewer")
    else:
        count = section.num_workers if section.num_workers != "auto" else gpus if use_gpu else min(2, max(1, cpus))
        available = _room_for(nodes, 1, use_gpu)
        if count > available:
            unit = "GPU and CPU core" if use_gpu else "CPU core"
            raise ResourceError(
                f"ray.num_workers: {count} workers asked, one {unit} each, but {has}: ask for at most {available}"
            )
    # On whole machines: two machines' spare cores make no worker's.
    most_cpus_each = max(cores for cores in range(1, cpus + 1) if _room_for(nodes, cores, use_gpu) >= count)
    cpus_each = section.cpus_per_worker if section.cpus_per_worker != "auto" else most_cpus_each
    if cpus_each > most_cpus_each:
        raise ResourceError(
            f"ray.cpus_per_worker: {count} workers with {cpus_each} CPU cores each asked, but {has}: "
            f"ask for at most {most_cpus_each}"
        )
    return Workers(count, cpus_each, use_gpu, section.sizes)


def in_words(nodes: list[NodeResources]) -> str:
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    return f"the cluster has {cpus} CPU cores and {gpus} GPUs on {counted(len(nodes), 'machine{s}')}"


def _largest(sizes: tuple[int, ...], room: int) -> int:
    return max((size for size in sizes if size <= room), default=0)


def _room_for(nodes: list[NodeResources], cpus_each: int, use_gpu: bool) -> int:
    return sum(min(node.cpus // cpus_each, node.gpus) if use_gpu else node.cpus // cpus_each for node in nodes)


def local_resources() -> list[NodeResources]:
    """CPU cores that this process may use and GPUs of this machine, without starting anything."""
    gpus = 0
    if has_gpu_driver():
        import torch  # here: it takes a second, which a machine without a driver need not wait for

        gpus = torch.cuda.device_count()
    return [NodeResources(usable_cpus(), gpus)]


def check_interface() -> None:
    """Raise ResourceError if GLOO_SOCKET_IFNAME names no network interface of this machine.

    Workers would end at that, and Ray Train would start them again and again.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    there = psutil.net_if_addrs().keys()
    if {*filter(None, named.split(","))} - there:
        raise ResourceError(
            f"GLOO_SOCKET_IFNAME: {named}: no such network interface here; there are {', '.join(there)}"
        )


def find(section: RaySection) -> str:
    """Address of the cluster: HOST:PORT, or ``local`` to start one.

    Raises ResourceError for one that is given and can't be used. One that was started here and no longer answers is
    reported, and ``local`` taken.
    """
    is_set = section.address not in (None, AUTO)
    wanted = section.address if is_set else os.environ.get("RAY_ADDRESS")
    # Where the address comes from: a variable that a shell or a job has from yesterday is not seen in the command.
    source = "RAY_ADDRESS" if wanted and not is_set else "ray.address"
    is_given = bool(wanted) and wanted != AUTO
    # A local cluster of another run leaves no address: it is that run's own and would end with it.
    address = wanted if is_given else _started_here()
    if address and address != LOCAL:
        from esmeray.cluster.access import NoAnswerError, authentication_mode  # here: it imports Ray

        try:
            authentication_mode(address)
        except NoAnswerError as error:
            if is_given:
                raise ResourceError(
                    f"{source}: no Ray cluster answers at {address}; start it, correct the address (HOST:PORT or "
                    "ray://HOST:PORT), or remove it: a cluster is then started here"
                ) from error
            _warn_once(f"{address_file()}: no cluster answers at {address} any more, so it is not joined")
            address = ""
    if not address and AUTO in (section.address, wanted):
        raise ResourceError(f"{source}: auto, and no cluster runs here: start one by 'ray start --head'")
    return address or LOCAL


_warn_once = cache(warn)  # a command looks for its cluster several times


def _started_here() -> str:
    """The address that ``ray start`` left here; empty without one."""
    with suppress(OSError), address_file().open() as file:
        # Ray's folder is 0777: another user could have the token and the code sent to a cluster of his own.
        if os.fstat(file.fileno()).st_uid in (0, os.geteuid()):
            return file.read().strip()
        _warn_once(f"{address_file()} is another user's, so the cluster that it names is not joined")
    return ""


def address_file() -> Path:
    """The file in which ``ray start`` (2.60) leaves the address of its cluster."""
    return Path(os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp")), "ray", "ray_current_cluster")
