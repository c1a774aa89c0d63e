"""What may have reached the engine is never sent to it again: a generation that runs twice is paid for twice. So none
may be lost either, on a connection that the engine is just closing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from cacheaware_api.testing_time import let_pass, standing_still
from cacheaware_sidecar.engine_client import KEEP_ALIVE_SECONDS
from cacheaware_sidecar.testing import Behaviour, StubEngine
from cacheaware_sidecar.testing_sidecar import Running, running_sidecar

STREAMS = pytest.mark.parametrize("streams", [True, False], ids=["stream", "no stream"])


async def ask(sidecar: Running, name: str, streams: bool = False) -> int:
    """The status; `name` tells requests apart in the engine."""
    body = {"prompt": "Hi", "stream": streams, "user": name}
    async with sidecar.client.post(f"{sidecar.url}/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status


@STREAMS
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(Behaviour(die_after=0), id="it dies before its first byte"),
        pytest.param(Behaviour(flush=True, die_after=2), id="it dies in its answer"),
        pytest.param(Behaviour(flush=True, end_after=2), id="it ends its answer early"),
        pytest.param(Behaviour(status=500, body=b"oops"), id="it fails"),
        pytest.param(Behaviour(status=503, body=b"later"), id="it says that it is not ready"),
        pytest.param(Behaviour(status=429, body=b"{}"), id="it says that it is busy"),
        pytest.param(Behaviour(hang_after=0), id="it hangs"),
    ],
)
async def test_whatever_becomes_of_a_request_it_is_sent_once(
    engine: StubEngine, folder: Path, how: Behaviour, streams: bool
) -> None:
    engine.behaviour = how
    async with running_sidecar(engine, folder, first_byte_timeout=10, request_timeout=10) as sidecar:
        asked = asyncio.create_task(ask(sidecar, "first", streams))
        await engine.count(1)
        if how.hang_after == 0:
            let_pass(10)
        await asked
        engine.behaviour = Behaviour()
        assert await ask(sidecar, "second", streams) == 200
    assert [request.json["user"] for request in engine.requests] == ["first", "second"]


class LosingEngine:
    """A plain engine that loses generations: it closes their connection instead of answering. `loses` is told which
    request of its connection it is, and for how many seconds that was idle.
    """

    kv_socket: Path | None = None

    def __init__(self, loses: Callable[[int, float], bool]) -> None:
        self._loses = loses
        self.url = ""
        self.generations: list[str] = []
        self.connections = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[LosingEngine]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        number, idle_since = 0, loop.time()
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                number += 1
                generates = head.startswith(b"post")
                if generates:
                    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                    self.generations.append(json.loads(await reader.readexactly(length))["user"])
                    self.connections += number == 1
                if generates and self._loses(number, loop.time() - idle_since):
                    break
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
                await writer.drain()
                idle_since = loop.time()
        writer.close()


async def test_on_a_kept_connection_that_breaks_it_is_sent_once_too(folder: Path) -> None:
    async with (
        LosingEngine(lambda number, idle: number == 2).running() as engine,
        running_sidecar(engine, folder) as sidecar,
    ):
        with standing_still():
            assert [await ask(sidecar, name) for name in ("first", "second", "third")] == [200, 502, 200]
    assert engine.generations == ["first", "second", "third"]


async def test_a_hundred_calls_around_the_engines_keep_alive_are_all_answered(folder: Path) -> None:
    """It closes what was idle for a second. That may still be on its way while we use the connection."""
    async with (
        LosingEngine(lambda number, idle: number > 1 and idle >= 1).running() as engine,
        running_sidecar(engine, folder) as sidecar,
    ):
        for number in range(100):
            assert await ask(sidecar, str(number)) == 200
            let_pass(0.95 + number / 1000)
    assert engine.generations == [str(number) for number in range(100)]
    assert engine.connections == 100


def test_we_give_up_a_connection_before_any_engine_does() -> None:
    listening = pytest.importorskip("cacheaware_engine.listening", reason="needs the engine extra")
    assert KEEP_ALIVE_SECONDS < listening.KEEP_ALIVE_S
    assert KEEP_ALIVE_SECONDS < 1, "vLLM's is a whole number of seconds, 5 where nobody set it"
