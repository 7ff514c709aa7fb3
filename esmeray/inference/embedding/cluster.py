"""Shards computed by actors of a Ray cluster, one a device, which write the files: no vector passes through Ray."""

import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

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
from esmeray.train_config.natures import PATH_OR_NAME, absolute_path

log = logging.getLogger(__name__)

SHARDS_AT_ONCE = 2
"""Of an actor: while one is written, the next is computed."""


class ActorSettings(NamedTuple):
    """The job and the model of an actor, with the store's path, and the shards, in a folder that all nodes see or else
    at their URI."""

    job: EmbedJobSection
    source: str
    store: Path
    files: ShardFiles


class _EmbeddingActor:
    """A device that computes shards."""

    def __init__(self, actor: ActorSettings) -> None:
        self._settings = actor
        self._computing = threading.Lock()

    def load(self) -> JobFacts:
        """Load the model and copy the store. A method, since what a constructor raises reaches nobody as it is."""
        job, path = self._settings.job, self._settings.store
        # Ray limits no threads: an actor computes on all cores, and would sum in another order than its neighbour.
        torch.set_num_threads(job.cpus_per_worker)
        if self._settings.files.uri is not None:
            path = local_path(f"{self._settings.files.uri}.store")
        if job.stage_dir is not None:
            path = stage_store(path, job.stage_dir)
        self._worker = open_worker(self._settings.source, job, Store(path))
        return self._worker.facts

    def run(self, shard: Shard) -> ShardRow:
        # Two shards are here at once: one computes, while the other is written outside of the lock.
        with self._computing:
            computed, row = self._worker.compute(shard)
        return self._settings.files.write(computed, row)


def _same_weights(first: JobFacts, other: JobFacts) -> None:
    # Else shards of two models would stand in one file, without a sign of it.
    if other.fingerprint != first.fingerprint:
        raise ResourceError(f"models: {other.name}: nodes have different weights under this name; copy one to all")


class ClusterEngine:
    """Shards computed by actors on Ray, which is connected."""

    def __init__(
        self, job: EmbedJobSection, source: str, store: Store, files: ShardFiles, *, max_failures: int
    ) -> None:
        # Of several nodes the store lies on shared storage, which LMDB's mapped pages make slow, or break.
        if job.stage_dir is None and len(ray.nodes()) > 1:
            job = job.model_copy(update={"stage_dir": Path(tempfile.gettempdir()) / "esmeray-stores"})
        source = absolute_path(source, PATH_OR_NAME)  # actors have another working folder
        if (uri := files.uri) is not None:
            retried(lambda: upload_folder(store.path, f"{uri}.store", MANIFEST_FILE), uri)
        self._pool = ActorPool(
            _EmbeddingActor,
            ActorSettings(job, source, store.path, ShardFiles(files.folder.absolute(), uri)),
            job.workers or 1,
            {"num_cpus": job.cpus_per_worker, "num_gpus": job.gpus_per_worker if job.device == "cuda" else 0},
            at_once=SHARDS_AT_ONCE,
            max_failures=max_failures,
            log=log,
            same=_same_weights,
        )
        self.facts: JobFacts = self._pool.loaded

    def run(self, shards: list[Shard], progress: Callable[[int], None]) -> Iterator[ShardRow]:
        """As :meth:`esmeray.inference.embedding.worker.LocalEngine.run`."""
        for row in self._pool.run(shards):
            progress(row.sequences)
            yield row

    def close(self) -> None:
        self._pool.close()
