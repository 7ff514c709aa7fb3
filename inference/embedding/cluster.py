"""Shards computed by actors of a Ray cluster, one a device; no vector passes through Ray.

In: descriptions of shards. Out: their rows, in the order in which they are done; the actors write the files. A shard
whose actor was lost is computed by another, and the actor is replaced.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from common.errors import EsmerayError, ResourceError
from dataset.store.reader import Store
from inference.embedding.plan import Shard
from inference.embedding.request import JobRequest
from inference.embedding.settings import EmbeddingSettings, ModelFacts
from inference.embedding.shard_files import ShardFiles, ShardRow
from training.launch.cluster import worker_environment

log = logging.getLogger(__name__)

SHARDS_AT_ONCE = 2
"""Of an actor: while one is written, the next is computed."""


@dataclass(frozen=True)
class ActorSettings:
    """What each actor computes, and what it reserves.

    Attributes:
        source, settings, random_weights: of the encoder.
        store: path of the store.
        stage_dir: folder of each node's own disk to which the store is copied; None reads it where it is.
        shards: folder that all nodes see.
        cpus, gpus: of each actor; a GPU may be shared.
    """

    source: str
    settings: EmbeddingSettings
    random_weights: bool
    store: Path
    stage_dir: Path | None
    shards: Path
    cpus: int
    gpus: float


class _EmbeddingActor:
    """A device that computes shards."""

    def __init__(self, of: ActorSettings) -> None:
        self._of = of
        self._files = ShardFiles(of.shards)
        self._computing = threading.Lock()

    def load(self) -> ModelFacts:
        """Load the model and copy the store. A method, since what a constructor raises reaches nobody as it is."""
        import torch

        from dataset.store.staging import stage_store
        from inference.embedding.encoder import Encoder
        from inference.embedding.worker import ShardWorker

        of = self._of
        torch.set_num_threads(max(1, of.cpus))
        device = "cuda" if of.gpus else "cpu"
        encoder = Encoder(of.source, of.settings, device, random_weights=of.random_weights)
        path = of.store if of.stage_dir is None else stage_store(of.store, of.stage_dir)
        self._worker = ShardWorker(encoder, Store(path))
        return encoder.facts

    def run(self, shard: Shard) -> ShardRow:
        with self._computing:
            computed, row = self._worker.compute(shard)
        return self._files.write(computed, row)


class ActorPool:
    """Actors that compute shards. Ray is connected already. To be closed.

    Raises ResourceError, DataError and ConfigError as an actor's encoder does.
    """

    def __init__(self, of: ActorSettings, count: int, max_failures: int) -> None:
        kind = ray.remote(_EmbeddingActor)
        settings = {"num_cpus": of.cpus, "num_gpus": of.gpus, "max_concurrency": SHARDS_AT_ONCE}
        self._new: Callable[[], Any] = lambda: kind.options(**settings, runtime_env=worker_environment()).remote(of)
        self._max_failures, self._not_loaded = max_failures, 0
        self._waiting: dict[Any, tuple[Any, Shard | None]] = {}
        self._lost: set[Any] = set()
        for _ in range(count):
            self._start()
        self.facts: ModelFacts = self._first_facts()

    def run(self, shards: list[Shard]) -> Iterator[ShardRow]:
        """Rows of the shards as they are done. Raises ResourceError where one was lost too often."""
        todo, tries, left = deque(shards), Counter[int](), len(shards)
        idle = [actor for actor in self._ready for _ in range(SHARDS_AT_ONCE)]
        while left:
            while idle and todo:
                actor = idle.pop()
                if actor not in self._lost:
                    following = todo.popleft()
                    self._waiting[actor.run.remote(following)] = actor, following
            for actor, shard, result in self._replies():
                if isinstance(result, ShardRow):
                    left -= 1
                    idle.append(actor)
                    yield result
                elif isinstance(result, ModelFacts):
                    self._check(result)
                    idle += [actor] * SHARDS_AT_ONCE
                else:
                    if shard is not None:
                        todo.appendleft(shard)
                        tries[shard.number] += 1
                        if tries[shard.number] > self._max_failures:
                            raise ResourceError(
                                f"shard {shard.number} lost its worker {tries[shard.number]} times ({result}); lower "
                                "--batch-tokens, or look into Ray's logs"
                            )
                    self._replace(actor, shard, result)

    def close(self) -> None:
        """End the actors."""
        for actor in {*self._ready, *(actor for actor, _ in self._waiting.values())}:
            ray.kill(actor)

    def _start(self) -> None:
        actor = self._new()
        self._waiting[actor.load.remote()] = actor, None

    def _first_facts(self) -> ModelFacts:
        """Wait for one actor; the others join as they are ready."""
        self._ready: list[Any] = []
        while True:
            for actor, _, result in self._replies():
                if isinstance(result, ModelFacts):
                    self._ready.append(actor)
                    return result
                self._replace(actor, None, result)

    def _replies(self) -> Iterator[tuple[Any, Shard | None, Any]]:
        done, _ = ray.wait(list(self._waiting), timeout=1.0)
        for reference in done:
            actor, shard = self._waiting.pop(reference)
            try:
                yield actor, shard, ray.get(reference)
            except RayTaskError as error:
                if isinstance(error.cause, EsmerayError):
                    raise error.cause from None
                raise
            except RayActorError as error:
                yield actor, shard, error

    def _replace(self, actor: Any, shard: Shard | None, error: RayActorError) -> None:
        if actor in self._lost:
            return
        self._lost.add(actor)
        reason = str(error).strip().splitlines()[0]
        self._not_loaded = self._not_loaded + 1 if shard is None else 0
        if self._not_loaded > self._max_failures:
            raise ResourceError(f"workers end before the model is loaded ({reason}); give them more memory")
        log.warning("a worker was lost and is replaced: %s", reason)
        self._start()

    def _check(self, facts: ModelFacts) -> None:
        if facts.fingerprint != self.facts.fingerprint:
            raise ResourceError(f"--model {facts.name}: nodes have different weights under this name; copy one to all")


def default_stage_dir() -> Path | None:
    """Where nodes copy the store to: nowhere on a single machine."""
    return Path(tempfile.gettempdir()) / "esmeray-stores" if len(ray.nodes()) > 1 else None


class ClusterEngine:
    """Shards computed by actors on Ray, which is connected."""

    def __init__(self, request: JobRequest, source: str, store: Store, files: ShardFiles) -> None:
        of = ActorSettings(
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
        self._pool = ActorPool(of, request.workers or 1, request.cluster.max_failures)
        self.facts = self._pool.facts

    def run(self, shards: list[Shard], progress: Callable[[int], None]) -> Iterator[ShardRow]:
        """As :meth:`inference.embedding.worker.LocalEngine.run`."""
        for row in self._pool.run(shards):
            progress(row.sequences)
            yield row

    def close(self) -> None:
        """End the actors."""
        self._pool.close()
