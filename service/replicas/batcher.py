"""Batches of sequences from requests that arrive one by one, under a token budget and an age bound.

A batch begins with the item that has waited longest and is filled, in the order of arrival, with those that the budget
has room for: one that has none is the first of a later batch, so that long sequences don't starve and delay others by
no more than their own batch. Equal items that wait or are computed at the same time are computed once.

Ray Serve's own batching (2.60) puts an item that has no room behind all others.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray

LOOKED_AT = 512
"""Items behind the first that may be taken into its batch."""
_NOT_BEFORE_S, _MOST_S = 1, 60
"""Bounds of the time after which a refused caller is asked to come back."""


class Item(NamedTuple):
    """A sequence as it was tokenised, or latents to decode (whose ``text`` is empty), and the output that is wanted of
    it.

    Equal items have the same ``key``; ``tokens`` count in the budget.
    """

    output: str
    key: Hashable
    payload: Any
    tokens: int
    text: str = ""


@dataclass(eq=False)
class OverloadedError(Exception):
    """Too many tokens wait; ``retry_after_s`` is when they will have been computed."""

    retry_after_s: int


@dataclass(eq=False)
class _Waiting:
    item: Item
    result: asyncio.Future[NDArray]
    arrived_s: float
    callers: int = 0


@dataclass
class Totals:
    """Sums since the start."""

    batches: int = 0
    tokens: int = 0
    budgets: int = 0
    computing_s: float = 0.0
    hits: int = 0
    misses: int = 0


class TokenBatcher:
    """See the module. To be made and used in one event loop.

    Args:
        compute: results of the items of a batch, in their order; called in a thread.
        budget: tokens of a batch; an item of more is alone.
        max_wait_s: how long a batch waits to be filled while nothing is computed.
        queue_tokens: beyond so many waiting tokens :class:`OverloadedError` is raised.
        cache_bytes: memory for results.
        at_once: batches that are computed at the same time.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Item]], Sequence[NDArray]],
        *,
        budget: int,
        max_wait_s: float,
        queue_tokens: int,
        cache_bytes: int = 0,
        at_once: int = 1,
    ) -> None:
        self.budget, self.queued_tokens, self.totals = budget, 0, Totals()
        self._compute, self._max_wait_s, self._queue_tokens = compute, max_wait_s, queue_tokens
        self._queue: deque[_Waiting] = deque()
        self._in_flight: dict[Hashable, _Waiting] = {}
        self._cache = ResultCache(cache_bytes)
        self._arrived, self._full = asyncio.Event(), asyncio.Event()
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="batch")
        self._places = asyncio.Semaphore(at_once)
        self._loop = asyncio.create_task(self._serve())
        self._running: set[asyncio.Task[None]] = set()

    async def submit(self, items: Sequence[Item]) -> list[NDArray]:
        """Results of the items, in their order. Raises OverloadedError, or what the computation raised."""
        results: list[NDArray | None] = [self._cache.get(item.key) for item in items]
        missing = [(place, item) for place, item in enumerate(items) if results[place] is None]
        self.totals.hits += len(items) - len(missing)
        self.totals.misses += len(missing)
        new = {item.key: item for _, item in missing if item.key not in self._in_flight}
        added = sum(item.tokens for item in new.values())
        if self.queued_tokens and self.queued_tokens + added > self._queue_tokens:
            rate = self.totals.tokens / self.totals.computing_s if self.totals.computing_s else self.budget
            raise OverloadedError(max(_NOT_BEFORE_S, min(_MOST_S, round(self.queued_tokens / rate))))
        now_s = time.monotonic()
        for item in new.values():
            waiting = _Waiting(item, asyncio.get_running_loop().create_future(), now_s)
            self._in_flight[item.key] = waiting
            self._queue.append(waiting)
        self.queued_tokens += added
        if new:
            self._arrived.set()
        if self.queued_tokens >= self.budget:
            self._full.set()
        of_mine = [self._in_flight[item.key] for _, item in missing]
        for waiting in of_mine:
            waiting.callers += 1
        try:
            if of_mine:
                await asyncio.wait({waiting.result for waiting in of_mine})
        finally:
            for waiting in of_mine:
                waiting.callers -= 1
        for (place, _), waiting in zip(missing, of_mine, strict=True):
            results[place] = waiting.result.result()
        return [result for result in results if result is not None]

    async def drain(self) -> None:
        """Wait until nothing waits or is computed."""
        while self._in_flight:
            await asyncio.wait({waiting.result for waiting in self._in_flight.values()})

    async def _serve(self) -> None:
        while True:
            await self._places.acquire()
            await self._arrived.wait()
            left_s = self._queue[0].arrived_s + self._max_wait_s - time.monotonic()
            if left_s > 0 and self.queued_tokens < self.budget:
                self._full.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._full.wait(), left_s)
            batch = self._take()
            if not batch:
                self._places.release()
                continue
            task = asyncio.create_task(self._run(batch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _take(self) -> list[_Waiting]:
        """The next batch, without what nobody waits for any more."""
        batch: list[_Waiting] = []
        passed: list[_Waiting] = []
        left = self.budget
        while self._queue and (not batch or left > 0) and len(passed) < LOOKED_AT:
            waiting = self._queue.popleft()
            if not waiting.callers:
                self._in_flight.pop(waiting.item.key)
                waiting.result.cancel()
            elif batch and waiting.item.tokens > left:
                passed.append(waiting)
                continue
            else:
                batch.append(waiting)
                left -= waiting.item.tokens
            self.queued_tokens -= waiting.item.tokens
        self._queue.extendleft(reversed(passed))
        if not self._queue:
            self._arrived.clear()
        return batch

    async def _run(self, batch: list[_Waiting]) -> None:
        items = [waiting.item for waiting in batch]
        start_s = time.monotonic()
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._threads, self._compute, items)
        except Exception as error:  # noqa: BLE001 - each caller gets it
            for waiting in batch:
                waiting.result.set_exception(error)
                waiting.result.exception()  # somebody may have left
        else:
            for waiting, result in zip(batch, results, strict=True):
                waiting.result.set_result(result)
                self._cache.put(waiting.item.key, result)
        finally:
            for waiting in batch:
                self._in_flight.pop(waiting.item.key)
            self._places.release()
        tokens = sum(item.tokens for item in items)
        self.totals.batches += 1
        self.totals.tokens += tokens
        self.totals.budgets += max(self.budget, tokens)
        self.totals.computing_s += time.monotonic() - start_s


@dataclass
class ResultCache:
    """Arrays by key, the least recently used removed first beyond ``most_bytes``."""

    most_bytes: int
    held_bytes: int = 0
    _arrays: OrderedDict[Hashable, NDArray] = field(default_factory=OrderedDict)

    def get(self, key: Hashable) -> NDArray | None:
        if key not in self._arrays:
            return None
        self._arrays.move_to_end(key)
        return self._arrays[key]

    def put(self, key: Hashable, array: NDArray) -> None:
        """Hold an array, unless it takes more than a tenth of the memory."""
        if array.nbytes * 10 > self.most_bytes or key in self._arrays:
            return
        self._arrays[key] = array.copy()  # a view would hold the whole batch
        self.held_bytes += array.nbytes
        while self.held_bytes > self.most_bytes:
            self.held_bytes -= self._arrays.popitem(last=False)[1].nbytes
