"""Batch sequences of concurrent requests, under a token budget and a maximum waiting time.

Callers share the replica by fair queueing, counted in tokens (Demers, Keshav and Shenker 1989). A request of a thousand
items therefore delays another caller by the current batch and a share of the next ones. A batch starts with the item of
the lowest virtual time and is filled, in that order, with items that fit into the budget. An item that does not fit
starts a later batch, so that long sequences don't starve and delay others by no more than their own batch. Equal items
that wait or compute at the same time are computed once. Items without a waiting caller are not computed.

Ray Serve's own batching (2.60) moves an item that does not fit behind all others, and does not distinguish callers.
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
"""Maximum number of items that are skipped while a batch is filled, because they don't fit."""
OF_FREE = 8
"""A caller may hold this many times the free part of the queue: one alone holds 8/9 of it, two hold 8/17 each."""
_NOT_BEFORE_S, _MOST_S = 1, 60
"""Bounds of Retry-After in seconds."""


class Item(NamedTuple):
    """Tokenized sequence, or latents to decode, and the requested output.

    Attributes:
        output: name of the requested output.
        key: equal for equal items.
        payload: token ids or latents.
        tokens: number of tokens, which count in the budget.
        text: the sequence; empty for latents.
    """

    output: str
    key: Hashable
    payload: Any
    tokens: int
    text: str = ""


