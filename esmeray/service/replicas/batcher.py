"""Batches of sequences from requests that arrive one by one, under a token budget and an age bound.

Callers take turns by tokens: an item's turn comes when its caller has been given as much as each of the others (fair
queueing: Demers, Keshav and Shenker 1989). A request of a thousand items thus delays another caller's by the batch that
is being computed and its own share of the next ones. A batch begins with the item whose turn it is and is filled, in
the order of turns, with those that the budget has room for: one that has none is the first of a later batch, so that
long sequences don't starve and delay others by no more than their own batch. Equal items that wait or are computed at
the same time are computed once; what nobody waits for any more is not computed.

Ray Serve's own batching (2.60) puts an item that has no room behind all others, and knows no callers.
"""

import asyncio
import heapq
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from numpy.typing import NDArray

LOOKED_AT = 512
"""Items behind the first that may be taken into its batch."""
OF_FREE = 8
"""Times the free part of the queue that a caller may hold: one alone has eight ninths of it, two eight of 17 each."""
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
    """Too many tokens wait; ``retry_after_s`` is when they will have been computed.

    ``room_tokens`` are free for another caller, who holds none.
    """

    retry_after_s: int
    room_tokens: int


@dataclass(eq=False)
class _Waiting:
    item: Item
    result: asyncio.Future[NDArray]
    arrived_s: float
    callers: int = 0
    is_taken: bool = False


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
        queue_tokens: tokens that requests may hold, each at most a batch of them; beyond, or where a caller would hold
            more than ``OF_FREE`` times what is left, it gets an :class:`OverloadedError`.
        queue_s: seconds of computing that they may hold, at the rate so far; two batches in any case.
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
        queue_s: float = math.inf,
        cache_bytes: int = 0,
        at_once: int = 1,
    ) -> None:
        self.budget = budget
        self.queued_tokens = 0
        self.totals = Totals()
        self._compute = compute
        self._max_wait_s = max_wait_s
        self._queue_tokens = queue_tokens
        self._queue_s = queue_s
        self._queue: list[tuple[float, int, _Waiting]] = []  # a heap: turn, order of arrival, item
        self._arrivals = count()
        # Turns are tokens that each caller was given, had all been here from the start: an item's is the sum of its
        # caller's before it, but not before now.
        self._now = 0.0
        self._next_turn: dict[str, float] = {}
        self._held: Counter[str] = Counter()
        self._in_flight: dict[Hashable, _Waiting] = {}
        self._cache = ResultCache(cache_bytes)
        self._arrived = asyncio.Event()
        self._full = asyncio.Event()
        self._filling = asyncio.Lock()
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="batch")
        # Held, since asyncio keeps no task that nobody holds.
        self._loops = [asyncio.create_task(self._serve()) for _ in range(at_once)]

    async def submit(self, items: Sequence[Item], caller: str = "") -> list[NDArray]:
        """Results of the items, in their order. Raises OverloadedError, or what the computation raised."""
        results: dict[Hashable, Any] = {item.key: self._cache.get(item.key) for item in items}
        missing = [item for item in items if results[item.key] is None]
        self.totals.hits += len(items) - len(missing)
        self.totals.misses += len(missing)
        wanted = {item.key: item for item in missing}
        # A request of many items holds no more than a batch of the queue: the others are in nobody's way.
        held = min(self.budget, sum(item.tokens for key, item in wanted.items() if key not in self._in_flight))
        # Before anything is queued: what is refused costs nothing but this.
        self._check_room(caller, held)
        self._held[caller] += held
        waited_for = [self._enqueue(item, caller) for item in wanted.values()]
        if self.queued_tokens >= self.budget:
            self._full.set()  # a batch that waits to be filled need not wait longer
        try:
            if waited_for:
                await asyncio.wait({waiting.result for waiting in waited_for})
        finally:  # also where the caller was cancelled: by its timeout, or because its client left
            self._leave(waited_for)
            self._held[caller] -= held
            if not self._held[caller]:
                del self._held[caller]  # their number is that of the callers who share the turns
        results |= {waiting.item.key: waiting.result.result() for waiting in waited_for}
        return [results[item.key] for item in items]

    def _check_room(self, caller: str, tokens: int) -> None:
        """Raise OverloadedError where the queue is full, or the caller would hold too much beside what is free of it.

        Else a single caller could fill the queue, and all others would be refused. The more callers there are, the
        less each may hold, and what is free is left to who comes next (Choudhury and Hahne 1998: dynamic thresholds).
        """
        free = self.room_tokens - self._held.total()
        if self._held and tokens and (tokens > free or self._held[caller] + tokens > OF_FREE * free):
            retry_after_s = max(_NOT_BEFORE_S, min(_MOST_S, round(self.queued_tokens / self._tokens_per_s)))
            raise OverloadedError(retry_after_s, max(0, free))

    @property
    def room_tokens(self) -> int:
        """Tokens that requests may hold now: as many seconds are more of them where computing is faster."""
        return int(min(self._queue_tokens, max(2 * self.budget, self._queue_s * self._tokens_per_s)))

    @property
    def _tokens_per_s(self) -> float:
        # Infinite before the first batch: nothing is known, and queue_tokens alone bounds the queue.
        return self.totals.tokens / self.totals.computing_s if self.totals.computing_s else math.inf

    def _enqueue(self, item: Item, caller: str) -> _Waiting:
        """The item, which waits for its turn or is being computed."""
        waiting = self._in_flight.get(item.key)
        if waiting is None:
            waiting = _Waiting(item, asyncio.get_running_loop().create_future(), time.monotonic())
            self._in_flight[item.key] = waiting
            self.queued_tokens += item.tokens
        waiting.callers += 1
        if not waiting.is_taken:
            # Also one that waits already: another caller's turn may be far off. The first of its turns counts.
            turn = max(self._now, self._next_turn.get(caller, 0.0))
            self._next_turn[caller] = turn + item.tokens
            heapq.heappush(self._queue, (turn, next(self._arrivals), waiting))
            self._arrived.set()
        return waiting

    def _leave(self, waited_for: Sequence[_Waiting]) -> None:
        """Forget what nobody waits for any more, at once: its memory, and its part of the queue."""
        for waiting in waited_for:
            waiting.callers -= 1
        # What is taken is computed in any case; whoever asks for it later finds it in the cache.
        left = [waiting for waiting in waited_for if not (waiting.callers or waiting.is_taken)]
        for waiting in left:
            self._in_flight.pop(waiting.item.key)
            self.queued_tokens -= waiting.item.tokens
            waiting.result.cancel()
        if left:
            self._queue = [entry for entry in self._queue if entry[2].callers]
            heapq.heapify(self._queue)

    async def drain(self) -> None:
        """Wait until nothing waits or is computed."""
        while self._in_flight:
            await asyncio.wait({waiting.result for waiting in self._in_flight.values()})

    async def _serve(self) -> None:
        while True:
            # One at a time, while the others compute: meanwhile the queue fills, and batches get full.
            async with self._filling:
                while not self._queue:  # whoever was waited for may have left meanwhile
                    self._arrived.clear()
                    await self._arrived.wait()
                # By its oldest item, so that nobody waits for company longer than that.
                left_s = self._queue[0][2].arrived_s + self._max_wait_s - time.monotonic()
                if left_s > 0 and self.queued_tokens < self.budget:
                    self._full.clear()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._full.wait(), left_s)
                batch = self._take()
            if batch:  # all who waited may have left
                await self._run(batch)

    def _take(self) -> list[_Waiting]:
        """The next batch."""
        batch: list[_Waiting] = []
        passed: list[tuple[float, int, _Waiting]] = []
        left = self.budget
        while self._queue and (not batch or left > 0) and len(passed) < LOOKED_AT:
            entry = heapq.heappop(self._queue)
            waiting = entry[2]
            if waiting.is_taken:  # in another caller's turn, which came first
                continue
            if batch and waiting.item.tokens > left:
                passed.append(entry)
                continue
            waiting.is_taken = True
            batch.append(waiting)
            left -= waiting.item.tokens
        # At most LOOKED_AT: else a queue of thousands of long items would be moved for each batch.
        for entry in passed:  # with their turns: the longest is the first of the next batch
            heapq.heappush(self._queue, entry)
        taken_tokens = self.budget - left
        self.queued_tokens -= taken_tokens
        # The time of turns passes by what each caller gets: who comes now begins at this turn, and not at 0, before all
        # that waited.
        self._now += taken_tokens / max(1, len(self._held))
        if len(self._next_turn) > 2 * len(self._held) + LOOKED_AT:  # callers that have gone
            self._next_turn = {caller: turn for caller, turn in self._next_turn.items() if turn > self._now}
        return batch

    async def _run(self, batch: list[_Waiting]) -> None:
        items = [waiting.item for waiting in batch]
        start_s = time.monotonic()
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._threads, self._compute, items)
        except Exception as error:  # noqa: BLE001 - each caller gets it
            for waiting in batch:
                waiting.result.set_exception(error)
                waiting.result.exception()  # asked for, or asyncio warns where everybody has left
        else:
            for waiting, result in zip(batch, results, strict=True):
                waiting.result.set_result(result)
                self._cache.put(waiting.item.key, result)
        finally:
            for waiting in batch:
                self._in_flight.pop(waiting.item.key)
        tokens = sum(item.tokens for item in items)
        self.totals.batches += 1
        self.totals.tokens += tokens
        self.totals.budgets += max(self.budget, tokens)  # a longer item is alone, and fills its batch
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
        # A few large ones would push out all others.
        if array.nbytes * 10 > self.most_bytes or key in self._arrays:
            return
        self._arrays[key] = array.copy()  # a view would hold the whole batch
        self.held_bytes += array.nbytes
        while self.held_bytes > self.most_bytes:
            self.held_bytes -= self._arrays.popitem(last=False)[1].nbytes
