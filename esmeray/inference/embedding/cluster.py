"""Compute shards with Ray actors, one per device. Actors write the files, so that vectors don't pass through Ray."""

import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import ray
import torch

from esmeray.cluster.actor_pool import ActorPool
from esmeray.common.errors import ResourceError
from esmeray.common.remote import local_path, retried, upload_folder
from esmeray.dataset.store.format import MANIFEST_FILE
from esmeray.dataset.store.reader import Store, stage_store
from esmeray.inference.embedding.plan import JobFacts, Shard
from esmeray.inference.embedding.section import EmbedJobSection
from esmeray.inference.embedding.shard_files import ShardFiles, ShardRow
from esmeray.inference.embedding.worker import open_worker
from esmeray.inference.models.source import ModelSource
from esmeray.train_config.natures import PATH_OR_NAME, absolute_path

log = logging.getLogger(__name__)

SHARDS_AT_ONCE = 2
"""Shards per actor: while one is written, the next is computed."""


class _EmbeddingActor:
    """Actor that computes shards on one device.

    ``settings``: job, model, path of the store, and files of the shards, whose folder is shared by all nodes or is at a
    URI.
    """

    def __init__(self, settings: tuple[EmbedJobSection, ModelSource, Path, ShardFiles]) -> None:
        self._job, self._source, self._store, self._files = settings
        self._computing = threading.Lock()

    def load(self) -> JobFacts:
        """Load the model and copy the store. Not in the constructor, because Ray wraps its exceptions."""
        path = self._store
        # Ray does not limit threads: an actor would use all cores, and its summation order would differ from other
        # actors'.
        torch.set_num_threads(1)
        if self._files.uri is not None:
            path = local_path(f"{self._files.uri}.store")
        # With several nodes the store is on shared storage, where LMDB's memory mapping is slow or fails.
        if len(ray.nodes()) > 1:
            path = stage_store(path, Path(tempfile.gettempdir()) / "esmeray-stores")
        self._worker = open_worker(self._source, self._job, Store(path))
        return self._worker.facts

    def run(self, shard: Shard) -> ShardRow:
        # An actor has two shards at once: one computes inside the lock, and one is written outside of it.
        with self._computing:
            computed, row = self._worker.compute(shard)
        return self._files.write(computed, row)


def _same_weights(first: JobFacts, other: JobFacts) -> None:
    # Otherwise one file could hold shards of two models without any sign of it.
    if other.fingerprint != first.fingerprint:
        raise ResourceError(f"models: {other.name}: the weights differ between nodes; copy the same model to all nodes")


class ClusterEngine:
    """Computes shards with Ray actors; Ray must be connected."""

    def __init__(
        self, job: EmbedJobSection, source: ModelSource, store: Store, files: ShardFiles, *, max_failures: int
    ) -> None:
        # Actors have a different working folder.
        source = source._replace(path=absolute_path(source.path, PATH_OR_NAME))
        if (uri := files.uri) is not None:
            retried(lambda: upload_folder(store.path, f"{uri}.store", MANIFEST_FILE), uri)
        self._pool = ActorPool(
            _EmbeddingActor,
            (job, source, store.path, ShardFiles(files.folder.absolute(), uri)),
            job.workers or 1,
            {"num_cpus": 1, "num_gpus": job.gpus_per_worker if job.device == "cuda" else 0},
            at_once=SHARDS_AT_ONCE,
            max_failures=max_failures,
            log=log,
            same=_same_weights,
        )
        self.facts: JobFacts = self._pool.loaded

    def run(self, shards: list[Shard], progress: Callable[[int], None]) -> Iterator[ShardRow]:
        """Yield the rows of shards, like :meth:`esmeray.inference.embedding.worker.LocalEngine.run`."""
        for row in self._pool.run(shards):
            progress(row.sequences)
            yield row

    def close(self) -> None:
        self._pool.close()
