"""Sidecars that are asked: one that misses a question is as it was, one that misses two is silent and asked less."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cacheaware_api import wire
from cacheaware_api.testing_time import standing_still
from cacheaware_operator.fleet import ReplicaSnapshot
from cacheaware_operator.sidecars import Sidecars

POD: dict[str, Any] = {"metadata": {"name": "chat-0", "uid": "uid-0"}, "status": {"podIP": "127.0.0.1"}}


class World:
    """One sidecar, a clock, and who asks."""

    def __init__(self, status: wire.PoolStatus) -> None:
        self.status = status
        self.well = True
        self.asked = 0
        self.now = 0.0

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response(wire.to_json(self.status)) if self.well else web.Response(status=500)


@pytest.fixture
def world(make_replica: Callable[..., ReplicaSnapshot]) -> World:
    status = make_replica().status
    assert status is not None
    return World(status)


@pytest.fixture
async def look(world: World) -> AsyncIterator[Callable[[], Any]]:
    """Ask for the status of the one pod; None where it is silent."""
    app = web.Application()
    app.router.add_get("/pool/status", world.answer)
    async with TestServer(app, host="127.0.0.1") as server, aiohttp.ClientSession() as session:
        url = str(server.make_url("")).rstrip("/")
        sidecars = Sidecars(session, lambda: world.now, lambda pod: url)

        async def look() -> wire.PoolStatus | None:
            with standing_still():  # they are asked for two seconds
                return (await sidecars.statuses([POD], "token")).get("chat-0")

        yield look


async def test_one_question_that_was_missed_is_no_news(world: World, look: Callable[[], Any]) -> None:
    assert await look() == world.status
    world.well = False
    assert await look() == world.status
    world.now = 1
    assert await look() is None


async def test_one_that_never_answered_has_no_status(world: World, look: Callable[[], Any]) -> None:
    world.well = False
    assert await look() is None


async def test_a_silent_one_is_asked_less_and_less_often(world: World, look: Callable[[], Any]) -> None:
    world.well = False
    for world.now in range(120):  # the clock is the loop's variable
        await look()
    assert world.asked <= 12


async def test_one_that_is_back_is_believed_at_once(world: World, look: Callable[[], Any]) -> None:
    world.well = False
    await look()
    world.now, world.well = 1, True
    assert await look() == world.status
    world.well = False
    assert await look() == world.status