@dataclass(eq=False)
class OverloadedError(Exception):
    """Raised if too many tokens wait.

    Attributes:
        retry_after_s: seconds until they are computed.
        room_tokens: tokens that another caller, who holds none, could queue now.
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
    """Totals since the start."""

    batches: int = 0
    tokens: int = 0
    budgets: int = 0
    computing_s: float = 0.0
    hits: int = 0
    misses: int = 0


class TokenBatcher:
    """Batcher of a replica; see the module. All calls come from one event loop.

    Args:
        compute: returns the results of a batch's items, in order; called in a thread.
        budget: token budget of a batch; a longer item is a batch of its own.
        max_wait_s: maximum seconds that a batch waits to be filled while nothing computes.
        queue_tokens: tokens that all requests may hold; each counts with one batch at most. A request beyond that, or
            of a caller who would hold more than ``OF_FREE`` times the rest, gets an :class:`OverloadedError`.
        queue_s: seconds of computing that all requests may hold, at the rate so far, but at least two batches.
        cache_bytes: memory for results.
        at_once: number of batches that compute at the same time.
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
        self._queue: list[tuple[float, int, _Waiting]] = []  # a heap: virtual time, order of arrival, item
        self._arrivals = count()
        # Virtual time: tokens per caller so far. An item's turn is the sum of its caller's earlier tokens, but not
        # before now.
        self._now = 0.0
        self._next_turn: dict[str, float] = {}
        self._held: Counter[str] = Counter()
        self._in_flight: dict[Hashable, _Waiting] = {}
        self._cache = ResultCache(cache_bytes)
        self._arrived = asyncio.Event()
        self._full = asyncio.Event()
        self._filling = asyncio.Lock()
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="batch")
        self._at_once = at_once
        self._loops: list[asyncio.Task[None]] = []

    async def submit(self, items: Sequence[Item], caller: str = "") -> list[NDArray]:
        """Return the results of the items, in order. Raises OverloadedError, or the error of the computation."""
        if not self._loops:  # here, since no event loop runs in the constructor of a replica
            # Keep references: asyncio itself only has weak ones to its tasks.
            self._loops = [asyncio.create_task(self._serve()) for _ in range(self._at_once)]
        results: dict[Hashable, Any] = {item.key: self._cache.get(item.key) for item in items}
        missing = [item for item in items if results[item.key] is None]
        self.totals.hits += len(items) - len(missing)
        self.totals.misses += len(missing)
        wanted = {item.key: item for item in missing}
        # A request counts with one batch of the queue at most: its other items delay no other caller.
        held = min(self.budget, sum(item.tokens for key, item in wanted.items() if key not in self._in_flight))
        # Before anything is queued, so that a refused request costs nothing else.
        self._check_room(caller, held)
        self._held[caller] += held
        waited_for = [self._enqueue(item, caller) for item in wanted.values()]
        if self.queued_tokens >= self.budget:
            self._full.set()  # ends the wait of a batch to be filled
        try:
            if waited_for:
                await asyncio.wait({waiting.result for waiting in waited_for})
        finally:  # also if the caller was cancelled: by its timeout, or because its client left
            self._leave(waited_for)
            self._held[caller] -= held
            if not self._held[caller]:
                del self._held[caller]  # its length is the number of callers in the queue
        results |= {waiting.item.key: waiting.result.result() for waiting in waited_for}
        return [results[item.key] for item in items]

    def _check_room(self, caller: str, tokens: int) -> None:
        """Raise OverloadedError if the queue is full, or the caller would hold too much compared with its free part.

        Otherwise a single caller could fill the queue, and all others would be refused. The more callers there are,
        the less each may hold; some room is always left for the next one (dynamic thresholds: Choudhury and Hahne
        1998).
        """
        free = self.room_tokens - self._held.total()
        if self._held and tokens and (tokens > free or self._held[caller] + tokens > OF_FREE * free):
            retry_after_s = max(_NOT_BEFORE_S, min(_MOST_S, round(self.queued_tokens / self._tokens_per_s)))
            raise OverloadedError(retry_after_s, max(0, free))

    @property
    def room_tokens(self) -> int:
        """Tokens that requests may hold now; more if computing is faster, since ``queue_s`` limits the seconds."""
        return int(min(self._queue_tokens, max(2 * self.budget, self._queue_s * self._tokens_per_s)))

    @property
    def _tokens_per_s(self) -> float:
        # Infinite before the first batch, so that only queue_tokens limits the queue.
        return self.totals.tokens / self.totals.computing_s if self.totals.computing_s else math.inf

    def _enqueue(self, item: Item, caller: str) -> _Waiting:
        """Queue the item, or join an equal one that waits or computes."""
        waiting = self._in_flight.get(item.key)
        if waiting is None:
            waiting = _Waiting(item, asyncio.get_running_loop().create_future(), time.monotonic())
            self._in_flight[item.key] = waiting
            self.queued_tokens += item.tokens
        waiting.callers += 1
        if not waiting.is_taken:
            # Push an item again if it already waits for another caller, whose turn may be far off. The earlier counts.
            turn = max(self._now, self._next_turn.get(caller, 0.0))
            self._next_turn[caller] = turn + item.tokens
            heapq.heappush(self._queue, (turn, next(self._arrivals), waiting))
            self._arrived.set()
        return waiting

    def _leave(self, waited_for: Sequence[_Waiting]) -> None:
        """Drop items without a waiting caller, to free their memory and their part of the queue."""
        for waiting in waited_for:
            waiting.callers -= 1
        # Items in a batch are computed anyway; the cache has their results for later requests.
        left = [waiting for waiting in waited_for if not (waiting.callers or waiting.is_taken)]
        for waiting in left:
            self._in_flight.pop(waiting.item.key)
            self.queued_tokens -= waiting.item.tokens
            waiting.result.cancel()
        if left:
            self._queue = [entry for entry in self._queue if entry[2].callers]
            heapq.heapify(self._queue)

    async def drain(self) -> None:
        """Wait until nothing waits or computes."""
        while self._in_flight:
            await asyncio.wait({waiting.result for waiting in self._in_flight.values()})

    async def _serve(self) -> None:
        while True:
            # Only one loop fills a batch while the others compute, so that the queue grows and batches get full.
            async with self._filling:
                while not self._queue:  # the waiting callers may have left
                    self._arrived.clear()
                    await self._arrived.wait()
                # Counted from the first item, which so waits for others no longer than max_wait_s.
                left_s = self._queue[0][2].arrived_s + self._max_wait_s - time.monotonic()
                if left_s > 0 and self.queued_tokens < self.budget:
                    self._full.clear()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._full.wait(), left_s)
                batch = self._take()
            if batch:  # empty if all callers have left
                await self._run(batch)

    def _take(self) -> list[_Waiting]:
        """Take the next batch from the queue."""
        batch: list[_Waiting] = []
        passed: list[tuple[float, int, _Waiting]] = []
        left = self.budget
        while self._queue and (not batch or left > 0) and len(passed) < LOOKED_AT:
            entry = heapq.heappop(self._queue)
            waiting = entry[2]
            if waiting.is_taken:  # earlier, in another caller's turn
                continue
            if batch and waiting.item.tokens > left:
                passed.append(entry)
                continue
            waiting.is_taken = True
            batch.append(waiting)
            left -= waiting.item.tokens
        # Skip at most LOOKED_AT: otherwise each batch might move thousands of long items.
        for entry in passed:  # they keep their turns, so they start the next batches
            heapq.heappush(self._queue, entry)
        taken_tokens = self.budget - left
        self.queued_tokens -= taken_tokens
        # Virtual time advances by the tokens per caller. A new caller starts now and not at 0, which would be ahead of
        # all that wait.
        self._now += taken_tokens / max(1, len(self._held))
        if len(self._next_turn) > 2 * len(self._held) + LOOKED_AT:  # forget callers that have left
            self._next_turn = {caller: turn for caller, turn in self._next_turn.items() if turn > self._now}
        return batch

    async def _run(self, batch: list[_Waiting]) -> None:
        items = [waiting.item for waiting in batch]
        start_s = time.monotonic()
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._threads, self._compute, items)
        except Exception as error:  # noqa: BLE001 - raised again in each caller
            for waiting in batch:
                waiting.result.set_exception(error)
                waiting.result.exception()  # retrieve it: asyncio would warn if all callers have left
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
        self.totals.budgets += max(self.budget, tokens)  # an item beyond the budget fills its batch
        self.totals.computing_s += time.monotonic() - start_s


@dataclass
class ResultCache:
    """Cache of arrays by key. Beyond ``most_bytes`` it removes the least recently used."""

    most_bytes: int
    held_bytes: int = 0
    _arrays: OrderedDict[Hashable, NDArray] = field(default_factory=OrderedDict)

    def get(self, key: Hashable) -> NDArray | None:
        if key not in self._arrays:
            return None
        self._arrays.move_to_end(key)
        return self._arrays[key]

    def put(self, key: Hashable, array: NDArray) -> None:
        """Store an array, unless it takes more than a tenth of the memory."""
        # A few large arrays would evict all others.
        if array.nbytes * 10 > self.most_bytes or key in self._arrays:
            return
        self._arrays[key] = array.copy()  # a view would keep the whole batch in memory
        self.held_bytes += array.nbytes
        while self.held_bytes > self.most_bytes:
            self.held_bytes -= self._arrays.popitem(last=False)[1].nbytes
