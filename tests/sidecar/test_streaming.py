"""A stream passes unchanged, whatever the network does to it; only the usage event that we asked for is dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cacheaware_sidecar.testing import Running, StubEngine, eventually, stream_events

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "stub-model", "messages": [{"role": "user", "content": "Hi"}], "stream": True}


async def post(sidecar: Running, body: dict[str, Any], path: str = CHAT) -> tuple[int, bytes, Mapping[str, str]]:
    async with sidecar.client.post(sidecar.url + path, json=body) as answer:
        return answer.status, await answer.read(), answer.headers


async def test_a_stream_reaches_the_client_unchanged(sidecar: Running, engine: StubEngine) -> None:
    status, body, headers = await post(sidecar, {**BODY, "stream_options": {"include_usage": True}})
    assert status == 200
    assert body == b"".join(stream_events(CHAT, engine.behaviour, with_usage=True))
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert headers["x-cacheaware-tier"] == "bronze"
    assert headers["x-request-id"].startswith("req-")
    assert "queue;dur=" in headers["Server-Timing"]
    assert 'hold;dur=0.0;desc="not-held"' in headers["Server-Timing"]
    await eventually(sidecar.is_idle)
