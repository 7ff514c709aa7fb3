"""Process group of the workers: its rendezvous, and the addresses on which workers listen.

On one machine workers listen on 127.0.0.1, on several on each node's own address. Ray Train (2.60) would let torch
choose, which listens on every address.
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
"""Store of the first worker, kept here so that it lives as long as the process."""


def addresses(nodes: list[str]) -> list[str]:
    return nodes if len(set(nodes)) > 1 else [LOOPBACK] * len(nodes)


def listen(address: str, workers: int) -> int:
    """Open the rendezvous store on the first worker, listening on this address only. Returns its port."""
    # Pass the open socket to the store: a port that was merely free could be taken in between.
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
            # gloo would resolve the host name, which on some machines gives 127.0.1.1 on every node.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            if address == LOOPBACK:  # between nodes, NCCL makes the better choice among several interfaces
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    store = _stores[0] if rank == 0 else dist.TCPStore(*meeting, workers, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=workers, timeout=timeout)


class ProcessGroupConfig(TorchConfig):
    """Ray Train's settings of the process group above."""

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
        worker_group.execute(_set_torch_distributed_env_vars)  # Ray's variables, after another launcher's are removed


class WithoutDatasets(TorchTrainer):
    """Ray Train without the actor for Ray Datasets, whose process Ray (2.60) starts even without datasets."""

    def _create_default_callbacks(self) -> list[Any]:
        return [
            callback for callback in super()._create_default_callbacks() if not isinstance(callback, DatasetsCallback)
        ]
