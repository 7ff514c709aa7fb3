"""Shards computed by actors of a Ray cluster, one a device; no vector passes through Ray.

In: descriptions of shards. Out: their rows, in the order in which they are done; the actors write the files.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ray

from cluster.actor_pool import ActorPool
from common.errors import ResourceError
from dataset.store.reader import Store
from inference.embedding.plan import Shard
from inference.embedding.request import JobRequest
from inference.embedding.settings import JobFacts
from inference.embedding.shard_files import ShardFiles, ShardRow
from train_config.embed_schema import EmbedSection

log = logging.getLogger(__name__)

SHARDS_AT_ONCE = 2
"""Of an actor: while one is written, the next is computed."""


@dataclass(frozen=True)
class ActorSettings:
    """What each actor computes, and what it reserves.

    Attributes:
        source, settings, random_weights: of the model.
        store: path of the store.
        stage_dir: folder of each node's own disk to which the store is copied; None reads it where it is.
        shards: folder that all nodes see.
        cpus, gpus: of each actor; a GPU may be shared.
    """

    source: str
    settings: EmbedSection
    random_weights: bool
    store: Path
    stage_dir: Path | None
    shards: Path
    cpus: int
    gpus: float


class _EmbeddingActor:
    """A device that computes shards."""

    def __init__(self, actor: ActorSettings) -> None:
        self._settings = actor
        self._files = ShardFiles(actor.shards)
        self._computing = threading.Lock()

    def load(self) -> JobFacts:
        """Load the model and copy the store. A method, since what a constructor raises reaches nobody as it is."""
        import torch

        from dataset.store.staging import stage_store
        from inference.embedding.worker import open_worker

        actor = self._settings
        torch.set_num_threads(max(1, actor.cpus))
        device = "cuda" if actor.gpus else "cpu"
        path = actor.store if actor.stage_dir is None else stage_store(actor.store, actor.stage_dir)
        self._worker = open_worker(actor.source, actor.settings, device, Store(path), actor.random_weights)
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
            source=source if not Path(source).exists() else str(Path(source).absolute()),
            settings=request.settings,
            random_weights=request.random_weights,
            store=store.path,
            stage_dir=request.stage_dir or default_stage_dir(),
            shards=files.folder.absolute(),
            cpus=request.cpus_per_worker,
            gpus=request.gpus_per_worker if request.device == "cuda" else 0,
        )
        assert request.cluster is not None
        self._pool = ActorPool(
            _EmbeddingActor,
            actor,
            request.workers or 1,
            {"num_cpus": actor.cpus, "num_gpus": actor.gpus},
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
