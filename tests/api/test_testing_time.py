"""Time that tests move: limits end when they say so, in their order, and never while it stands still."""

from __future__ import annotations

import asyncio
import time

import pytest

from cacheaware_api.testing_time import let_pass, standing_still


async def test_what_is_due_happens_at_once_and_in_its_order() -> None:
    happened: list[int] = []
    loop = asyncio.get_running_loop()
    for seconds in (3000, 1000, 2000, 9000):
        loop.call_later(seconds, happened.append, seconds)
    let_pass(3000)
    await asyncio.sleep(0.001)  # due after all of them, so it ends behind them
    assert happened == [1000, 2000, 3000]


async def test_a_limit_that_has_passed_ends_what_it_limits() -> None:
    waiting = asyncio.create_task(asyncio.wait_for(asyncio.Event().wait(), 3000))
    await asyncio.sleep(0)
    let_pass(3000)
    with pytest.raises(TimeoutError):
        await waiting


async def test_no_limit_ends_while_time_stands_still_and_sockets_work_on() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    with standing_still():
        async with asyncio.timeout(0.001):
            time.sleep(0.002)  # noqa: ASYNC251  # the limit is over for every clock but the loop's
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"hello\n")
            assert await reader.read() == b"hello\n"
    writer.close()
    server.close()


async def test_after_it_stood_still_it_goes_on_from_there() -> None:
    loop = asyncio.get_running_loop()
    with standing_still():
        before = loop.time()
        let_pass(5)
        assert loop.time() == before + 5
    assert before + 5 <= loop.time() < before + 3000
    await asyncio.sleep(0.001)  # has an end again
