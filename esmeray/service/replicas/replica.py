"""Replica of a model on Ray Serve: batches across requests, set-up of the process, and the autoscaling policy."""

import asyncio
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

from esmeray.common.errors import ConfigError, DataError, ResourceError
from esmeray.service.contract import DESIGNS, LIKELIHOOD, About, Reply
from esmeray.service.replicas.batcher import Item, OverloadedError, TokenBatcher
from esmeray.service.section import ServedModel

log = logging.getLogger("esmeray.service")

SCALE_UP_TOKENS = 50_000
"""Waiting tokens per replica beyond which another replica starts. Tokens measure work, requests don't: one may have one
residue or 200,000."""
SWITCH_S = 0.0005
"""Interval in seconds at which Python's threads hand over the GIL."""
_RECORDS = b"esmeray replicas"
"""Namespace in Ray's key-value store: what the first replica recorded, by name and version of a model or an index."""
WARM_UP_LENGTHS = (20, 100, 400)
WARM_UP_LETTERS = "LAGVSERTIDPKQNFYMHWC"


class Replica:
    """Base of replicas, which answer calls in batches across callers. Refusals are values, since Ray wraps errors."""

    _batcher: TokenBatcher

    async def _answered(self, items: Callable[[], Sequence[Item]], caller: str) -> Reply:
        """Return the results of items. ``items`` is called here, so that its errors become refusals as well."""
        try:
            reply = Reply(await self._batcher.submit(items(), caller))
        except OverloadedError as error:
            reply = Reply(refused="overloaded", retry_after_s=error.retry_after_s, room_tokens=error.room_tokens)
        except ResourceError as error:
            reply = Reply(refused="unavailable", detail=f"{error}; send a shorter sequence")
        except DataError as error:
            reply = Reply(refused="model", detail=str(error))
        reply.statistics = {
            "replica": str(os.getpid()),
            "memory_bytes": float(self._memory_bytes()),
            "queued_tokens": float(self._batcher.queued_tokens),
            **asdict(self._batcher.totals),
        }
        return reply

    def _memory_bytes(self) -> int:
        return int(psutil.Process().memory_info().rss)

    async def __del__(self) -> None:  # Serve awaits it before it ends a replica
        if hasattr(self, "_batcher"):  # otherwise the constructor failed
            await self._batcher.drain()


