"""Replica of an index on Ray Serve: neighbours of vectors, or of the index's own proteins, searched in batches.

The index's files are memory-mapped, so the replicas of a machine share their pages.
"""

import asyncio
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError, EsmerayError
from esmeray.inference.index.search import open_index
from esmeray.service.contract import AboutIndex, Reply
from esmeray.service.replicas.batcher import Item, TokenBatcher
from esmeray.service.replicas.replica import Replica, first_record, set_up_process
from esmeray.service.section import ServedIndex

BATCH_QUERIES = 64
QUEUED_QUERIES = 50_000
MAX_WAIT_S = 0.002
REOPENED_S = 1.0
"""Seconds between attempts to open files that were changed."""


class IndexReplica(Replica):
    """Deployment of one index.

    While the index's files are damaged it refuses requests, and :meth:`about` tells why. It serves again once they are
    whole.

    Args:
        index: settings of the index.
        model: name of the model that embeds queries.
        version: Serve replaces the replicas, one after the other, if it changes.
    """

    _about: AboutIndex
    _problem: str

    def __init__(self, index: dict[str, Any], model: str, version: str) -> None:
        set_up_process()
        self._settings = ServedIndex(**index)
        # Set before torch and faiss are imported, which would use all cores.
        os.environ["OMP_NUM_THREADS"] = str(max(1, int(self._settings.cpus)))
        self._model = model
        self._open()
        # At the start and at SIGHUP a problem ends the replica, and the service stays as it is. The successor of a lost
        # replica reports the problem instead: Serve would restart it endlessly, and requests would wait.
        first = first_record(self._settings.name, version, "" if self._problem else json.dumps(asdict(self._about)))
        if not first:
            raise DataError(self._problem)
        self._about = AboutIndex(**json.loads(first))
        self._batcher = TokenBatcher(
            self._search,
            budget=BATCH_QUERIES,
            max_wait_s=MAX_WAIT_S,
            queue_tokens=QUEUED_QUERIES,
            queue_s=self._settings.queue_s,
        )

    def _open(self) -> None:
        """Open the files as they are now, or record the problem with them."""
        try:
            index = open_index(self._settings.source, self._settings.probes)
            # Search once, which imports torch and sorts the ids before the first request.
            index.search(index.vectors(np.zeros(1, np.int64)), 1)
            index.rows([])
            self._about = AboutIndex(
                name=self._settings.name,
                model=self._model,
                # The last layer by number is the same output. The vectors of other layers match no served output.
                output=index.manifest.output.partition("_layer_")[0],
                space=str(index.manifest.made_of),
                vectors=index.manifest.count,
                metric=index.manifest.metric,
                link=self._settings.link or "",
            )
            self._index = index
            self._problem = ""
        except EsmerayError as error:
            self._problem = str(error)
        finally:  # also after an unexpected error, so that there is another attempt
            self._reopen_s = time.monotonic() + REOPENED_S

    async def _find_problem(self) -> str:
        """Describe the problem with the files; '' for none. Changed files are reopened, every REOPENED_S at most."""
        self._problem = self._problem or self._index.changed()
        if self._problem and time.monotonic() > self._reopen_s:
            self._reopen_s = math.inf  # one attempt at a time, since verifying large files takes long
            await asyncio.to_thread(self._open)
        return self._problem

    async def about(self) -> AboutIndex:
        return replace(self._about, problem=await self._find_problem())

    async def run(self, queries: NDArray[np.float32] | Sequence[str], top_k: int, space: str, caller: str) -> Reply:
        """Return the ``top_k`` neighbours of each vector (N, C) of ``space``, or of each id without itself."""
        problem = await self._find_problem()
        if problem:
            return Reply(refused="unavailable", detail=problem)
        try:
            if isinstance(queries, np.ndarray):
                return await self._neighbours(queries, np.full(len(queries), -1), top_k, space, caller)
            rows_N = self._index.rows(queries)
            if (rows_N < 0).any():
                return Reply(refused="unknown", detail=queries[int(rows_N.argmin())])
            # In a thread, like the ids below, since pages may have to be read from disk.
            vectors_NC = await asyncio.to_thread(self._index.vectors, rows_N)
            return await self._neighbours(vectors_NC, rows_N, top_k, self._about.space, caller)
        except DataError as error:  # from damaged files, found at the first read
            return Reply(refused="unavailable", detail=str(error))

    async def _neighbours(
        self, queries_NC: NDArray[np.float32], own_N: NDArray[np.int64], top_k: int, space: str, caller: str
    ) -> Reply:
        """Return the neighbours of each query without row ``own_N``, which is -1 for none."""
        considered = str(top_k + int((own_N >= 0).any()))

        def items() -> list[Item]:
            if space != self._about.space:  # other weights were loaded since the start
                raise DataError(f"{self._settings.name}: its vectors are of another model than the served one")
            # Check them before they share a batch with queries of other requests.
            self._index.check(queries_NC)
            return [Item(considered, (considered, query_C.tobytes()), query_C, 1) for query_C in queries_NC]

        reply = await self._answered(items, caller)
        hits = [
            hits_K2[(hits_K2[:, 0] >= 0) & (hits_K2[:, 0] != own)][:top_k]
            for hits_K2, own in zip(reply.results, own_N.tolist(), strict=False)
        ]
        reply.results = [hits_K2[:, 1].astype(np.float32) for hits_K2 in hits]
        reply.ids = await asyncio.to_thread(lambda: [self._index.ids(hits_K2[:, 0]) for hits_K2 in hits])
        return reply

    def _search(self, items: Sequence[Item]) -> list[NDArray]:
        """Return (K, 2) rows and scores per item, in fp64, which represents both exactly."""
        results: dict[int, NDArray] = {}
        # Separately by the number of hits: a compressed index considers more candidates for more hits.
        for considered in {item.output for item in items}:
            numbers = [number for number, item in enumerate(items) if item.output == considered]
            queries_nC = np.stack([items[number].payload for number in numbers])
            hits_nK2 = np.stack(self._index.search(queries_nC, int(considered)), axis=2)
            results |= zip(numbers, hits_nK2, strict=True)
        return [results[number] for number in range(len(items))]
