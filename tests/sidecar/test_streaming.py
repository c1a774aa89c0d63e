"""A stream passes unchanged, whatever the network does to it; only the usage event that we asked for is dropped."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cacheaware_api.testing_time import let_pass, standing_still
from cacheaware_sidecar.engine_client import KEEP_ALIVE_SECONDS
from cacheaware_sidecar.testing import Behaviour, StubEngine, stream_events
from cacheaware_sidecar.testing_sidecar import SOON, Running, eventually, running_sidecar
from cacheaware_sidecar.upstream import engine_session

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODY: dict[str, Any] = {"model": "stub-model", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
WANTS_USAGE = {**BODY, "stream_options": {"include_usage": True}}


async def post(sidecar: Running, body: dict[str, Any], path: str = CHAT) -> tuple[int, bytes, Mapping[str, str]]:
    async with sidecar.client.post(sidecar.url + path, json=body) as answer:
        return answer.status, await answer.read(), answer.headers


def last_error(body: bytes) -> dict[str, Any]:
    """The error event that ends a broken stream, after whole events only."""
    *events, last, end = body.split(b"\n\n")
    assert end == b""
    assert all(event.startswith(b"data: {") for event in events)
    error: dict[str, Any] = json.loads(last.removeprefix(b"data: "))["error"]
    return error


class TestPassing:
    async def test_a_stream_reaches_the_client_unchanged(self, sidecar: Running, engine: StubEngine) -> None:
        status, body, headers = await post(sidecar, WANTS_USAGE)
        assert status == 200
        assert body == b"".join(stream_events(CHAT, engine.behaviour, with_usage=True))
        assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert headers["x-cacheaware-tier"] == "bronze"
        assert headers["x-request-id"].startswith("req-")
        assert "queue;dur=" in headers["Server-Timing"]
        assert 'hold;dur=0.0;desc="not-held"' in headers["Server-Timing"]
        await eventually(sidecar.is_idle)

    @pytest.mark.parametrize("path", [CHAT, TEXT])
    async def test_the_usage_chunk_is_only_seen_by_those_who_asked(
        self, sidecar: Running, engine: StubEngine, path: str
    ) -> None:
        with_usage = b"".join(stream_events(path, engine.behaviour, with_usage=True))
        without = b"".join(stream_events(path, engine.behaviour, with_usage=False))
        assert (await post(sidecar, WANTS_USAGE, path))[1] == with_usage
        assert (await post(sidecar, BODY, path))[1] == without
        assert (await post(sidecar, {**BODY, "stream_options": {"include_usage": False}}, path))[1] == without
        assert all(request.json["stream_options"]["include_usage"] for request in engine.requests)

    async def test_metering_is_equal_whether_usage_was_asked_for_or_not(self, sidecar: Running) -> None:
        await post(sidecar, WANTS_USAGE)
        await post(sidecar, BODY)
        await post(sidecar, {**BODY, "stream": False})
        await eventually(lambda: len(sidecar.sidecar.decisions.last(9)) == 3)
        counted = {(one.prompt_tokens, one.hit_tokens, one.outcome) for one in sidecar.sidecar.decisions.last(9)}
        assert counted == {(100, 64, "answered")}
        page = sidecar.sidecar.metrics.page().decode()
        assert 'cacheaware_output_tokens_total{tier="bronze"} 21.0' in page
        assert 'cacheaware_prompt_tokens_total{tier="bronze"} 300.0' in page
        assert 'cacheaware_cached_tokens_total{tier="bronze"} 192.0' in page

    async def test_one_recorded_stream_cut_at_every_byte_is_the_same_stream(
        self, sidecar: Running, engine: StubEngine
    ) -> None:
        how = Behaviour(words=("Gr\u00fc\u00dfe", " \U0001f642", "."))
        recorded = b"".join(stream_events(CHAT, how, with_usage=True)).replace(b"\n\n", b"\r\n\r\n")
        for offset in range(1, len(recorded), 3):
            engine.behaviour = Behaviour(pieces=(recorded[:offset], recorded[offset:]), flush=True)
            assert (await post(sidecar, WANTS_USAGE))[1] == recorded, offset
        await eventually(sidecar.is_idle)
        decisions = sidecar.sidecar.decisions.last(1000)
        assert {(one.outcome, one.prompt_tokens, one.hit_tokens) for one in decisions} == {("answered", 100, 64)}

    async def test_a_stream_of_single_bytes_and_one_of_glued_events_are_the_same_stream(
        self, sidecar: Running, engine: StubEngine
    ) -> None:
        recorded = b"".join(stream_events(CHAT, Behaviour(), with_usage=True))
        for pieces in (tuple(bytes([byte]) for byte in recorded), (recorded,)):
            engine.behaviour = Behaviour(pieces=pieces, flush=True)
            assert (await post(sidecar, WANTS_USAGE))[1] == recorded

    async def test_the_first_event_does_not_wait_for_the_second(self, sidecar: Running, engine: StubEngine) -> None:
        engine.behaviour = Behaviour(hang_after=1)
        async with sidecar.client.post(sidecar.url + CHAT, json=BODY) as answer:
            assert (await answer.content.readline()).startswith(b"data: {")

    @pytest.mark.parametrize("streams", [True, False])
    async def test_a_compressed_answer_is_decoded_and_not_called_compressed(
        self, sidecar: Running, engine: StubEngine, streams: bool
    ) -> None:
        engine.behaviour = Behaviour(compressed=True)
        headers = {"Accept-Encoding": "gzip"}
        body = {**WANTS_USAGE} if streams else {**BODY, "stream": False}
        async with sidecar.client.post(sidecar.url + CHAT, json=body, headers=headers, compress=False) as answer:
            raw = await answer.read()
            assert "Content-Encoding" not in answer.headers
        assert not raw.startswith(gzip.compress(b"")[:2])
        assert b"Paris" in raw

    async def test_headers_of_the_hop_stay_on_the_hop(self, sidecar: Running, engine: StubEngine) -> None:
        engine.behaviour = Behaviour(headers={"Connection": "X-Secret-Hop", "X-Secret-Hop": "1", "X-Stays": "2"})
        headers = {"Authorization": "Bearer mine", "Connection": "Tracestate", "Tracestate": "a", "Cookie": "b=c"}
        async with sidecar.client.post(sidecar.url + CHAT, json=BODY, headers=headers) as answer:
            await answer.read()
            assert "X-Secret-Hop" not in answer.headers
            assert answer.headers["X-Stays"] == "2"
            assert answer.headers.getall("Transfer-Encoding") == ["chunked"]
        reached = {name.lower() for name in engine.requests[0].headers}
        assert not reached & {"authorization", "cookie", "tracestate"}
        assert engine.requests[0].headers["x-request-id"] == answer.headers["x-request-id"]


class TestBreaking:
    async def test_an_engine_that_dies_before_its_first_byte_is_502(self, sidecar: Running, engine: StubEngine) -> None:
        engine.behaviour = Behaviour(die_after=0)
        status, body, headers = await post(sidecar, BODY)
        assert status == 502
        assert headers["x-cacheaware-reason"] == "engine-broke"
        assert json.loads(body)["error"]["code"] == "engine-broke"
        assert len(engine.requests) == 1  # what reached the engine is not repeated

    async def test_an_engine_that_sends_only_a_head_is_502_too(self, sidecar: Running, engine: StubEngine) -> None:
        engine.behaviour = Behaviour(pieces=(b"",), end_after=0)
        assert (await post(sidecar, BODY))[0] == 502

    @pytest.mark.parametrize(
        "how",
        [
            pytest.param(Behaviour(flush=True, die_after=3), id="cut"),
            pytest.param(Behaviour(flush=True, end_after=3), id="ended early"),
        ],
    )
    async def test_after_the_first_byte_an_error_is_an_event(
        self, sidecar: Running, engine: StubEngine, how: Behaviour
    ) -> None:
        engine.behaviour = how
        status, body, _ = await post(sidecar, BODY)
        assert status == 200
        assert last_error(body)["code"] == "engine-broke"
        assert body.count(b"data: ") == 4
        await eventually(sidecar.is_idle)
        assert sidecar.sidecar.decisions.last(1)[0].outcome == "engine-broke"

    @pytest.mark.parametrize("how", [Behaviour(die_after=1, flush=True), Behaviour(end_after=1)], ids=["cut", "ended"])
    async def test_half_an_event_is_not_sent_before_the_error_event(
        self, sidecar: Running, engine: StubEngine, how: Behaviour
    ) -> None:
        engine.behaviour = dataclasses.replace(how, pieces=(b'data: {"choices": []}\n\ndata: {"cho', b""))
        _, body, _ = await post(sidecar, BODY)
        assert last_error(body)["code"] == "engine-broke"
        assert b'{"cho"' not in body.replace(b'{"choices"', b"")

    @pytest.mark.parametrize("end", [b"data: [DONE]", b"data: [DONE]\n", b"data: [DONE]\r"])
    async def test_a_last_event_without_its_blank_line_is_the_last_event(
        self, sidecar: Running, engine: StubEngine, end: bytes
    ) -> None:
        engine.behaviour = Behaviour(pieces=(b'data: {"choices": []}\n\n', end))
        assert (await post(sidecar, BODY))[1] == b'data: {"choices": []}\n\n' + end
        await eventually(lambda: bool(sidecar.sidecar.decisions.last(1)))
        assert sidecar.sidecar.decisions.last(1)[0].outcome == "answered"

    async def test_an_error_of_the_engine_inside_a_stream_passes_and_is_counted(
        self, sidecar: Running, engine: StubEngine
    ) -> None:
        said = b'data: {"error": {"message": "out of blocks"}}\n\n'
        engine.behaviour = Behaviour(pieces=(said,))
        assert (await post(sidecar, BODY))[1] == said
        await eventually(lambda: bool(sidecar.sidecar.decisions.last(1)))
        assert sidecar.sidecar.decisions.last(1)[0].outcome == "engine-broke"

    @pytest.mark.parametrize(
        ("status", "expected", "reason"),
        [
            pytest.param(400, 400, "engine-refused", id="400 is the client's"),
            pytest.param(404, 404, "engine-refused", id="404 is the client's"),
            pytest.param(429, 429, "engine-refused", id="429 is the client's"),
            pytest.param(500, 502, "engine-broke", id="500 is the engine's"),
            pytest.param(503, 503, "no-engine", id="503 is nobody's"),
            pytest.param(302, 502, "engine-broke", id="a redirect is nonsense"),
        ],
    )
    @pytest.mark.parametrize("streams", [True, False])
    async def test_what_the_engine_says_to_the_client_passes_whole(
        self, sidecar: Running, engine: StubEngine, status: int, expected: int, reason: str, streams: bool
    ) -> None:
        said = json.dumps({"error": {"message": "no" * 500, "code": "context_length_exceeded"}}).encode()
        engine.behaviour = Behaviour(status=status, body=said)
        got, body, headers = await post(sidecar, {**BODY, "stream": streams})
        assert (got, headers["x-cacheaware-reason"]) == (expected, reason)
        assert headers["x-cacheaware-tier"] == "bronze"
        if expected == status != 503:
            assert body == said
        else:
            assert "nono" in json.loads(body)["error"]["message"]


class TestTimeLimits:
    async def test_no_first_byte_is_504_and_the_engine_is_told(self, engine: StubEngine, folder: Path) -> None:
        engine.behaviour = Behaviour(hang_after=0)
        async with running_sidecar(engine, folder, first_byte_timeout=10) as sidecar:
            asked = asyncio.create_task(post(sidecar, BODY))
            await engine.count(1)
            let_pass(10)
            status, _, headers = await asked
            assert (status, headers["x-cacheaware-reason"]) == (504, "no-first-byte")
            assert headers["x-should-retry"] == "false"
            await asyncio.wait_for(engine.requests[0].left.wait(), SOON)
            assert sidecar.is_idle()

    async def test_no_answer_in_time_is_504(self, engine: StubEngine, folder: Path) -> None:
        engine.behaviour = Behaviour(hang_after=0)
        async with running_sidecar(engine, folder, request_timeout=10) as sidecar:
            asked = asyncio.create_task(post(sidecar, {**BODY, "stream": False}))
            await engine.count(1)
            let_pass(10)
            status, _, headers = await asked
            assert (status, headers["x-cacheaware-reason"]) == (504, "request-timeout")
            await asyncio.wait_for(engine.requests[0].left.wait(), SOON)

    async def test_a_stream_has_no_total_limit(self, engine: StubEngine, folder: Path) -> None:
        engine.behaviour = Behaviour(words=("x",) * 60, pause=5)  # five minutes
        async with (
            running_sidecar(
                engine, folder, request_timeout=20, first_byte_timeout=20, idle_timeout=20, connect_timeout=20
            ) as sidecar,
            sidecar.client.post(sidecar.url + CHAT, json=WANTS_USAGE, timeout=aiohttp.ClientTimeout()) as answer,
        ):
            body = b""
            async for line in answer.content:
                body += line
                if line.startswith(b"data: "):
                    let_pass(5)
        assert body.endswith(b"data: [DONE]\n\n")
        assert body.count(b"data: ") == 62

    async def test_the_client_library_sets_no_limit_of_its_own(self, engine: StubEngine, folder: Path) -> None:
        async with engine_session(connect_timeout=5.0) as session:
            assert session.timeout.total is None  # its default would cut every stream at 300 s
            assert session.timeout.sock_read is None
            assert session.timeout.sock_connect == 5.0

    async def test_silence_ends_a_stream_with_an_error_event(self, engine: StubEngine, folder: Path) -> None:
        engine.behaviour = Behaviour(hang_after=2, flush=True)
        async with (
            running_sidecar(engine, folder, idle_timeout=10) as sidecar,
            sidecar.client.post(sidecar.url + CHAT, json=BODY) as answer,
        ):
            said = [await answer.content.readline() for _ in range(3)]  # an event, a blank line, an event
            let_pass(12)  # the limit is moved now and then only, and is a little longer
            body = b"".join(said) + await answer.read()
            assert last_error(body)["code"] == "idle-timeout"
            await asyncio.wait_for(engine.requests[0].left.wait(), SOON)
            await eventually(sidecar.is_idle)

    async def test_a_client_that_does_not_read_loses_its_place(self, engine: StubEngine, folder: Path) -> None:
        event = b'data: {"choices": [{"text": "' + b"x" * 500_000 + b'"}]}\n\n'
        engine.behaviour = Behaviour(pieces=(event,) * 100)  # more than the sockets of both hops can hold
        async with running_sidecar(engine, folder, idle_timeout=10) as sidecar:
            async with sidecar.client.post(sidecar.url + CHAT, json=BODY) as answer:
                async with asyncio.timeout(1000):
                    while not engine.requests[0].left.is_set():  # time passes only here
                        let_pass(1)
                        await asyncio.sleep(0.01)
                await eventually(sidecar.is_idle)
                answer.close()
            assert sidecar.sidecar.decisions.last(1)[0].outcome == "cancelled"


class TestNoEngine:
    async def test_an_engine_that_is_gone_is_503_with_a_time_to_come_back(
        self, sidecar: Running, engine: StubEngine
    ) -> None:
        await engine.stop()
        for _ in range(3):
            status, _, headers = await post(sidecar, BODY)
            assert (status, headers["x-cacheaware-reason"]) == (503, "no-engine")
            assert (headers["Retry-After"], headers["x-should-retry"]) == ("1", "true")
        assert sidecar.is_idle()

    async def test_a_connection_that_the_engine_may_be_closing_is_not_used_again(
        self, sidecar: Running, engine: StubEngine
    ) -> None:
        whole = {**BODY, "stream": False}
        with standing_still():
            assert [(await post(sidecar, whole))[0] for _ in range(2)] == [200, 200]
            let_pass(KEEP_ALIVE_SECONDS)
            assert (await post(sidecar, whole))[0] == 200
        first, second, later = (request.peer for request in engine.requests)
        assert first == second != later  # kept while it is surely open, dropped before any server would close it
        assert KEEP_ALIVE_SECONDS < 1