class ModelReplica(Replica):
    """Deployment of one model.

    All replicas of a version have the weights of the first one. A replica that starts later, after a crash or for more
    load, refuses other weights.

    Args:
        model: settings of the model.
        device: cpu or cuda.
        version: Serve replaces the replicas, one after the other, if it changes.
    """

    def __init__(self, model: dict[str, Any], device: str, version: str) -> None:
        import torch  # here, since the process that deploys the replicas also imports this module

        from esmeray.inference.design.calls import is_designer
        from esmeray.service.replicas.computer import Computer
        from esmeray.service.replicas.design_computer import DesignComputer

        set_up_process()
        self._model = ServedModel(**model)
        self._device = device
        # Otherwise torch uses all cores, whatever Ray has reserved for this replica.
        torch.set_num_threads(max(1, int(self._model.cpus)))
        computer: Any = DesignComputer if is_designer(self._model.source) else Computer
        self._computer = computer(self._model, device)
        about = self._computer.about
        identity = about.fingerprint
        if about.calibration is not None:  # the ingress applies the thresholds of the first replica
            identity += f"-{hashlib.sha256(about.calibration.model_dump_json().encode()).hexdigest()[:8]}"
        first = first_record(self._model.name, version, identity)
        if first != identity:
            problem = (
                f"models: {self._model.name}: its files changed since the service was started (weights {first}, now "
                f"{identity}); restore them, or send SIGHUP to serve the new ones"
            )
            log.error(problem)
            raise ConfigError(problem)
        self._warm_up()
        self._batcher = TokenBatcher(
            self._computer.compute,
            budget=self._computer.about.tokens,
            max_wait_s=self._model.max_wait_ms / 1e3,
            queue_tokens=self._model.queue_tokens,
            queue_s=self._model.queue_s,
            cache_bytes=self._model.cache_mb * 1_000_000,
            # On a GPU the next batch is prepared while one computes; on the CPU both would share the cores.
            at_once=2 if device == "cuda" else 1,
        )

    async def about(self) -> About:
        return self._computer.about

    async def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._computer.tokens(text) for text in texts]

    async def run(self, output: str, payloads: Sequence[Any], caller: str) -> Reply:
        """Return this output of each text, or of latents. Callers share the replica by fair queueing."""
        reply = await self._answered(lambda: self._computer.items(output, payloads), caller)
        if output == LIKELIHOOD and not reply.refused:
            # In a thread: the logits of many positions would block the event loop.
            reply.results = await asyncio.to_thread(self._computer.likelihoods, payloads, [*reply.results])
        # Stack vectors, so that Ray sends one buffer.
        if all(result.ndim == 1 for result in reply.results) and not reply.refused:
            reply.results = np.stack([*reply.results])
        reply.space = self._computer.about.spaces.get(output, "")
        return reply

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the backlog of tokens; above 1, :func:`by_queued_tokens` starts another replica."""
        # Half a queue of a slow model is less than SCALE_UP_TOKENS. It would refuse requests before another starts.
        return {"behind": self._batcher.queued_tokens / min(SCALE_UP_TOKENS, self._batcher.room_tokens / 2)}

    def _warm_up(self) -> None:
        """Run small batches, since some kernels are compiled at first use."""
        output = next(iter(self._computer.about.outputs))
        if output == DESIGNS:  # nothing is compiled for designs
            return
        items = self._computer.items(output, [(WARM_UP_LETTERS * 50)[:length] for length in WARM_UP_LENGTHS])
        for batch in (items[:1], items[1:], items):
            self._computer.compute(batch)

    def _memory_bytes(self) -> int:
        import torch

        return torch.cuda.memory_allocated() if self._device == "cuda" else super()._memory_bytes()


def by_queued_tokens(context: Any) -> tuple[int, dict[str, Any]]:
    """Autoscaling policy of Serve: one more replica if many tokens wait, one fewer if there are no requests."""
    behind = (context.aggregated_metrics or {}).get("behind", {})
    current = context.current_num_replicas
    wanted = current + (sum(behind.values()) > max(1, current)) - (context.total_num_requests < 1)
    return max(context.capacity_adjusted_min_replicas, min(context.capacity_adjusted_max_replicas, wanted)), {}


def first_record(name: str, version: str, record: str = "") -> str:
    """Return the record of the first replica of this version of a model or an index; '' for none.

    If there is none yet, ``record`` becomes the record. Without Ray ``record`` is returned.
    """
    if not ray.is_initialized():
        return record
    from ray.experimental import internal_kv

    key = f"{name} {version}"
    if record:
        # In the cluster's store, which outlives the replica.
        internal_kv._internal_kv_put(key, record, overwrite=False, namespace=_RECORDS)
    return (internal_kv._internal_kv_get(key, namespace=_RECORDS) or b"").decode()


def set_up_process() -> None:
    """Set up the process of a replica or the ingress, in its constructor. Without Ray this does nothing."""
    if ray.is_initialized():
        # A thread that parses, scores or writes keeps the GIL this long when the event loop wants it. Small requests
        # need the loop many times: with the default of 5 ms, large ones in a thread make them ten times as slow.
        sys.setswitchinterval(SWITCH_S)
        _log_to_file()
        _listen_locally()


def _log_to_file() -> None:
    """Log to a file per process in Ray's log folder: JSON lines from the ingress, plain lines from models."""
    if log.handlers:
        return
    node = ray._private.worker.global_worker.node
    assert node is not None
    folder = Path(node.get_logs_dir_path(), "serve")
    folder.mkdir(exist_ok=True)
    # Folders of 'ray start' are 0777, so others may have put links there. Require a folder of our own and a new file.
    if folder.lstat().st_uid != os.geteuid():
        raise ResourceError(f"{folder}: belongs to another user and would get the service's log; restart Ray")
    handler = logging.FileHandler(folder / f"esmeray-{os.getpid()}.log", mode="x")
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def _listen_locally() -> None:
    """Make this process listen on 127.0.0.1 only, if its cluster does.

    Serve 2.60 opens a port for other replicas on all addresses, and unpickles what arrives there.
    """
    import ray.serve._private.replica as replica

    if ray.util.get_node_ip_address() != "127.0.0.1":
        return
    add_port = replica.add_port_to_grpc_server

    def add_local_port(server: Any, address: str) -> Any:
        return add_port(server, address.replace("[::]", "127.0.0.1"))

    replica.add_port_to_grpc_server = add_local_port
