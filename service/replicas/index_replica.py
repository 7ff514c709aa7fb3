"""Replica of an index on Ray Serve: neighbours of vectors, or of the index's own proteins, searched in batches.

Its files are mapped, so that the replicas of a machine share their pages.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.inference.index.opening import open_index
from esmeray.service.contract import AboutIndex, Reply
from esmeray.service.replicas.batcher import Item, TokenBatcher
from esmeray.service.replicas.replica import Replica, log, set_up_process
from esmeray.service.section import ServedIndex

BATCH_QUERIES = 64
QUEUED_QUERIES = 50_000
MAX_WAIT_S = 0.002
WIDE_HITS = 1_000
_WIDE = ThreadPoolExecutor(1, thread_name_prefix="wide")


class IndexReplica(Replica):
    """The deployment of one index, whose queries a ``model`` embeds.

    Another ``version`` of its files makes Serve replace the replicas, one after the other.
    """

    def __init__(self, index: dict[str, Any], model: str, version: str) -> None:
        set_up_process()
        start_s = time.perf_counter()
        self._settings = ServedIndex(**index)
        # Before torch and faiss are loaded, which would take all cores.
        os.environ["OMP_NUM_THREADS"] = str(self._settings.cpus)
        self._index = open_index(self._settings.source, self._settings.probes)
        manifest = self._index.manifest
        self._about = AboutIndex(
            name=self._settings.name,
            model=model,
            # A last layer that was asked for by its number is the same; any other one is no served output's space.
            output=manifest.output.partition("_layer_")[0],
            space=str(manifest.made_of),
            vectors=manifest.count,
            metric=manifest.metric,
            link=self._settings.link or "",
        )
        # Before the first request: torch is loaded, ids are sorted.
        self._index.search(self._index.vectors(np.zeros(1, np.int64)), 1)
        self._index.rows([])
        log.info("%s: opened in %.1f s, version %s", self._settings.name, time.perf_counter() - start_s, version)

    async def about(self) -> AboutIndex:
        return self._about

    async def run(self, queries: NDArray[np.float32] | Sequence[str], top_k: int, space: str, caller: str) -> Reply:
        """The ``top_k`` neighbours of each vector, (N, C) of channels that mean ``space``, or of each id but itself."""
        if isinstance(queries, np.ndarray):
            return await self._neighbours(queries, np.full(len(queries), -1), top_k, space, caller)
        rows_N = self._index.rows(queries)
        if (rows_N < 0).any():
            return Reply(refused="unknown", detail=queries[int(rows_N.argmin())])
        # In a thread, as the ids below: pages that are not in memory come from the disk.
        vectors_NC = await asyncio.to_thread(self._index.vectors, rows_N)
        return await self._neighbours(vectors_NC, rows_N, top_k, self._about.space, caller)

    async def _neighbours(
        self, queries_NC: NDArray[np.float32], own_N: NDArray[np.int64], top_k: int, space: str, caller: str
    ) -> Reply:
        """``own_N``: rows that are left out of the neighbours, -1 for none."""
        considered = str(top_k + int((own_N >= 0).any()))

        def items() -> list[Item]:
            if space != self._about.space:  # since the start other weights have been loaded
                raise DataError(f"{self._settings.name}: the vectors of the index are of another model than is served")
            # Before they share a batch with those of others.
            self._index.check(queries_NC)
            # By its width, so that a batch of wide searches delays others no longer than a batch of many.
            width = 1 + top_k // WIDE_HITS
            return [Item(considered, (considered, query_C.tobytes()), query_C, width) for query_C in queries_NC]

        reply = await self._answered(items, caller)
        hits = [
            hits_K2[(hits_K2[:, 0] >= 0) & (hits_K2[:, 0] != own)][:top_k]
            for hits_K2, own in zip(reply.results, own_N.tolist(), strict=False)
        ]
        reply.results = [hits_K2[:, 1].astype(np.float32) for hits_K2 in hits]
        # Wide searches take turns in a thread of their own, so that others do not wait for all of them.
        reply.ids = await asyncio.get_running_loop().run_in_executor(
            _WIDE if sum(map(len, hits)) > WIDE_HITS else None,
            lambda: [self._index.ids(hits_K2[:, 0]) for hits_K2 in hits],
        )
        return reply

    def _new_batcher(self) -> TokenBatcher:
        return TokenBatcher(
            self._search,
            budget=BATCH_QUERIES,
            max_wait_s=MAX_WAIT_S,
            queue_tokens=QUEUED_QUERIES,
            queue_s=self._settings.queue_s,
        )

    def _search(self, items: Sequence[Item]) -> list[NDArray]:
        """(K, 2) rows and scores of each, in fp64, which holds both."""
        results: list[Any] = [None] * len(items)
        # Apart by the hits that are asked for: a compressed index considers more candidates for more of them.
        for considered in {item.output for item in items}:
            numbers = [number for number, item in enumerate(items) if item.output == considered]
            queries_nC = np.stack([items[number].payload for number in numbers])
            hits_nK2 = np.stack(self._index.search(queries_nC, int(considered)), axis=2)
            for number, hits_K2 in zip(numbers, hits_nK2, strict=True):
                results[number] = hits_K2
        return results
