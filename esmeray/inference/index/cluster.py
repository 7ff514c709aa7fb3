"""An index searched by Ray actors. Each searches its own parts; merged candidates equal a single index's candidates.

A lost actor is replaced, and its query is repeated. Only queries and candidates pass through Ray.
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
from esmeray.inference.index.parts import PartEntry
from esmeray.inference.index.search import open_index
from esmeray.train_config.natures import absolute_path

log = logging.getLogger(__name__)


class _SearchActor:
    """Actor that searches some parts."""

    def __init__(self, opened: Callable[[], Index]) -> None:
        self._opened = opened

    def load(self) -> None:
        self._index = self._opened()

    def run(self, queries_and_hits: tuple[Values, int]) -> Candidates:
        return self._index.candidates(*queries_and_hits)


def _opened_part(source: str, probes: int | None, parts: slice, entries: list[PartEntry]) -> Index:
    # Set before torch and faiss are loaded; they would otherwise use all cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    index = open_index(source, probes, parts)
    if index.manifest.parts != entries:
        raise ResourceError(f"{source}: the index differs between nodes; copy the same index to all nodes")
    return index


class ClusterIndex(Index):
    """An index on a cluster, created by :func:`on_cluster`. Each pool has one actor with its own parts."""

    def __init__(self, index: Index, pools: Sequence[ActorPool], threads: ThreadPoolExecutor) -> None:
        super().__init__(index.folder, index.manifest, index._parts)
        # The same batches as in one process, because a product's last bits depend on its rows, and products choose the
        # clusters.
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
    """Merge the candidates of all parts: the best ``considered`` by key, ties by row."""
    every = [np.concatenate(arrays, axis=1) for arrays in zip(*of_parts, strict=True)]
    # np.lexsort sorts by its last key first.
    order_qW = np.lexsort((every[0], -every[1]), axis=1)[:, :considered]
    return Candidates(*(np.take_along_axis(values, order_qW, axis=1) for values in every))


@contextmanager
def on_cluster(index: Index, source: Path, ray: RaySection, workers: int, probes: int | None) -> Iterator[ClusterIndex]:
    """Search the index with Ray actors for the duration of a block.

    There are at most ``workers`` actors, with at least one part and one core each.

    ``source``: the index folder, shared by all nodes, or its URI. Raises ResourceError if the cluster lacks cores or a
    node has another index at that path; ConfigError for vectors without an index on disk.
    """
    entries = index.manifest.parts
    if not all(entry.files for entry in entries):
        raise ConfigError(f"--search.workers: {source} is not an index; build one with 'esmeray embed index {source}'")
    bounds = np.linspace(0, len(entries), min(workers, len(entries)) + 1, dtype=int).tolist()
    groups = [slice(start, stop) for start, stop in pairwise(bounds)]
    ended = threading.Event()
    with connected(ray), ThreadPoolExecutor(len(groups)) as threads:
        # Checked here, because Ray would wait forever for more cores.
        room = sum(node.cpus for node in cluster_resources())
        if room < len(groups):
            raise ResourceError(f"--search.workers {workers}: the cluster has room for {room}; request fewer")

        def pool(parts: slice) -> ActorPool:
            return ActorPool(
                _SearchActor,
                partial(_opened_part, absolute_path(str(source)), probes, parts, entries[parts]),
                1,
                {"num_cpus": 1},
                at_once=1,
                max_failures=ray.max_failures,
                log=log,
                ended=ended,
            )

        pools: list[ActorPool] = []
        try:
            # One pool per actor, because a pool may send a task to any of its actors.
            pools += threads.map(pool, groups)
            yield ClusterIndex(index, pools, threads)
        finally:
            ended.set()  # stops threads that wait for an actor
            for actors in pools:
                actors.close()
