"""The process group of workers: where they meet, and on which addresses they listen.

On one machine that is 127.0.0.1, on several each node's own address. Ray Train (2.60) lets torch choose, which listens
on every address.
"""

import os
import socket
from datetime import timedelta
from typing import Any

import psutil
import ray
import torch.distributed as dist
from ray.train.torch import TorchConfig
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2.torch.torch_trainer import TorchTrainer

from esmeray.cluster.collective import prepare_environment

LOOPBACK = "127.0.0.1"
_stores: list[dist.TCPStore] = []
"""Of the first worker: it lives as long as the process."""


def addresses(nodes: list[str]) -> list[str]:
    return nodes if len(set(nodes)) > 1 else [LOOPBACK] * len(nodes)


def listen(address: str, workers: int) -> int:
    """On the first worker: open the store at which the workers meet, on this address alone. Returns its port."""
    # The store gets the socket itself: a port that was only found free could be taken before.
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port: int = listener.getsockname()[1]
    _stores[:] = [
        dist.TCPStore(
            address, port, workers, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    ]
    return port


def join(meeting: tuple[str, int], rank: int, workers: int, address: str, backend: str, timeout: timedelta) -> None:
    prepare_environment()
    for interface, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            # gloo would take the address that the host's name stands for: on some machines every node's is 127.0.1.1.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            if address == LOOPBACK:  # among several interfaces to other nodes NCCL chooses better
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    store = _stores[0] if rank == 0 else dist.TCPStore(*meeting, workers, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=workers, timeout=timeout)


class ProcessGroupConfig(TorchConfig):
    """The group of Ray Train's workers."""

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        return _ProcessGroup


class _ProcessGroup(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        own = addresses(worker_group.execute(ray.util.get_node_ip_address))
        meeting = own[0], worker_group.execute_single(0, listen, own[0], len(own))
        joining = [
            worker_group.execute_single_async(
                rank,
                join,
                meeting,
                rank,
                len(own),
                address,
                backend_config.backend,
                timedelta(seconds=backend_config.timeout_s),
            )
            for rank, address in enumerate(own)
        ]
        ray.get(joining)
        worker_group.execute(_set_torch_distributed_env_vars)  # Ray's own, after those of another launcher are gone


class WithoutDatasets(TorchTrainer):
    """Ray Train without the actor that hands out Ray's datasets (2.60 starts one, a process, for none as well)."""

    def _create_default_callbacks(self) -> list[Any]:
        return [each for each in super()._create_default_callbacks() if not isinstance(each, DatasetsCallback)]
