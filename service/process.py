"""Set-up of a replica's process: its log, and a port that must not be open to others."""

import logging
import os
from pathlib import Path
from typing import Any

import ray

LOGGER = "esmeray.service"


def set_up_process() -> None:
    """To be called in a replica's constructor; nothing where the application runs without Ray."""
    if ray.is_initialized():
        _log_to_file()
        _listen_locally()


def _log_to_file() -> None:
    """Log to Ray's folder of logs, a file for each process: lines of JSON from the ingress, plain ones from models."""
    logger = logging.getLogger(LOGGER)
    if logger.handlers:
        return
    node = ray._private.worker.global_worker.node
    assert node is not None
    folder = Path(node.get_logs_dir_path(), "serve")
    folder.mkdir(exist_ok=True)
    handler = logging.FileHandler(folder / f"esmeray-{os.getpid()}.log", delay=True)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _listen_locally() -> None:
    """On a cluster that listens on 127.0.0.1 alone, have this process do so too.

    Serve (2.60) opens a port for other replicas on every address, behind which it unpickles what it gets.
    """
    import ray.serve._private.replica as replica

    if ray.util.get_node_ip_address() != "127.0.0.1":
        return
    add_port = replica.add_port_to_grpc_server

    def add_local_port(server: Any, address: str) -> int:
        port: int = add_port(server, address.replace("[::]", "127.0.0.1"))
        return port

    replica.add_port_to_grpc_server = add_local_port
