"""Every item gets its own result, batches respect token budget and maximum wait, and no result is computed in vain."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.service.replicas.batcher import Item, OverloadedError, ResultCache, TokenBatcher

BUDGET = 10


def item(number: int, tokens: int = 3) -> Item:
    return Item("mean", number, number, tokens)


class Computed:
    """Records batches in their order; until ``open`` is set, no batch ends. The result of an item is its payload."""

    def __init__(self) -> None:
        self.batches: list[list[Item]] = []
        self.open = threading.Event()
        self.open.set()
        self.begun = threading.Event()

    def __call__(self, items: Sequence[Item]) -> list[np.ndarray]:
        self.batches.append(list(items))
        self.begun.set()
        assert self.open.wait(20)
        if any(item.payload == "bad" for item in items):
            raise ValueError("bad")
        rows = np.array([[item.payload] for item in items], dtype=np.float32)
        return list(rows)  # views of one array

    @property
    def payloads(self) -> list[list[Any]]:
        return [[item.payload for item in batch] for batch in self.batches]


async def begun(*requests: Awaitable[Any]) -> list[asyncio.Task[Any]]:
    """Start the requests; return their tasks once each request has been queued."""
    tasks = [asyncio.create_task(request) for request in requests]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    return tasks


def batched(
    use: Callable[[TokenBatcher, Computed], Awaitable[Any]], *, blocked: bool = True, **options: Any
) -> Computed:
    """Items that were computed while ``use`` ran; ``blocked``: item -1 blocks the batcher until it is released."""
    computed = Computed()

    async def run() -> None:
        options_ = {"budget": BUDGET, "queue_tokens": 10_000, "max_wait_s": 0.0, **options}
        batcher = TokenBatcher(computed, **options_)
        if blocked:
            computed.open.clear()
            (first,) = await begun(batcher.submit([item(-1)]))
            await asyncio.to_thread(computed.begun.wait, 20)
        await use(batcher, computed)
        if blocked:
            assert len(await first) == 1

    asyncio.run(asyncio.wait_for(run(), 30))
    return computed


REQUESTS = st.lists(st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=8), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    requests=REQUESTS, at_once=st.integers(1, 2), cache_bytes=st.sampled_from([0, 200]), cancelled=st.integers(0, 12)
)
def test_every_item_gets_its_result_within_the_token_budget(
    requests: list[list[tuple[int, bool]]], at_once: int, cache_bytes: int, cancelled: int
):
    async def use(batcher: TokenBatcher, computed: Computed) -> None:
        async def ask(numbers: list[int], waits: bool) -> None:
            if waits:
                await asyncio.sleep(0)
            results = await batcher.submit([item(number, 1 + number % 13) for number in numbers])
            assert [array.tolist() for array in results] == [[number] for number in numbers]

        asks = [asyncio.create_task(ask([number for number, _ in pairs], pairs[0][1])) for pairs in requests]
        for task in asks[cancelled:]:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*asks[:cancelled])
        await batcher.drain()
        assert batcher.queued_tokens == 0
        assert batcher.totals.tokens == sum(item.tokens for batch in computed.batches for item in batch)

    computed = batched(use, blocked=False, at_once=at_once, cache_bytes=cache_bytes)
    for batch in computed.batches:
        assert len(batch) == 1 or sum(item.tokens for item in batch) <= BUDGET
        assert len({item.key for item in batch}) == len(batch)


def test_a_long_item_is_in_the_next_batch_once_it_is_the_oldest():
    async def use(batcher: TokenBatcher, computed: Computed) -> None:
        items = [item(0), item(1), item(100, 9), *(item(number) for number in range(2, 40))]
        tasks = await begun(*(batcher.submit([item]) for item in items))
        computed.open.set()
        await asyncio.gather(*tasks)

    assert batched(use).payloads[:4] == [[-1], [0, 1, 2], [100], [3, 4, 5]]


def test_equal_items_are_computed_once():
    async def use(batcher: TokenBatcher, computed: Computed) -> None:
        same = await begun(*(batcher.submit([item(-1), item(7), item(7)]) for _ in range(3)))
        computed.open.set()
        assert [len(results) for results in await asyncio.gather(*same)] == [3, 3, 3]

    assert batched(use).payloads == [[-1], [7]]


def test_too_much_waiting_is_refused_with_the_time_to_come_back():
    async def use(batcher: TokenBatcher, computed: Computed) -> None:
        (waits,) = await begun(batcher.submit([item(100, 15)]))
        with pytest.raises(OverloadedError) as refused:
            await batcher.submit([item(101, 6)])
        assert 1 <= refused.value.retry_after_s <= 60
        equal = batcher.submit([item(100, 15)])  # shares the result: no further tokens
        computed.open.set()
        await asyncio.gather(waits, equal)
        assert len(await batcher.submit([item(number) for number in range(50)])) == 50  # alone: any size

    assert [101] not in batched(use, queue_tokens=15).payloads


def test_a_slow_models_queue_is_bounded_by_the_time_to_compute_it():
    async def use(batcher: TokenBatcher, computed: Computed) -> None:
        batcher.totals.tokens, batcher.totals.computing_s = 100 * BUDGET, 100.0
        assert batcher.room_tokens == 5 * BUDGET
        batcher.totals.computing_s = 10_000.0
        assert batcher.room_tokens == 2 * BUDGET  # otherwise batches would not be full
        (waits,) = await begun(batcher.submit([item(100, 2 * BUDGET - 1)], "first"))
        with pytest.raises(OverloadedError):
            await batcher.submit([item(101, 2 * BUDGET)], "second")
        computed.open.set()
        await waits

    batched(use, queue_s=5.0)


def test_a_small_request_next_to_the_largest_is_in_the_next_batch():
    async def use(batcher: TokenBatcher, computed: Computed) -> None:
        large = await begun(batcher.submit([item(number) for number in range(500)], "large"))
        # The last item belongs to the large request, whose virtual time is far ahead.
        small = await begun(*(batcher.submit([item(number, 4)], f"small {number}") for number in (1000, 1001, 499)))
        computed.open.set()
        await asyncio.gather(*large, *small)

    payloads = batched(use, queue_tokens=50).payloads
    assert {1000, 1001, 499} <= {payload for batch in payloads[1:4] for payload in batch}
    assert 0 in payloads[1] and sum(map(len, payloads)) == 503


def test_a_caller_that_fills_the_queue_does_not_shut_others_out():
    async def use(batcher: TokenBatcher, computed: Computed) -> None:
        flood = await begun(*(batcher.submit([item(number)], "flood") for number in range(50)))
        (other,) = await begun(batcher.submit([item(100)], "other"))
        computed.open.set()
        results = await asyncio.gather(*flood, return_exceptions=True)
        assert len(await other) == 1
        refused = sum(isinstance(result, OverloadedError) for result in results)
        assert refused == 50 - 24 // 3  # of 30 tokens, 3 stay reserved for a next caller, and 3 are another's

    batched(use, queue_tokens=30)


def test_an_error_reaches_every_caller_of_its_batch_alone():
    async def use(batcher: TokenBatcher, computed: Computed) -> None:
        bad = Item("mean", "bad", "bad", 3)
        tasks = await begun(*(batcher.submit(items) for items in ([item(1)], [bad], [item(2), bad])))
        computed.open.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [ValueError] * 3
        assert len(await batcher.submit([item(1), item(2)])) == 2

    assert len(batched(use).batches) == 3


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), max_size=60), most=st.integers(0, 2000))
def test_the_cache_is_bounded_and_holds_no_views(sizes: list[int], most: int):
    cache, whole = ResultCache(most), np.zeros(1000, np.float32)
    for key, size in enumerate(sizes):
        cache.put(key, whole[:size])
        arrays = [array for number in range(key + 1) if (array := cache.get(number)) is not None]
        assert cache.held_bytes == sum(array.nbytes for array in arrays) <= most
        assert all(array.base is None for array in arrays)
