"""The hop to the engine, against a server that sends exactly the bytes of each case."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from cacheaware_api.testing_time import let_pass, standing_still
from cacheaware_sidecar.engine_client import KEEP_ALIVE_SECONDS, ConnectFailed, EngineClient
from cacheaware_sidecar.engine_connection import Broken
from cacheaware_sidecar.testing_sidecar import SOON, eventually

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;ext=1\r\nlo\r\n0\r\nX-Trailer: a\r\n\r\n"
TO_THE_END = b"HTTP/1.1 200 OK\r\n\r\nhello"
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class ScriptedServer:
    """Runs `script` on each connection; counts connections and those that the client closed."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.connections = 0
        self.open = 0
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self.script(reader, writer)
        finally:
            self.open -= 1
            writer.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[EngineClient]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            async with EngineClient(f"http://127.0.0.1:{port}", connect_timeout=5) as client:
                yield client
        finally:
            server.close()
            await eventually(lambda: self.open == 0)


def says(*pieces: bytes, close: bool = False) -> Script:
    """Answers every request with the same pieces, each a packet of its own."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
            await reader.readexactly(length)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if close:
                return

    return script


async def ask(client: EngineClient, body: bytes = b"{}") -> tuple[int, bytes]:
    answer = await client.request("POST", "/v1/completions", {"x-a": "b"}, body)
    try:
        data = bytearray()
        while chunk := await answer.read():
            data += chunk
        return answer.status, bytes(data)
    finally:
        answer.close()


class TestReading:
    @pytest.mark.parametrize("recorded", [LENGTH, CHUNKED], ids=["by length", "by chunks"])
    async def test_an_answer_cut_at_any_byte_is_the_same_answer(self, recorded: bytes) -> None:
        server = ScriptedServer(says(b""))
        async with server.running() as client:
            for cut in range(1, len(recorded)):
                server.script = says(recorded[:cut], recorded[cut:])
                async with ScriptedServer(server.script).running() as fresh:
                    assert await ask(fresh) == (200, b"hello"), cut
            assert client is not None

    async def test_without_a_length_the_end_of_the_connection_is_the_end(self) -> None:
        async with ScriptedServer(says(TO_THE_END, close=True)).running() as client:
            assert await ask(client) == (200, b"hello")

    async def test_what_comes_before_the_answer_is_passed_over(self) -> None:
        hints = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"
        server = ScriptedServer(says(hints + LENGTH))
        async with server.running() as client:
            answer = await client.request("GET", "/", {})
            assert (answer.status, answer.content_type) == (200, "application/json")
            assert "link" not in dict(answer.headers)
            assert await answer.read() == b"hello"
            answer.close()

    @pytest.mark.parametrize("status", [204, 304])
    async def test_some_answers_have_no_body(self, status: int) -> None:
        async with ScriptedServer(says(b"HTTP/1.1 %d X\r\n\r\n" % status)).running() as client:
            assert await ask(client) == (status, b"")

    @pytest.mark.parametrize(
        ("coding", "packed"),
        [
            pytest.param(b"gzip", gzip.compress(b"hello" * 100_000), id="gzip"),
            pytest.param(b"GZIP", gzip.compress(b"hello" * 100_000), id="in capitals"),
            pytest.param(b"deflate", zlib.compress(b"hello" * 100_000), id="deflate"),
            pytest.param(b"identity", b"hello" * 100_000, id="identity"),
        ],
    )
    async def test_a_coding_is_taken_off(self, coding: bytes, packed: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: %s\r\nContent-Length: %d\r\n\r\n" % (coding, len(packed))
        async with ScriptedServer(says(head, packed)).running() as client:
            assert await ask(client) == (200, b"hello" * 100_000)

    async def test_a_large_answer_is_read_no_further_than_it_is_wanted(self) -> None:
        sent = 0

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while sent < 64 * 1024 * 1024:
                writer.write(bytes(64 * 1024))
                await writer.drain()
                sent += 64 * 1024

        async with ScriptedServer(script).running() as client:
            answer = await client.request("GET", "/", {})
            before = -1
            while sent != before:  # until the sockets are full
                before = sent
                await asyncio.sleep(0.1)
            assert sent < 32 * 1024 * 1024
            size = 0
            while chunk := await answer.read():
                size += len(chunk)
            assert size == 64 * 1024 * 1024
            answer.close()


class Poured:
    """Takes what comes, and has had enough after so many pieces."""

    def __init__(self, enough: int | None = None) -> None:
        self.data = b""
        self.pieces = 0
        self.asked = 1
        self._enough = enough

    def take(self, data: bytes) -> bool:
        self.data += data
        self.pieces += 1
        return self._enough is None or self.pieces % self._enough != 0


class TestPouring:
    """What comes is given to a function as it comes."""

    @pytest.mark.parametrize("recorded", [LENGTH, CHUNKED], ids=["by length", "by chunks"])
    async def test_an_answer_cut_at_any_byte_is_the_same_answer(self, recorded: bytes) -> None:
        for cut in range(1, len(recorded)):
            async with ScriptedServer(says(recorded[:cut], recorded[cut:])).running() as client:
                answer = await client.request("GET", "/", {})
                got = Poured()
                assert await answer.pour(got.take)
                assert got.data == b"hello", cut
                assert answer.ended
                answer.close()

    async def test_who_has_had_enough_says_so_and_may_go_on_later(self) -> None:
        pieces = [b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n", *(bytes([letter]) for letter in b"abcdef")]
        async with ScriptedServer(says(*pieces)).running() as client:
            answer = await client.request("GET", "/", {})
            got = Poured(enough=1)
            while not await answer.pour(got.take):
                assert got.pieces == got.asked
                got.asked += 1
            assert got.data == b"abcdef"
            answer.close()

    async def test_a_coding_is_taken_off(self) -> None:
        packed = gzip.compress(b"hello" * 100_000)
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
        async with ScriptedServer(says(head, packed)).running() as client:
            answer = await client.request("GET", "/", {})
            got = Poured()
            assert await answer.pour(got.take)
            assert got.data == b"hello" * 100_000
            answer.close()

    @pytest.mark.parametrize("close", [True, False], ids=["with the last piece", "on the way"])
    async def test_what_goes_wrong_with_the_taker_reaches_who_waits(self, close: bool) -> None:
        rest = b"lo" if close else b"l"
        async with ScriptedServer(says(LENGTH[:-2], rest)).running() as client:
            answer = await client.request("GET", "/", {})

            def fails(data: bytes) -> bool:
                if data.endswith(rest):
                    raise LookupError("nobody reads")
                return True

            with pytest.raises(LookupError):
                await answer.pour(fails)
            answer.close()

    async def test_a_connection_that_breaks_is_told_after_what_came(self) -> None:
        async with ScriptedServer(says(LENGTH[:-2], close=True)).running() as client:
            answer = await client.request("GET", "/", {})
            got = Poured()
            with pytest.raises(Broken, match="broke off"):
                await answer.pour(got.take)
            assert got.data == b"hel"
            answer.close()


class TestBroken:
    @pytest.mark.parametrize(
        "said",
        [
            pytest.param(b"", id="nothing"),
            pytest.param(b"HTTP/1.1 20", id="half a head"),
            pytest.param(b"SSH-2.0-OpenSSH\r\n", id="another protocol"),
            pytest.param(LENGTH[:-1], id="less than its length"),
            pytest.param(CHUNKED[:-20], id="chunks without their end"),
            pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello", id="no chunk size"),
            pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", id="two lengths"),
            pytest.param(LENGTH.replace(b"Content-Type:", b"X-A: a\x01b\r\nX-B:"), id="a control character"),
            pytest.param(LENGTH.replace(b"Content-Type:", b"X-A: a\rb\r\nX-B:"), id="half an end of line"),
            pytest.param(b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 500_000, id="a head without end"),
            pytest.param(b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 1\r\n\r\na", id="unknown coding"),
            pytest.param(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nhello", id="not in its coding"),
            pytest.param(
                b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(b"hello")[:-9], id="half packed"
            ),
            pytest.param(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n", id="an upgrade"),
        ],
    )
    async def test_what_is_no_whole_answer_is_told(self, said: bytes) -> None:
        async with ScriptedServer(says(said, close=True)).running() as client:
            with pytest.raises(Broken):
                await asyncio.wait_for(ask(client), SOON)

    async def test_nobody_there_is_another_failure(self) -> None:
        async with EngineClient("http://127.0.0.1:1", connect_timeout=1) as client:
            with pytest.raises(ConnectFailed):
                await client.request("GET", "/", {})

    async def test_an_answer_before_the_end_of_the_request_counts(self) -> None:
        answered = asyncio.Event()

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
            await writer.drain()
            await answered.wait()  # and the rest of the request is never read

        async with ScriptedServer(script).running() as client:
            assert await ask(client, bytes(16 * 1024 * 1024)) == (413, b"no")
            answered.set()


class TestConnections:
    async def test_one_is_used_again_while_it_is_surely_open(self) -> None:
        server = ScriptedServer(says(LENGTH))
        async with server.running() as client:
            with standing_still():
                for _ in range(5):
                    await ask(client)
            assert server.connections == 1
            let_pass(KEEP_ALIVE_SECONDS)
            await eventually(lambda: server.open == 0)  # closed by us, and not only when the next request comes
            await ask(client)
            assert server.connections == 2

    @pytest.mark.parametrize(
        "said",
        [
            pytest.param(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello", id="told to close"),
            pytest.param(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", id="HTTP/1.0"),
            pytest.param(LENGTH + b"more than its length", id="more than its length"),
            pytest.param(LENGTH + LENGTH.replace(b"hello", b"other"), id="two answers"),
        ],
    )
    async def test_one_that_may_be_out_of_step_is_not(self, said: bytes) -> None:
        server = ScriptedServer(says(said))
        async with server.running() as client:
            assert [await ask(client) for _ in range(3)] == [(200, b"hello")] * 3
            assert server.connections == 3

    async def test_bytes_on_an_idle_one_close_it(self) -> None:
        server = ScriptedServer(says(LENGTH))
        later = asyncio.Event()

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(2)
            writer.write(LENGTH)
            await later.wait()
            writer.write(LENGTH.replace(b"hello", b"other"))
            await reader.read()

        server.script = script
        async with server.running() as client:
            await ask(client)
            later.set()
            await eventually(lambda: server.open == 0)
            server.script = says(LENGTH)
            assert await ask(client) == (200, b"hello")

    async def test_one_whose_answer_is_not_read_to_its_end_is_closed_at_once(self) -> None:
        server = ScriptedServer(says(LENGTH[:-1]))
        async with server.running() as client:
            answer = await client.request("POST", "/", {}, b"")
            assert await answer.read() == b"hell"
            answer.close()
            await eventually(lambda: server.open == 0)

    @pytest.mark.parametrize("size", [2, 4 * 1024 * 1024], ids=["small", "large"])
    async def test_cancelled_at_any_step_it_leaves_none_open(self, size: int) -> None:
        server = ScriptedServer(says(LENGTH[:40], LENGTH[40:]))
        cancelled = 0
        async with server.running() as client:
            for step in range(60):
                asking = asyncio.create_task(ask(client, bytes(size)))
                for _ in range(step):
                    await asyncio.sleep(0)
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    assert await asking == (200, b"hello")
                cancelled += asking.cancelled()
            let_pass(KEEP_ALIVE_SECONDS)
            await eventually(lambda: server.open == 0)
        assert cancelled > 5  # while connecting, sending, waiting for the head, reading
