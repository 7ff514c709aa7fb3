"""Replica of a model on Ray Serve: batches across requests, computed in a thread; set-up of its process, and the policy
of how many there are.
"""

import logging
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

from esmeray.common.errors import ConfigError, DataError, ResourceError
from esmeray.service.contract import About, Reply
from esmeray.service.replicas.batcher import Item, OverloadedError, TokenBatcher
from esmeray.service.section import ServedModel

log = logging.getLogger("esmeray.service")

SCALE_UP_TOKENS = 50_000
"""Waiting tokens of each replica beyond which another is started: requests say nothing about work (one residue each, or
200,000)."""
SWITCH_S = 0.0005
_RECORDS = b"esmeray replicas"
"""Namespace of Ray's key-value store: records of first replicas by the name and the version of a model or an index."""
WARM_UP_LENGTHS = (20, 100, 400)
WARM_UP_LETTERS = "LAGVSERTIDPKQNFYMHWC"


class Replica(ABC):
    """Answers calls in batches, whoever they are of. Refusals are values, since Ray wraps errors."""

    _batcher: TokenBatcher | None = None

    @abstractmethod
    def _new_batcher(self) -> TokenBatcher:
        """The batcher, made in the event loop that will use it, which a constructor does not have."""

    async def _answered(self, items: Callable[[], Sequence[Item]], caller: str) -> Reply:
        """The results of items, which are made here: what refuses them is a value as well."""
        if self._batcher is None:
            self._batcher = self._new_batcher()
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

    async def __del__(self) -> None:  # which Serve awaits before it ends a replica
        if self._batcher is not None:
            await self._batcher.drain()


class ModelReplica(Replica):
    """The deployment of one model.

    Another ``version`` makes Serve replace the replicas, one after the other. All replicas of a version have the
    weights of the first one: one that starts later, after a crash or for more load, refuses others.
    """

    def __init__(self, model: dict[str, Any], device: str, version: str) -> None:
        import torch  # here: the process that deploys the replicas, which imports this module, needs none

        from esmeray.service.replicas.computer import Computer

        set_up_process()
        start_s = time.perf_counter()
        self._model = ServedModel(**model)
        self._device = device
        # torch would take all cores, beside other replicas, whatever Ray has reserved.
        torch.set_num_threads(max(1, int(self._model.cpus)))
        self._computer = Computer(self._model, device)
        _refuse_other_weights(self._model.name, version, self._computer.about.fingerprint)
        loaded_s = time.perf_counter()
        self._warm_up()
        log.info(
            "%s: loaded in %.1f s, warmed up in %.1f s, version %s",
            self._model.name,
            loaded_s - start_s,
            time.perf_counter() - loaded_s,
            version,
        )

    async def about(self) -> About:
        return self._computer.about

    async def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._computer.tokens(text) for text in texts]

    async def run(self, output: str, payloads: Sequence[Any], caller: str) -> Reply:
        """This output of each text, or of latents. Callers are served in turn."""
        reply = await self._answered(lambda: self._computer.items(output, payloads), caller)
        # Stacked, since Ray then sends one buffer in place of one for each.
        if all(result.ndim == 1 for result in reply.results) and not reply.refused:
            reply.results = np.stack([*reply.results])
        reply.space = self._computer.about.spaces.get(output, "")
        return reply

    def _new_batcher(self) -> TokenBatcher:
        return TokenBatcher(
            self._computer.compute,
            budget=self._computer.about.tokens,
            max_wait_s=self._model.max_wait_ms / 1e3,
            queue_tokens=self._model.queue_tokens,
            queue_s=self._model.queue_s,
            cache_bytes=self._model.cache_mb * 1_000_000,
            # On a GPU the next batch is prepared while one computes; on the CPU both would share the cores.
            at_once=2 if self._device == "cuda" else 1,
        )

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Backlog by tokens that wait: beyond 1 :func:`by_queued_tokens` starts another."""
        if self._batcher is None:
            return {"behind": 0.0}
        # Of a slow model half a queue is less than SCALE_UP_TOKENS: it would refuse before it is helped.
        return {"behind": self._batcher.queued_tokens / min(SCALE_UP_TOKENS, self._batcher.room_tokens / 2)}

    def _warm_up(self) -> None:
        """Compile what is compiled at first use; computing is slower until then."""
        output = next(iter(self._computer.about.outputs))
        items = self._computer.items(output, [(WARM_UP_LETTERS * 50)[:length] for length in WARM_UP_LENGTHS])
        for batch in (items[:1], items[1:], items):
            self._computer.compute(batch)

    def _memory_bytes(self) -> int:
        import torch

        return torch.cuda.memory_allocated() if self._device == "cuda" else super()._memory_bytes()


def by_queued_tokens(context: Any) -> tuple[int, dict[str, Any]]:
    """Serve's policy: one replica more where many tokens wait, one fewer where nothing is asked."""
    behind = (context.aggregated_metrics or {}).get("behind", {})
    current = context.current_num_replicas
    wanted = current + (sum(behind.values()) > max(1, current)) - (context.total_num_requests < 1)
    return max(context.capacity_adjusted_min_replicas, min(context.capacity_adjusted_max_replicas, wanted)), {}


