"""An index that actors of a Ray cluster search, each its own parts; their candidates are merged as one index has them.

A lost actor is replaced, and asked again. Only queries and candidates pass through Ray.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from esmeray.cluster.actor_pool import ActorPool
from esmeray.cluster.connection import cluster_resources, connected
from esmeray.cluster.section import RaySection
from esmeray.common.errors import ConfigError, ResourceError
from esmeray.dataset.embeddings.formats.base import Values
from esmeray.inference.index.index import Candidates, Index
from esmeray.inference.index.opening import open_index
from esmeray.inference.index.parts import PartEntry
from esmeray.train_config.natures import absolute_path

log = logging.getLogger(__name__)


class _SearchActor:
    """A process that searches some parts."""

    def __init__(self, opened: Callable[[], Index]) -> None:
        self._opened = opened

    def load(self) -> None:
        self._index = self._opened()

    def run(self, queries_and_hits: tuple[Values, int]) -> Candidates:
        return self._index.candidates(*queries_and_hits)


def _opened_part(source: str, probes: int | None, cpus: int, parts: slice, entries: list[PartEntry]) -> Index:
    # Before torch and faiss are loaded, which would take all cores.
    os.environ["OMP_NUM_THREADS"] = str(cpus)
    index = open_index(source, probes, parts)
    if index.manifest.parts != entries:
        raise ResourceError(f"{source}: nodes have different indexes under this name; copy one to all")
    return index


class ClusterIndex(Index):
    """See the module; made by :func:`on_cluster`. ``pools`` have an actor each, for its own parts."""

    def __init__(self, index: Index, pools: Sequence[ActorPool], threads: ThreadPoolExecutor) -> None:
        super().__init__(index.folder, index.manifest, index._parts)
        # Batches as in one process: a product's last bits depend on its rows, and clusters are chosen by products.
        self.at_once = index.at_once
        self._index = index
        self._pools = pools
        self._threads = threads

    def vectors(self, rows_n: NDArray[np.int64]) -> Values:
        return self._index.vectors(rows_n)

    def considered(self, top_k: int) -> int:
        return self._index.considered(top_k)

    def candidates(self, queries_qC: Values, top_k: int) -> Candidates:
        of_parts = self._threads.map(lambda pool: [*pool.run([(queries_qC, top_k)])], self._pools)
        return merged([candidates for (candidates,) in of_parts], self.considered(top_k))


def merged(of_parts: Sequence[Candidates], considered: int) -> Candidates:
    """The candidates of the whole, of those of its parts: the best so many by their keys, ties by row."""
    every = [np.concatenate(arrays, axis=1) for arrays in zip(*of_parts, strict=True)]
    # The last key by which keys are sorted is the first that counts.
    order_qW = np.lexsort((every[0], -every[1]), axis=1)[:, :considered]
    return Candidates(*(np.take_along_axis(values, order_qW, axis=1) for values in every))


@contextmanager
def on_cluster(
    index: Index, source: Path, ray: RaySection, workers: int, cpus_per_worker: int, probes: int | None
) -> Iterator[ClusterIndex]:
    """The index, searched by actors for the time of a block: as many as ``workers``, or as it has parts.

    ``source``: its folder, which all nodes see, or its URI. Raises ResourceError where the cluster has not so many
    cores, or another index at that place; ConfigError for vectors that are no index on disk.
    """
    entries = index.manifest.parts
    if not all(entry.files for entry in entries):
        raise ConfigError(f"--search.workers: {source} is no index; make one by 'esmeray embed index {source}'")
    bounds = np.linspace(0, len(entries), min(workers, len(entries)) + 1, dtype=int).tolist()
    groups = [slice(start, stop) for start, stop in pairwise(bounds)]
    ended = threading.Event()
    with connected(ray), ThreadPoolExecutor(len(groups)) as threads:
        # Else Ray would wait for more without end.
        room = sum(node.cpus // cpus_per_worker for node in cluster_resources())
        if room < len(groups):
            raise ResourceError(f"--search.workers {workers}: the cluster has room for {room}; ask for fewer")

        def pool(parts: slice) -> ActorPool:
            return ActorPool(
                _SearchActor,
                partial(_opened_part, absolute_path(str(source)), probes, cpus_per_worker, parts, entries[parts]),
                1,
                {"num_cpus": cpus_per_worker},
                at_once=1,
                max_failures=ray.max_failures,
                log=log,
                ended=ended,
            )

        pools: list[ActorPool] = []
        try:
            # A pool for each: a task of a pool may go to any of its actors.
            pools += threads.map(pool, groups)
            yield ClusterIndex(index, pools, threads)
        finally:
            ended.set()  # a thread that waits for an actor would wait on
            for each in pools:
                each.close()
