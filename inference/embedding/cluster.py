"""Shards computed by actors of a Ray cluster, one a device; no vector passes through Ray.

In: descriptions of shards. Out: their rows, in the order in which they are done; the actors write the files.
"""

import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import ray

from cluster.actor_pool import ActorPool
from common.errors import ResourceError
from dataset.store.reader import Store
from inference.embedding.plan import Shard
from inference.embedding.request import JobRequest
from inference.embedding.settings import JobFacts
from inference.embedding.shard_files import ShardFiles, ShardRow

log = logging.getLogger(__name__)

SHARDS_AT_ONCE = 2
"""Of an actor: while one is written, the next is computed."""


class ActorSettings(NamedTuple):
    """The job and the model of an actor, with the store's path, the folder of each node's own disk to which it is
    copied (None reads it where it is), and the folder of the shards, which all nodes see."""

    request: JobRequest
    source: str
    store: Path
    stage_dir: Path | None
    shards: Path


class _EmbeddingActor:
    """A device that computes shards."""

    def __init__(self, actor: ActorSettings) -> None:
        self._settings = actor
        self._files = ShardFiles(actor.shards)
        self._computing = threading.Lock()

    def load(self) -> JobFacts:
        """Load the model and copy the store. A method, since what a constructor raises reaches nobody as it is."""
        import torch

        from dataset.store.reader import stage_store
        from inference.embedding.worker import open_worker

        request, source, path, stage_dir, _ = self._settings
        torch.set_num_threads(max(1, request.cpus_per_worker))
        if stage_dir is not None:
            path = stage_store(path, stage_dir)
        device = request.device or "cpu"
        self._worker = open_worker(source, request.settings, device, Store(path), request.random_weights)
        return self._worker.facts

    def run(self, shard: Shard) -> ShardRow:
        with self._computing:
            computed, row = self._worker.compute(shard)
        return self._files.write(computed, row)


def _same_weights(first: JobFacts, other: JobFacts) -> None:
    if other.fingerprint != first.fingerprint:
        raise ResourceError(f"models: {other.name}: nodes have different weights under this name; copy one to all")


def default_stage_dir() -> Path | None:
    """Where nodes copy the store to: nowhere on a single machine."""
    return Path(tempfile.gettempdir()) / "esmeray-stores" if len(ray.nodes()) > 1 else None


class ClusterEngine:
    """Shards computed by actors on Ray, which is connected."""

    def __init__(self, request: JobRequest, source: str, store: Store, files: ShardFiles) -> None:
        actor = ActorSettings(
            request,
            source=source if not Path(source).exists() else str(Path(source).absolute()),
            store=store.path,
            stage_dir=request.stage_dir or default_stage_dir(),
            shards=files.folder.absolute(),
        )
        gpus = request.gpus_per_worker if request.device == "cuda" else 0
        assert request.cluster is not None
        self._pool = ActorPool(
            _EmbeddingActor,
            actor,
            request.workers or 1,
            {"num_cpus": request.cpus_per_worker, "num_gpus": gpus},
            at_once=SHARDS_AT_ONCE,
            max_failures=request.cluster.max_failures,
            log=log,
            same=_same_weights,
        )
        self.facts: JobFacts = self._pool.loaded

    def run(self, shards: list[Shard], progress: Callable[[int], None]) -> Iterator[ShardRow]:
        """As :meth:`inference.embedding.worker.LocalEngine.run`."""
        for row in self._pool.run(shards):
            progress(row.sequences)
            yield row

    def close(self) -> None:
        self._pool.close()
