"""The Ray cluster: connect to the one at hand or start a local one, and say what fits on it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._private.worker import BaseContext

from train_config.errors import ResourceError
from train_config.schema import RaySection

REPOSITORY = Path(__file__).resolve().parent.parent
LOCAL = "local"
PORTS_TRIED = 100
CONNECT_TIMEOUT_S = 10.0
OBJECT_STORE_BYTES = 256 * 1024 * 1024
"""Batches do not travel through Ray's object store; a local cluster needs little of it."""

NOT_UPLOADED = [".git", ".venv", "runs", "stores", "wandb", "tests", "docs", "benchmarks", "**/__pycache__"]


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


def place_workers(section: RaySection, cpus: int, gpus: int) -> Workers:
    """Turn ``auto`` into numbers, and refuse at once what the cluster can't hold.

    Args:
        section: what was asked for.
        cpus, gpus: what the whole cluster has.

    Raises:
        ResourceError: more workers or cores than there are; says what there is.
    """
    use_gpu = gpus > 0
    count = section.num_workers if section.num_workers != "auto" else gpus if use_gpu else min(2, max(1, cpus))
    available = gpus if use_gpu else cpus
    if count > available:
        unit = "GPU" if use_gpu else "CPU core"
        raise ResourceError(
            f"ray.num_workers: {count} workers asked, one {unit} each, but the cluster has {cpus} CPU cores "
            f"and {gpus} GPUs: ask for at most {available}"
        )
    cpus_each = section.cpus_per_worker if section.cpus_per_worker != "auto" else max(1, cpus // count)
    if count * cpus_each > cpus:
        raise ResourceError(
            f"ray.cpus_per_worker: {count} workers with {cpus_each} CPU cores each need {count * cpus_each}, "
            f"the cluster has {cpus}: ask for at most {cpus // count}"
        )
    return Workers(count, cpus_each, use_gpu)


def local_resources() -> tuple[int, int]:
    """CPU cores that this process may use and GPUs of this machine, without starting anything."""
    import torch

    return len(os.sched_getaffinity(0)), torch.cuda.device_count()


def cluster_resources() -> tuple[int, int]:
    """CPU cores and GPUs of the connected cluster."""
    resources = ray.cluster_resources()
    return int(resources.get("CPU", 0)), int(resources.get("GPU", 0))


@contextmanager
def connected(section: RaySection) -> Iterator[str]:
    """Connect, or start a local cluster, for the length of the block; yields the dashboard's address or ''.

    A cluster that was started here is stopped here. One that was there already is only left.

    Raises:
        ResourceError: ``ray.address`` was given and nothing answers there.
    """
    # Ray Train finds out about a lost worker by polling: every 2 s unless told otherwise.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    address = find(section)
    try:
        context = _start_local(section) if address == LOCAL else _join(address)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ResourceError(f"ray.address: no Ray cluster can be used at {address} ({reason})") from error
    try:
        yield context.dashboard_url or ""
    finally:
        ray.shutdown()


def find(section: RaySection) -> str:
    """Where the cluster is: an address, ``auto`` for one that runs on this machine, or ``local`` to start one."""
    if section.address is not None:
        return section.address
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    from ray._private.services import find_gcs_addresses

    return "auto" if find_gcs_addresses() else LOCAL


def _start_local(section: RaySection) -> BaseContext:
    cpus, gpus = local_resources()
    return ray.init(
        address=LOCAL,
        num_cpus=cpus,
        num_gpus=gpus,
        object_store_memory=OBJECT_STORE_BYTES,
        # Without the dashboard Ray Train's cleaner warns every second (ray 2.60).
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        dashboard_port=_free_port(section.dashboard_port),
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": _worker_environment()},
    )


def _free_port(preferred: int) -> int:
    """This port of 127.0.0.1, or the next that is free: another cluster may run on this machine."""
    for port in range(preferred, min(preferred + PORTS_TRIED, 65536)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ResourceError(f"ray.dashboard_port: {preferred} and the {PORTS_TRIED} ports after it are taken: choose one")


def _refuse_unreachable(address: str) -> None:
    """ray.init tries for half a minute and more where nothing answers."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()


def _join(address: str) -> BaseContext:
    _refuse_unreachable(address)
    environment: dict = {"env_vars": _worker_environment()}
    if not _on_this_machine(address):
        # The other nodes don't have this folder.
        environment = {"working_dir": str(REPOSITORY), "excludes": NOT_UPLOADED}
    return ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=environment)


def _on_this_machine(address: str) -> bool:
    host = address.removeprefix("ray://").rsplit(":", 1)[0]
    return host in ("auto", "127.0.0.1", "localhost", ray.util.get_node_ip_address())


def _worker_environment() -> dict[str, str]:
    paths = [str(REPOSITORY), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "TOKENIZERS_PARALLELISM": "false"}
