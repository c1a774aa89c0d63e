"""Requests that arrive while streams run: how many begin in one turn of the event loop, and in which order."""

from __future__ import annotations

import asyncio

import aiohttp

from cacheaware_sidecar.testing import Behaviour, StubEngine
from cacheaware_sidecar.testing_sidecar import Running, eventually
from cacheaware_sidecar.turns import Turns

CHAT = "/v1/chat/completions"


async def arriving(turns: Turns, count: int) -> tuple[list[int], list[asyncio.Task[None]]]:
    """So many at once; the list grows as they begin."""
    begun: list[int] = []

    async def one(number: int) -> None:
        await turns.begin()
        begun.append(number)

    return begun, [asyncio.create_task(one(number)) for number in range(count)]


async def turns_until_all(begun: list[int], count: int) -> list[int]:
    """How many more had begun after each turn of the loop in which any did."""
    grown, before = [], 0
    for _ in range(100):
        await asyncio.sleep(0)
        if len(begun) > before:
            grown.append(len(begun) - before)
            before = len(begun)
        if before == count:
            break
    return grown


async def test_all_begin_at_once_while_no_stream_runs() -> None:
    begun, tasks = await arriving(Turns(2), 20)
    assert await turns_until_all(begun, 20) == [20]
    await asyncio.gather(*tasks)


async def test_two_begin_in_a_turn_beside_a_stream_in_the_order_in_which_they_came() -> None:
    turns = Turns(2)
    turns.streams = 1
    begun, tasks = await arriving(turns, 7)
    assert await turns_until_all(begun, 7) == [2, 2, 2, 1]
    assert begun == list(range(7))
    await asyncio.gather(*tasks)


async def test_one_that_comes_alone_waits_for_nothing() -> None:
    turns = Turns(2)
    turns.streams = 1
    for _ in range(5):
        begun, (task,) = await arriving(turns, 1)
        await asyncio.sleep(0)
        assert begun == [0]
        await task
        await asyncio.sleep(0)


async def test_one_that_leaves_takes_no_turn() -> None:
    turns = Turns(1)
    turns.streams = 1
    begun, tasks = await arriving(turns, 4)
    await asyncio.sleep(0)
    tasks[1].cancel()
    assert await turns_until_all(begun, 3) == [1, 1, 1]
    assert begun == [0, 2, 3]
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_those_that_wait_begin_although_the_last_stream_ends() -> None:
    turns = Turns(1)
    turns.streams = 1
    begun, tasks = await arriving(turns, 3)
    await asyncio.sleep(0)
    turns.streams = 0
    await asyncio.gather(*tasks)
    assert begun == [0, 1, 2]


async def test_a_crowd_beside_a_stream_is_answered_and_who_leaves_is_forgotten(
    sidecar: Running, engine: StubEngine
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    let_go = asyncio.Event()
    engine.behaviour = Behaviour(words=("a", "b"), hang_after=1, flush=True)
    async with aiohttp.ClientSession() as client:
        async with client.post(sidecar.url + CHAT, json={**body, "stream": True}) as stream:
            await stream.content.readline()
            engine.behaviour = Behaviour(hold=let_go)

            async def ask() -> int:
                async with sidecar.client.post(sidecar.url + CHAT, json=body) as answer:
                    return answer.status

            crowd = [asyncio.create_task(ask()) for _ in range(12)]
            await asyncio.sleep(0)
            crowd[5].cancel()
            let_go.set()
            answers = await asyncio.gather(*crowd, return_exceptions=True)
            assert [one for one in answers if not isinstance(one, asyncio.CancelledError)] == [200] * 11
            stream.close()
        await eventually(sidecar.is_idle)
