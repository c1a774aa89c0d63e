"""Every way a control port can fail becomes one of our errors, with its reason."""

import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from cacheaware_api import wire
from cacheaware_operator.errors import Unreachable, ViewRefused
from cacheaware_operator.plan import Wanted
from cacheaware_operator.processes import Health
from cacheaware_operator.sidecar_client import SidecarClient, engine_health
from cacheaware_operator.view import build_view, shares_in_force


class ControlPort:
    """Answers every path with what it is told to."""

    def __init__(self) -> None:
        self.answer: tuple[int, Any] = (200, {})
        self.seen: list[tuple[str, str, str]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.seen.append((request.method, request.path, request.headers.get("Authorization", "")))
        status, body = self.answer
        if isinstance(body, str):
            return web.Response(status=status, text=body)
        return web.json_response(body, status=status)


@pytest.fixture
async def control() -> AsyncIterator[ControlPort]:
    port = ControlPort()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", port.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield port
    await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def view(make_wanted: Callable[..., Wanted]) -> wire.View:
    spec = make_wanted().spec
    return build_view(spec, uid="uid-1", prefix_texts={}, effective_percent=shares_in_force(spec, None))


async def test_a_view_is_put_with_the_token_and_its_revision_comes_back(
    control: ControlPort, session: aiohttp.ClientSession, view: wire.View
) -> None:
    control.answer = (200, {"revision": {"pool_uid": "uid-1", "number": 1}})
    assert await SidecarClient(session, control.url, "secret").put_view(view) == view.revision
    assert control.seen == [("PUT", "/pool/view", "Bearer secret")]


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        pytest.param((400, {"error": {"message": "tiers: none"}}), ViewRefused, r"\(400\): tiers: none", id="refused"),
        pytest.param((409, {"error": "older"}), ViewRefused, r"\(409\): older", id="stale"),
        pytest.param((401, "no"), ViewRefused, r"\(401\): no", id="wrong token"),
        pytest.param((503, {"status": "draining"}), Unreachable, "503: draining", id="draining"),
        pytest.param((200, {"revision": {"pool_uid": "u"}}), ViewRefused, "number: is missing", id="bad answer"),
    ],
)
async def test_a_refusal_keeps_the_sidecar_s_reason(
    control: ControlPort,
    session: aiohttp.ClientSession,
    view: wire.View,
    answer: tuple[int, Any],
    error: type[Exception],
    words: str,
) -> None:
    control.answer = answer
    with pytest.raises(error, match=words):
        await SidecarClient(session, control.url, "t").put_view(view)


async def test_a_port_where_nobody_listens_is_unreachable(session: aiohttp.ClientSession, view: wire.View) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        client = SidecarClient(session, f"http://127.0.0.1:{silent.getsockname()[1]}", "t")
        with pytest.raises(Unreachable, match="does not answer"):
            await client.put_view(view)
        with pytest.raises(Unreachable):
            await client.status()
        assert not await client.ready()
        assert (await client.alive()).health is Health.NOT_READY


async def test_a_status_that_cannot_be_read_is_no_status(control: ControlPort, session: aiohttp.ClientSession) -> None:
    control.answer = (200, {"tiers": 1})
    with pytest.raises(Unreachable, match="cannot be read: tiers"):
        await SidecarClient(session, control.url, "t").status()


@pytest.mark.parametrize(
    ("answer", "health", "message"),
    [
        pytest.param((200, {"status": "ready"}), Health.READY, "", id="ready"),
        pytest.param((503, {"status": "loading"}), Health.NOT_READY, "loading", id="loading"),
        pytest.param((500, {"reason": "step failed"}), Health.BROKEN, "step failed", id="dead"),
    ],
)
async def test_an_engine_s_health_is_ready_loading_or_broken(
    control: ControlPort, session: aiohttp.ClientSession, answer: tuple[int, Any], health: Health, message: str
) -> None:
    control.answer = answer
    probe = await engine_health(session, control.url)
    assert (probe.health, probe.message) == (health, message)
