"""Parts that are killed, frozen, slow or lie: each client gets an answer, and nothing is missing or held afterwards.

`python -m cacheaware_sidecar.testing_chaos --seconds 120` is a longer run of whatever comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cacheaware_sidecar import testing_chaos
from cacheaware_sidecar.testing import Behaviour, StubEngine
from cacheaware_sidecar.testing_process import Process, engine_process, sidecar_process
from cacheaware_sidecar.testing_sidecar import (
    CONTROL_TOKEN,
    SOON,
    Running,
    eventually,
    running_sidecar,
    view_json,
    write_files,
)

PATH = "/v1/completions"
ANSWERED = testing_chaos.Ending.ANSWERED
# Longer than a busy machine keeps a process waiting.
LIMITS = ("--idle-timeout", "3", "--first-byte-timeout", "4", "--request-timeout", "5")


async def ask(client: aiohttp.ClientSession, url: str, streams: bool) -> tuple[int, bytes]:
    """Status and body; fails where neither comes, whatever the limits are."""
    async with asyncio.timeout(100), client.post(url + PATH, json={"prompt": "Hi", "stream": streams}) as answer:
        return answer.status, await answer.read()


def crowd(client: aiohttp.ClientSession, url: str, number: int) -> Sequence[asyncio.Task[tuple[int, bytes]]]:
    return [asyncio.create_task(ask(client, url, streams=n % 2 == 0)) for n in range(number)]


async def outcomes(client: aiohttp.ClientSession, sidecar: Process) -> Counter[str]:
    """What the sidecar counted, by outcome."""
    headers = {"Authorization": f"Bearer {CONTROL_TOKEN}"}
    async with client.get(f"{sidecar.control_url}/metrics", headers=headers) as answer:
        page = await answer.text()
    found = re.findall(r'^cacheaware_requests_total\{outcome="([^"]+)",tier="[^"]*"\} (\S+)', page, re.MULTILINE)
    return Counter({outcome: int(float(count)) for outcome, count in found})


async def drained(client: aiohttp.ClientSession, sidecar: Process) -> None:
    """Until no request is inside any more."""
    headers = {"Authorization": f"Bearer {CONTROL_TOKEN}"}
    async with asyncio.timeout(SOON):
        while True:
            async with client.post(f"{sidecar.control_url}/pool/drain", headers=headers) as answer:
                if (await answer.json())["inside"] == 0:
                    return
            await asyncio.sleep(0.02)


async def seconds_to_say_that_it_lives(client: aiohttp.ClientSession, sidecar: Process) -> float:
    start = time.monotonic()
    async with client.get(f"{sidecar.url}/healthz") as alive:
        assert alive.status == 200
    return time.monotonic() - start


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        yield client


class TestEngine:
    async def test_killed_it_is_told_to_every_client_and_its_successor_is_used(
        self, folder: Path, client: aiohttp.ClientSession
    ) -> None:
        write_files(folder, view_json(), None)
        socket = folder / "kv.sock"
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(engine_process(socket, words=200, pause=0.05))
            sidecar = await stack.enter_async_context(sidecar_process(engine.url, socket, folder, *LIMITS))
            asked = crowd(client, sidecar.url, 12)
            await asyncio.sleep(0.5)
            await engine.kill()
            answers = await asyncio.gather(*asked)
            for status, body in answers:
                assert status in (200, 502, 503, 504)
                assert b'"error"' in body  # a stream that had begun says so in its last event
            await sidecar.ready(False)
            status, _ = await ask(client, sidecar.url, streams=True)
            assert status == 503
            port = int(engine.url.rpartition(":")[2])
            await stack.enter_async_context(engine_process(socket, words=2, pause=0, port=port))
            await sidecar.ready()
            assert (await ask(client, sidecar.url, streams=True))[1].endswith(b"data: [DONE]\n\n")
            await drained(client, sidecar)
            counted = await outcomes(client, sidecar)
            assert (counted.total(), counted["answered"], counted["unavailable"] >= 1) == (14, 1, True)

    async def test_frozen_it_makes_the_replica_unready_and_holds_nobody_for_ever(
        self, folder: Path, client: aiohttp.ClientSession
    ) -> None:
        write_files(folder, view_json(), None)
        socket = folder / "kv.sock"
        async with (
            engine_process(socket, words=120, pause=0.05) as engine,
            sidecar_process(engine.url, socket, folder, *LIMITS) as sidecar,
        ):
            asked = crowd(client, sidecar.url, 8)
            await asyncio.sleep(0.5)
            engine.freeze()
            answers = await asyncio.gather(*asked)
            assert {status for status, _ in answers} <= {200, 502, 504}
            assert all(b'"error"' in body for _, body in answers)
            await sidecar.ready(False)
            assert min([await seconds_to_say_that_it_lives(client, sidecar) for _ in range(3)]) < 2
            assert (await ask(client, sidecar.url, streams=False))[0] == 503
            engine.thaw()
            await sidecar.ready()
            assert (await ask(client, sidecar.url, streams=True))[1].endswith(b"data: [DONE]\n\n")
            await drained(client, sidecar)
            counted = await outcomes(client, sidecar)
            assert (counted.total(), counted["answered"]) == (10, 1)


class TestSidecar:
    async def test_killed_it_leaves_nothing_in_the_engine_and_starts_again(
        self, engine: StubEngine, folder: Path, client: aiohttp.ClientSession
    ) -> None:
        write_files(folder, view_json(), None)
        engine.behaviour = Behaviour(words=("x",) * 1000, pause=0.05)
        async with sidecar_process(engine.url, folder / "kv.sock", folder) as sidecar:
            asked = crowd(client, sidecar.url, 10)
            requests = list(await engine.count(10))
            await sidecar.kill()
            assert all(isinstance(each, BaseException) for each in await asyncio.gather(*asked, return_exceptions=True))
            async with asyncio.timeout(SOON):
                for request in requests:
                    await request.left.wait()
        engine.behaviour = Behaviour()
        async with sidecar_process(engine.url, folder / "kv.sock", folder) as sidecar:
            assert (await ask(client, sidecar.url, streams=False))[0] == 200

    async def test_with_no_room_for_its_log_it_serves_on_and_ends_well(
        self, engine: StubEngine, folder: Path, client: aiohttp.ClientSession
    ) -> None:
        write_files(folder, view_json(), None)
        async with sidecar_process(engine.url, folder / "kv.sock", folder, log=Path("/dev/full")) as sidecar:
            for streams in (True, False) * 10:
                assert (await ask(client, sidecar.url, streams))[0] == 200
            await drained(client, sidecar)
            assert (await outcomes(client, sidecar))["answered"] == 20
            sidecar.terminate()
            assert await sidecar.ended() == 0


class LyingEngine:
    """Answers generations with the bytes of a test and closes, and its health like a well engine."""

    def __init__(self) -> None:
        self.says = b""
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            ok = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
            writer.write(self.says if head.startswith(b"POST") else ok)
            await writer.drain()
        writer.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENT = b'data: {"choices": [{"text": "Hi"}]}\n\n'


class TestLies:
    @pytest.fixture
    async def lying(self, engine: StubEngine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
        liar = LyingEngine()
        async with liar.running():
            monkeypatch.setattr(StubEngine, "url", liar.url)  # its accounts stay those of the stub
            async with running_sidecar(engine, folder) as sidecar:
                yield liar, sidecar

    @pytest.mark.parametrize(
        ("says", "status"),
        [
            pytest.param(HEAD + b'Content-Length: 100\r\n\r\n{"choices": []}', 502, id="less than it said"),
            pytest.param(HEAD + b'Content-Length: 15\r\n\r\n{"choices": []} and more', 200, id="more than it said"),
            pytest.param(HEAD + b"Content-Length: -1\r\n\r\n{}", 502, id="less than nothing"),
            pytest.param(HEAD + b'Transfer-Encoding: chunked\r\n\r\nff\r\n{"choices"', 502, id="half a chunk"),
            pytest.param(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", 502, id="no gzip"),
            pytest.param(STREAM + b"Content-Length: 9999\r\n\r\n" + EVENT, 200, id="a stream with a length"),
            pytest.param(
                STREAM + b"Transfer-Encoding: chunked\r\n\r\n40\r\n" + EVENT, 200, id="a stream cut in a chunk"
            ),
            pytest.param(STREAM + b"\r\n" + EVENT, 200, id="a stream without an end"),
            pytest.param(b"HTTP/1.1 200", 502, id="no head"),
            pytest.param(b"", 502, id="nothing"),
        ],
    )
    @pytest.mark.parametrize("streams", [True, False], ids=["stream", "no stream"])
    async def test_whatever_it_says_the_client_learns_and_nothing_stays(
        self, lying: tuple[LyingEngine, Running], client: aiohttp.ClientSession, says: bytes, status: int, streams: bool
    ) -> None:
        liar, sidecar = lying
        liar.says = says
        got, body = await ask(client, sidecar.url, streams)
        assert got == status
        if status != 200 or says.startswith(STREAM):
            assert b'"engine-broke"' in body
        await eventually(sidecar.is_idle)


async def test_one_hung_request_delays_no_other(
    sidecar: Running, engine: StubEngine, client: aiohttp.ClientSession
) -> None:
    engine.behaviour = Behaviour(hang_after=0)
    hung = [asyncio.create_task(ask(client, sidecar.url, streams)) for streams in (True, False)]
    await engine.count(2)
    engine.behaviour = Behaviour()
    async with asyncio.timeout(SOON):  # less than any limit of the hung ones
        answers = await asyncio.gather(*crowd(client, sidecar.url, 50))
    assert {status for status, _ in answers} == {200}
    assert not any(each.done() for each in hung)
    for each in hung:
        each.cancel()
    await asyncio.gather(*hung, return_exceptions=True)
    await eventually(sidecar.is_idle)


async def test_whatever_comes_every_client_is_answered_and_counted_once() -> None:
    outcome = await testing_chaos.run(5, 6, lambda so_far: len(so_far.faults) > 1 and so_far.endings[ANSWERED] > 20)
    assert outcome.problems == []