def first_record(name: str, version: str, record: str = "") -> str:
    """Return what the first replica of this version of a model or an index recorded; '' for nothing.

    ``record`` becomes it if there is none. Without Ray nothing is kept.
    """
    if not ray.is_initialized():
        return record
    from ray.experimental import internal_kv

    key = f"{name} {version}"
    if record:
        # To the cluster's own store, where it stays when that replica is lost.
        internal_kv._internal_kv_put(key, record, overwrite=False, namespace=_RECORDS)
    return (internal_kv._internal_kv_get(key, namespace=_RECORDS) or b"").decode()


def _refuse_other_weights(name: str, version: str, fingerprint: str) -> None:
    """Raise ConfigError if the first replica of this version of a model loaded other weights."""
    first = first_record(name, version, fingerprint)
    if first != fingerprint:
        problem = (
            f"models: {name}: its files changed since the service was started (weights {first}, now {fingerprint}); "
            "restore them, or send SIGHUP to serve the new ones"
        )
        log.error(problem)
        raise ConfigError(problem)


def set_up_process() -> None:
    """To be called in a replica's constructor; nothing where the application runs without Ray."""
    if ray.is_initialized():
        # A thread that parses, scores or writes holds the GIL for this time, whenever the event loop wants it back. The
        # default of 5 ms makes small requests ten times as slow next to large ones: they need the loop many times.
        sys.setswitchinterval(SWITCH_S)
        _log_to_file()
        _listen_locally()


def _log_to_file() -> None:
    """Log to Ray's folder of logs, a file for each process: lines of JSON from the ingress, plain ones from models."""
    if log.handlers:
        return
    node = ray._private.worker.global_worker.node
    assert node is not None
    folder = Path(node.get_logs_dir_path(), "serve")
    folder.mkdir(exist_ok=True)
    # Folders of 'ray start' are 0777, so that others may have put links there: a new file in a folder of our own.
    if folder.lstat().st_uid != os.geteuid():
        raise ResourceError(f"{folder}: is another user's, and would get the service's log; start Ray anew")
    handler = logging.FileHandler(folder / f"esmeray-{os.getpid()}.log", mode="x")
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def _listen_locally() -> None:
    """On a cluster that listens on 127.0.0.1 alone, have this process do so too.

    Serve (2.60) opens a port for other replicas on every address, behind which it unpickles what it gets.
    """
    import ray.serve._private.replica as replica

    if ray.util.get_node_ip_address() != "127.0.0.1":
        return
    add_port = replica.add_port_to_grpc_server

    def add_local_port(server: Any, address: str) -> Any:
        return add_port(server, address.replace("[::]", "127.0.0.1"))

    replica.add_port_to_grpc_server = add_local_port
