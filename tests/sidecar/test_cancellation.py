"""A client that leaves is noticed at once, wherever its request is, and everything is given back once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from cacheaware_sidecar.testing import Behaviour, StubEngine
from cacheaware_sidecar.testing_sidecar import SOON, CancelledAt, Running, eventually, running_sidecar

CHAT = "/v1/chat/completions"


def body(streams: bool, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": streams, **more}


async def ask(sidecar: Running, streams: bool, **more: Any) -> bytes:
    """On a connection of its own, which closes when the call is cancelled."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client,
        client.post(sidecar.url + CHAT, json=body(streams, **more)) as answer,
    ):
        return await answer.read()


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "no stream"])
async def test_the_engine_learns_at_once_that_a_client_has_left(
    sidecar: Running, engine: StubEngine, streams: bool
) -> None:
    engine.behaviour = Behaviour(hang_after=0)
    call = asyncio.create_task(ask(sidecar, streams))
    (request,) = await engine.count(1)
    assert not sidecar.is_idle()
    await cancel(call)
    await asyncio.wait_for(request.left.wait(), SOON)
    await eventually(sidecar.is_idle)
    assert [one.outcome for one in sidecar.sidecar.decisions.last(5)] == ["cancelled"]


async def test_a_stream_is_cancelled_in_its_middle(sidecar: Running, engine: StubEngine) -> None:
    engine.behaviour = Behaviour(words=("x",) * 10_000, pause=0.01)
    async with aiohttp.ClientSession() as client:
        async with client.post(sidecar.url + CHAT, json=body(True)) as answer:
            await answer.content.readline()
            answer.close()
        await asyncio.wait_for(engine.requests[0].left.wait(), SOON)
    await eventually(sidecar.is_idle)


async def test_a_request_that_leaves_while_it_waits_is_never_forwarded(engine: StubEngine, folder: Path) -> None:
    let_go = asyncio.Event()
    engine.behaviour = Behaviour(hold=let_go)
    async with running_sidecar(engine, folder, engine_slots=1) as sidecar:
        first = asyncio.create_task(ask(sidecar, streams=False))
        await engine.count(1)
        waits = [asyncio.create_task(ask(sidecar, streams=streams, user="leaver")) for streams in (True, False)]
        last = asyncio.create_task(ask(sidecar, streams=False, user="stayer"))
        await eventually(lambda: sidecar.sidecar.gate.queued == 3)
        for call in waits:
            await cancel(call)
        await eventually(lambda: sidecar.sidecar.gate.queued == 1)
        let_go.set()
        await asyncio.gather(first, last)
        assert [request.json.get("user") for request in engine.requests] == [None, "stayer"]
        await eventually(sidecar.is_idle)


async def test_cancelling_one_request_leaves_others_alone_whatever_ids_they_chose(
    sidecar: Running, engine: StubEngine
) -> None:
    let_go = asyncio.Event()
    engine.behaviour = Behaviour(hold=let_go)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client:

        async def named(name: str) -> int:
            message = body(False, request_id=name)
            async with client.post(sidecar.url + CHAT, json=message, headers={"x-request-id": name}) as answer:
                return answer.status

        a, ab = asyncio.create_task(named("a")), asyncio.create_task(named("ab"))
        requests = await engine.count(2)
        assert len({request.headers["x-request-id"] for request in requests}) == 2
        assert not {request.headers["x-request-id"] for request in requests} & {"a", "ab"}
        assert all("request_id" not in request.json for request in requests)
        await cancel(a)
        await eventually(lambda: sum(request.left.is_set() for request in requests) == 1)
        let_go.set()
        assert await ab == 200


async def test_a_thousand_random_cancellations_leave_nothing_behind(engine: StubEngine, folder: Path) -> None:
    engine.behaviour = Behaviour(words=("x",) * 20, flush=True)
    rng = random.Random(7)
    async with (
        running_sidecar(engine, folder, engine_slots=8) as sidecar,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as client,
    ):

        async def one() -> None:
            message = body(rng.random() < 0.7, service_tier=rng.choice(["gold", "bronze"]), n=rng.choice([1, 1, 2]))
            async with client.post(sidecar.url + CHAT, json=message) as answer:
                await answer.read()

        async def left_at_any_turn() -> None:
            """Turns of the event loop, and no seconds: a request takes as many on any machine."""
            call = asyncio.create_task(one())
            for _ in range(int(rng.random() ** 2 * 300)):
                await asyncio.sleep(0)
            await cancel(call)

        for _ in range(20):
            await asyncio.gather(*(left_at_any_turn() for _ in range(50)))
        await eventually(sidecar.is_idle)
        await eventually(lambda: all(request.left.is_set() or request.ended.is_set() for request in engine.requests))
        outcomes = [decision.outcome for decision in sidecar.sidecar.decisions.last(1000)]
        assert outcomes.count("cancelled") > 100
        assert set(outcomes) <= {"cancelled", "answered"}
        engine.behaviour = Behaviour()
        assert b"Paris" in await ask(sidecar, streams=False)


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "no stream"])
async def test_a_request_cancelled_at_any_of_its_awaits_gives_everything_back(
    engine: StubEngine, folder: Path, streams: bool
) -> None:
    engine.behaviour = Behaviour(words=("x",) * 5, flush=True)
    async with running_sidecar(engine, folder, engine_slots=1) as sidecar:
        moment = 0
        reached = True

        async def handler(request: web.Request) -> web.StreamResponse:
            nonlocal reached
            driven = CancelledAt(sidecar.sidecar.proxy.generate(request), moment)
            try:
                answer: web.StreamResponse = await driven
                return answer
            finally:
                reached = driven.reached

        server = web.AppRunner(_one_route(handler), access_log=None)
        await server.setup()
        try:
            await web.TCPSite(server, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{server.addresses[0][1]}{CHAT}"
            while reached:
                with contextlib.suppress(aiohttp.ClientError):
                    async with aiohttp.ClientSession() as client, client.post(url, json=body(streams)) as answer:
                        await answer.read()
                await eventually(sidecar.is_idle)
                moment += 1
                assert moment < 200
        finally:
            await server.cleanup()
        assert moment >= 3  # connecting, the answer's head, its body: there were moments to test
        outcomes = [decision.outcome for decision in sidecar.sidecar.decisions.last(moment)]
        assert outcomes[0] == "answered"
        await eventually(lambda: all(request.left.is_set() or request.ended.is_set() for request in engine.requests))


def _one_route(handler: Any) -> web.Application:
    app = web.Application()
    app.router.add_post(CHAT, handler)
    return app
