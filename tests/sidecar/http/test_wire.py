"""Bytes on the wire that no client library sends: each gets an answer in OpenAI's shape or is served, and none of them
reaches the engine as another request than it was here.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import zlib
from pathlib import Path

import pytest

from cacheaware_sidecar.http_server import LARGEST_HEADER
from cacheaware_sidecar.request_body import BodyRoom
from cacheaware_sidecar.testing import Behaviour, StubEngine
from cacheaware_sidecar.testing_http import raw_connection, raw_exchange, raw_post
from cacheaware_sidecar.testing_sidecar import SOON, Running, eventually, running_sidecar

HI = json.dumps({"prompt": "Hi"}).encode()
STREAM = json.dumps({"prompt": "Hi", "stream": True}).encode()
GET = b"GET /healthz HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
SECRET = b"sk-never-to-be-repeated"


class TestNotARequest:
    @pytest.mark.parametrize(
        ("data", "status"),
        [
            pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50, 400, id="TLS"),
            pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, id="HTTP/2"),
            pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", 400, id="SSH"),
            pytest.param(b"FOO@ / HTTP/1.1\r\n\r\n", 400, id="no method"),
            pytest.param(raw_post(HI, version=b"9.9"), 400, id="no version"),
            pytest.param(b"GET /healthz HTTP/1.1\nHost: x\n\n", 400, id="bare LF"),
            pytest.param(b"GET /healthz HTTP/1.1\r\n\r\n", 400, id="no host"),
            pytest.param(raw_post(HI, b"Content-Length: 3"), 400, id="two lengths"),
            pytest.param(raw_post(HI, b"Transfer-Encoding: chunked"), 400, id="a length beside chunks"),
            pytest.param(raw_post(HI, length=b"-5"), 400, id="a negative length"),
            pytest.param(raw_post(HI, length=b"0x10"), 400, id="a hexadecimal length"),
            pytest.param(raw_post(HI, length=b"9" * 30), 400, id="a length beyond 64 bits"),
            pytest.param(CHUNKED + b"zz\r\nabc\r\n", 400, id="no chunk size"),
            pytest.param(raw_post(HI, b"X-A: a\x00b"), 400, id="a NUL in a header"),
            pytest.param(raw_post(HI, b"X-A : a"), 400, id="a space before the colon"),
            pytest.param(raw_post(HI, b"X-A: a\r\n b"), 400, id="a folded header"),
            pytest.param(raw_post(HI, b"X-A: " + b"a" * (LARGEST_HEADER + 1)), 431, id="a header too long"),
            pytest.param(raw_post(HI, path=b"/" + b"a" * (LARGEST_HEADER + 1)), 431, id="a path too long"),
            pytest.param(raw_post(HI, *(b"X-%d: a" % n for n in range(200))), 400, id="too many headers"),
        ],
    )
    async def test_it_is_told_so_in_openais_shape_and_the_connection_closed(
        self, sidecar: Running, engine: StubEngine, data: bytes, status: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO):
            answer = await raw_exchange(sidecar.url, data)
        assert (answer.status, answer.closed) == (status, True)
        assert answer.error["type"] == "invalid_request_error"
        assert "x-cacheaware-reason: " in answer.head
        assert engine.requests == []
        assert sidecar.is_idle()
        assert [record.levelname for record in caplog.records] == ["INFO"]  # strangers do not fill the log

    @pytest.mark.parametrize(
        "data",
        [
            pytest.param(raw_post(HI, b"Authorization: Bearer " + SECRET * 1000), id="a key too long"),
            pytest.param(raw_post(HI, b"Authorization: Bearer " + SECRET + b"\x00"), id="a key with a NUL"),
            pytest.param(b"Authorization: Bearer " + SECRET + b"\r\n\r\n", id="a header without its request"),
        ],
    )
    async def test_a_key_in_it_is_repeated_nowhere(
        self, sidecar: Running, data: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.DEBUG, logger="cacheaware_sidecar"):
            answer = await raw_exchange(sidecar.url, data)
        assert answer.status in (400, 431)
        assert SECRET not in answer.data
        assert SECRET.decode() not in caplog.text

    async def test_a_request_behind_it_is_not_read(self, sidecar: Running, engine: StubEngine) -> None:
        answer = await raw_exchange(sidecar.url, raw_post(HI, b"Transfer-Encoding: chunked") + raw_post(HI))
        assert answer.data.count(b"\r\n\r\n") == 1
        assert engine.requests == []


class TestServed:
    @pytest.mark.parametrize("header", [b"X-A: b", b"Connection: keep-alive"], ids=["closing", "keep-alive"])
    async def test_http_1_0_gets_a_stream_that_ends_with_the_connection(self, sidecar: Running, header: bytes) -> None:
        answer = await raw_exchange(sidecar.url, raw_post(STREAM, header, version=b"1.0"))
        assert (answer.status, answer.closed) == (200, True)
        assert "transfer-encoding" not in answer.head
        assert answer.body.startswith(b"data: {")
        assert answer.body.endswith(b"data: [DONE]\n\n")

    async def test_http_1_0_may_keep_its_connection_for_answers_with_a_length(self, sidecar: Running) -> None:
        request = raw_post(HI, b"Connection: keep-alive", version=b"1.0")
        answer = await raw_exchange(sidecar.url, request + raw_post(HI, version=b"1.0"))
        assert answer.closed
        assert answer.data.count(b"HTTP/1.0 200") == 2

    async def test_requests_sent_ahead_are_answered_in_their_order(self, sidecar: Running, engine: StubEngine) -> None:
        first, second = (json.dumps({"prompt": "Hi", "user": name}).encode() for name in ("1", "2"))
        answer = await raw_exchange(sidecar.url, raw_post(first) + raw_post(second) + GET)
        assert answer.closed
        assert answer.data.count(b"HTTP/1.1 200") == 3
        assert answer.data.endswith(b'{"status": "ok"}')
        assert [request.json["user"] for request in engine.requests] == ["1", "2"]

    async def test_an_offer_to_upgrade_is_declined_by_answering(self, sidecar: Running, engine: StubEngine) -> None:
        headers = (b"Connection: close, Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk")
        answer = await raw_exchange(sidecar.url, raw_post(HI, *headers))
        assert answer.status == 200
        assert not {name.lower() for name in engine.requests[0].headers} & {"upgrade", "http2-settings"}

    async def test_the_body_is_asked_for_where_the_client_waits_to_be_asked(self, sidecar: Running) -> None:
        async with raw_connection(sidecar.url) as connection:
            await connection.send(raw_post(b"", b"Expect: 100-continue", b"Connection: close", length=b"16"))
            assert (await connection.rest(until=b"\r\n\r\n")).data == b"HTTP/1.1 100 Continue\r\n\r\n"
            await connection.send(b'{"prompt": "Hi"}')
            assert (await connection.rest()).status == 200

    @pytest.mark.parametrize("value", [b"200-ok", b"\xff", b"a" * 4000])
    async def test_another_expectation_is_417_and_not_repeated(self, sidecar: Running, value: bytes) -> None:
        answer = await raw_exchange(sidecar.url, raw_post(HI, b"Expect: " + value, b"Connection: close"))
        assert (answer.status, answer.error["type"]) == (417, "invalid_request_error")
        assert value not in answer.data

    @pytest.mark.parametrize("name", [b"traceparent", b"x-request-id", b"authorization", b"x-llm-d-slo-tpot-ms"])
    @pytest.mark.parametrize("value", [b"\xff\xfe", b"", b"a" * 4000, b"\xc3\x28", "é".encode()])
    async def test_no_value_of_a_header_breaks_it(self, sidecar: Running, name: bytes, value: bytes) -> None:
        answer = await raw_exchange(sidecar.url, raw_post(HI, name + b": " + value, b"Connection: close"))
        assert answer.status in (200, 400)
        assert answer.closed


class TestBodies:
    @pytest.mark.parametrize("coding", ["gzip", "deflate"])
    async def test_a_coding_that_is_known_is_taken_apart(
        self, sidecar: Running, engine: StubEngine, coding: str
    ) -> None:
        packed = gzip.compress(HI) if coding == "gzip" else zlib.compress(HI)
        headers = (b"Content-Encoding: " + coding.encode(), b"Connection: close")
        assert (await raw_exchange(sidecar.url, raw_post(packed, *headers))).status == 200
        assert engine.requests[0].json["prompt"] == "Hi"
        assert "content-encoding" not in engine.requests[0].headers

    @pytest.mark.parametrize("coding", [b"snappy", b"gzip, gzip", b"x" * 500])
    async def test_another_one_is_415(self, sidecar: Running, engine: StubEngine, coding: bytes) -> None:
        answer = await raw_exchange(sidecar.url, raw_post(HI, b"Content-Encoding: " + coding, b"Connection: close"))
        assert (answer.status, answer.error["code"]) == (415, "unknown-coding")
        assert engine.requests == []

    async def test_what_is_not_in_its_coding_is_400(self, sidecar: Running) -> None:
        answer = await raw_exchange(sidecar.url, raw_post(HI, b"Content-Encoding: gzip", b"Connection: close"))
        assert (answer.status, answer.error["code"]) == (400, "bad-request")


class TestSlowClients:
    @pytest.mark.parametrize(
        "head", [b"P", b"POST /v1/completions HTTP/1.1\r\nHost: te"], ids=["a byte", "half a head"]
    )
    async def test_half_a_head_is_408_after_the_idle_limit(self, engine: StubEngine, folder: Path, head: bytes) -> None:
        async with running_sidecar(engine, folder, idle_timeout=0.2) as sidecar, raw_connection(sidecar.url) as slow:
            await slow.send(head)
            answer = await slow.rest()
        assert (answer.status, answer.closed, answer.error["code"]) == (408, True, "too-slow")

    async def test_bytes_that_trickle_do_not_put_it_off(self, engine: StubEngine, folder: Path) -> None:
        async with running_sidecar(engine, folder, idle_timeout=0.3) as sidecar, raw_connection(sidecar.url) as slow:
            reading = asyncio.create_task(slow.rest())
            for byte in b"POST /v1/completions HTTP/1.1":
                if reading.done():
                    break
                await slow.send(bytes([byte]))
                await asyncio.sleep(0.05)
            assert (await reading).status == 408

    async def test_a_connection_without_a_request_may_stay(self, engine: StubEngine, folder: Path) -> None:
        async with running_sidecar(engine, folder, idle_timeout=0.1) as sidecar, raw_connection(sidecar.url) as idle:
            for _ in range(2):
                await asyncio.sleep(0.25)
                await idle.send(raw_post(HI))
                assert (await idle.rest(until=b"}}}")).status == 200

    async def test_half_a_body_is_408_after_the_idle_limit(self, engine: StubEngine, folder: Path) -> None:
        async with running_sidecar(engine, folder, idle_timeout=0.2) as sidecar, raw_connection(sidecar.url) as slow:
            await slow.send(raw_post(b'{"prompt"', length=b"100"))
            answer = await slow.rest(until=b"}}")
            assert (answer.status, answer.error["code"]) == (408, "too-slow")
            assert "x-should-retry: true" in answer.head
            await eventually(sidecar.is_idle)
        assert engine.requests == []

    async def test_a_body_that_trickles_has_the_requests_whole_time(self, engine: StubEngine, folder: Path) -> None:
        async with (
            running_sidecar(engine, folder, idle_timeout=5, request_timeout=0.4) as sidecar,
            raw_connection(sidecar.url) as slow,
        ):
            await slow.send(raw_post(b"", length=b"100000"))
            reading = asyncio.create_task(slow.rest(until=b"}}"))
            while not reading.done():
                await slow.send(b" ")
                await asyncio.sleep(0.05)
            assert (await reading).status == 408


class TestLeaving:
    """A client that closes, or half closes, has left: an engine does not compute for what nobody may read."""

    @pytest.mark.parametrize("half", [True, False], ids=["half closed", "closed"])
    @pytest.mark.parametrize(
        ("sent", "reaches"),
        [
            pytest.param(b"POST /v1/comp", 0, id="in the head"),
            pytest.param(raw_post(b'{"prompt"', length=b"100"), 0, id="in the body"),
            pytest.param(raw_post(HI), 1, id="before the answer"),
            pytest.param(raw_post(STREAM), 1, id="before the first byte"),
        ],
    )
    async def test_at_any_stage_it_leaves_nothing_behind(
        self, sidecar: Running, engine: StubEngine, sent: bytes, reaches: int, half: bool
    ) -> None:
        engine.behaviour = Behaviour(hang_after=0)
        async with raw_connection(sidecar.url) as connection:
            await connection.send(sent)
            await engine.count(reaches)
            if half:
                connection.writer.write_eof()
                assert (await connection.rest()).closed
        await eventually(sidecar.is_idle)
        for request in engine.requests:
            await asyncio.wait_for(request.left.wait(), SOON)

    @pytest.mark.parametrize("half", [True, False], ids=["half closed", "closed"])
    async def test_in_the_middle_of_a_stream_the_engine_learns_of_it(
        self, sidecar: Running, engine: StubEngine, half: bool
    ) -> None:
        engine.behaviour = Behaviour(words=("x",) * 10_000, pause=0.01)
        async with raw_connection(sidecar.url) as connection:
            await connection.send(raw_post(STREAM))
            assert (await connection.rest(until=b"data: ")).status == 200
            if half:
                connection.writer.write_eof()
                assert (await connection.rest()).closed
        await asyncio.wait_for(engine.requests[0].left.wait(), SOON)
        await eventually(sidecar.is_idle)

    @pytest.mark.parametrize("half", [True, False], ids=["half closed", "closed"])
    async def test_in_the_queue_it_is_never_sent_on(self, engine: StubEngine, folder: Path, half: bool) -> None:
        let_go = asyncio.Event()
        engine.behaviour = Behaviour(hold=let_go)
        async with running_sidecar(engine, folder, engine_slots=1) as sidecar:
            async with raw_connection(sidecar.url) as first, raw_connection(sidecar.url) as second:
                await first.send(raw_post(HI))
                await engine.count(1)
                await second.send(raw_post(STREAM))
                await eventually(lambda: sidecar.sidecar.gate.queued == 1)
                if half:
                    second.writer.write_eof()
                else:
                    second.writer.close()
                await eventually(lambda: sidecar.sidecar.gate.queued == 0)
                let_go.set()
                assert (await first.rest(until=b"}}")).status == 200
            await eventually(sidecar.is_idle)
        assert len(engine.requests) == 1

    async def test_with_requests_sent_ahead_none_of_them_is_begun(self, sidecar: Running, engine: StubEngine) -> None:
        engine.behaviour = Behaviour(hang_after=0)
        async with raw_connection(sidecar.url) as connection:
            await connection.send(raw_post(HI) * 3)
            await engine.count(1)
        await asyncio.wait_for(engine.requests[0].left.wait(), SOON)
        await eventually(sidecar.is_idle)
        assert len(engine.requests) == 1


class TestMemory:
    async def test_bodies_on_their_way_have_room_together_and_give_it_back(
        self, sidecar: Running, engine: StubEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        room = BodyRoom(1_500_000)
        monkeypatch.setattr(sidecar.sidecar.proxy, "_room", room)
        body = json.dumps({"prompt": "x" * 1_000_000}).encode()
        async with raw_connection(sidecar.url) as first, raw_connection(sidecar.url) as second:
            await first.send(raw_post(body[:900_000], length=str(len(body)).encode()))
            await eventually(lambda: room.taken == 900_000)
            await second.send(raw_post(body, b"Connection: close"))
            refused = await second.rest(until=b"}}")
            assert (refused.status, refused.error["code"]) == (429, "queue-full")
            await first.send(body[900_000:])
            assert (await first.rest(until=b"}}}")).status == 200
        await eventually(lambda: room.taken == 0)
        assert len(engine.requests) == 1

    async def test_a_client_that_leaves_in_its_body_gives_its_room_back(
        self, sidecar: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        room = BodyRoom(1_500_000)
        monkeypatch.setattr(sidecar.sidecar.proxy, "_room", room)
        async with raw_connection(sidecar.url) as leaver:
            await leaver.send(raw_post(b"x" * 500_000, length=b"900000"))
            await eventually(lambda: room.taken == 500_000)
        await eventually(lambda: room.taken == 0)


async def test_a_client_that_does_not_read_its_whole_answer_holds_no_place(
    sidecar: Running, engine: StubEngine
) -> None:
    engine.behaviour = Behaviour(body=b"x" * 32_000_000)  # more than the sockets hold
    async with raw_connection(sidecar.url) as slow:
        await slow.send(raw_post(HI))
        await engine.count(1)
        await eventually(sidecar.is_idle)
        await slow.send(raw_post(HI))  # the next one is not begun before the first was taken
        answer = await slow.rest(until=b"\r\n\r\n")
        assert len(engine.requests) == 1
        assert (await slow.rest(until=b"HTTP/1.1 200 OK")).data.count(b"HTTP/1.1 200 OK") == 1
    assert answer.status == 200
    assert "content-length: 32000000" in answer.head


async def test_while_draining_answers_close_the_connection(sidecar: Running, engine: StubEngine) -> None:
    let_go = asyncio.Event()
    engine.behaviour = Behaviour(hold=let_go)
    async with raw_connection(sidecar.url) as inside:
        await inside.send(raw_post(STREAM))
        await engine.count(1)
        sidecar.sidecar.traffic.draining = True
        refused = await raw_exchange(sidecar.url, raw_post(HI))
        assert (refused.status, refused.closed, refused.error["code"]) == (503, True, "draining")
        assert "connection: close" in refused.head
        assert "retry-after: 1" in refused.head
        assert (await raw_exchange(sidecar.url, GET.replace(b"healthz", b"readyz"))).status == 503
        let_go.set()
        answer = await inside.rest()
    assert (answer.status, answer.closed) == (200, True)
    assert b"data: [DONE]" in answer.body
