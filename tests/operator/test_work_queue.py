"""Pools that wait for a look: each once, never twice at a time, failing ones later and later. In virtual time."""

import asyncio

import pytest

from cacheaware_operator.work_queue import FIRST_DELAY, LONGEST_DELAY, WorkQueue

pytestmark = pytest.mark.looptime


def make_queue() -> WorkQueue[str]:
    return WorkQueue(asyncio.get_running_loop().time)


def now() -> float:
    return asyncio.get_running_loop().time()


async def empty(queue: WorkQueue[str], seconds: float = 1000.0) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await queue.get()
    except TimeoutError:
        return True
    return False


async def test_what_is_added_many_times_is_handed_out_once() -> None:
    queue = make_queue()
    for _ in range(5):
        queue.add("a")
    assert await queue.get() == "a"
    queue.done("a")
    assert await empty(queue)


async def test_a_key_is_not_handed_out_again_before_it_was_given_back() -> None:
    queue = make_queue()
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("a")
    assert await empty(queue)
    queue.done("a")
    assert await queue.get() == "a"


async def test_the_earliest_time_that_a_key_is_wanted_at_counts() -> None:
    queue = make_queue()
    queue.add("a", 60)
    queue.add("a", 5)
    queue.add("a", 30)
    started = now()
    assert await queue.get() == "a"
    assert now() - started == pytest.approx(5, abs=0.01)
    queue.done("a")
    assert await empty(queue)


async def test_a_change_wakes_a_key_that_was_to_rest() -> None:
    queue = make_queue()
    queue.add("a")
    await queue.get()
    queue.done("a", again_in=120)
    started = now()
    asyncio.get_running_loop().call_later(3, queue.add, "a")
    assert await queue.get() == "a"
    assert now() - started == pytest.approx(3, abs=0.01)


async def test_a_failing_key_is_handed_out_later_and_later_until_it_succeeds() -> None:
    queue = make_queue()
    queue.add("a")
    waits = []
    for _ in range(12):
        assert await queue.get() == "a"
        queue.failed("a")
        started = now()
        assert await queue.get() == "a"
        waits.append(now() - started)
        queue.failed("a")
        await queue.get()
        queue.failed("a")
    assert waits[0] == pytest.approx(FIRST_DELAY, abs=0.01)
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(LONGEST_DELAY, abs=0.01)
    await queue.get()
    queue.done("a")
    queue.add("a")
    await queue.get()
    assert queue.failed("a") == FIRST_DELAY


async def test_every_waiting_worker_gets_a_key_of_its_own() -> None:
    queue = make_queue()
    workers = [asyncio.create_task(queue.get()) for _ in range(3)]
    await asyncio.sleep(0)
    for key in "abc":
        queue.add(key)
    assert sorted(await asyncio.gather(*workers)) == ["a", "b", "c"]


async def test_a_rest_without_end_is_no_work() -> None:
    queue = make_queue()
    queue.add("a")
    await queue.get()
    queue.done("a", again_in=float("inf"))
    assert await empty(queue)
