"""The engine behind every subject of `bench_sidecar`: answers at once or streams at a given pace, and costs little.

`python -m benchmarks.sidecar_stub PORT KV_SOCKET`. A prompt that begins with `#<chunks>,<seconds>#` gets so many
chunks, so many seconds apart (not every router passes other fields on), each with the time at which it was sent.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import cast

import uvloop

from cacheaware_sidecar.testing import StubEngine

_USAGE = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18, "prompt_tokens_details": {"cached_tokens": 8}}
_ANSWER = json.dumps(
    {
        "id": "stub",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "stub-model",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Paris."}, "finish_reason": "stop"}],
        "usage": _USAGE,
    }
).encode()
_CHUNK = (
    '{"id":"stub","object":"chat.completion.chunk","created":1700000000,"model":"stub-model",'
    '"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}'
)
_LAST = json.dumps(
    {
        "id": "stub",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "stub-model",
        "choices": [],
        "usage": _USAGE,
    }
)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_MARK_WITHIN = 4096  # bytes: heads and whatever fields come first


class Engine(asyncio.Protocol):
    """One connection. It reads only what the subjects send: a head with a length, then the body."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._need: int | None = None  # bytes of head and body together
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            if self._need is None:
                end = self._buffer.find(b"\r\n\r\n")
                if end < 0:
                    return
                self._need = end + 4 + self._length(end)
            if len(self._buffer) < self._need:
                return
            request = bytes(self._buffer[: self._need])
            del self._buffer[: self._need]
            self._need = None
            self._answer(request)

    def _length(self, end: int) -> int:
        for line in bytes(self._buffer[:end]).split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                return int(value)
        return 0

    def _answer(self, request: bytes) -> None:
        assert self._transport is not None
        path = request[:60].split(b" ", 2)[1]
        if not path.startswith((b"/v1/chat/completions", b"/v1/completions")):
            body = b'{"status":"ok","object":"list","data":[{"id":"stub-model","object":"model","owned_by":"stub"}]}'
            self._transport.write(_whole(body))
            return
        found = request.find(b'"#', 0, _MARK_WITHIN)
        if found < 0:
            self._transport.write(_whole(_ANSWER))
            return
        chunks, pace = request[found + 2 :].split(b"#", 1)[0].split(b",")
        self._transport.write(_STREAM_HEAD)
        self._next(int(chunks), float(pace))

    def _next(self, left: int, pace: float) -> None:
        if self._transport is None:
            return
        if left == 0:
            self._transport.write(_event(_LAST) + _event("[DONE]") + b"0\r\n\r\n")
            return
        self._transport.write(_event(_CHUNK % f"@{time.monotonic():.6f}@"))
        if pace:
            self._timer = self._loop.call_later(pace, self._next, left - 1, pace)
        else:
            self._next(left - 1, pace)


def _whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def _event(data: str) -> bytes:
    event = b"data: %s\n\n" % data.encode()
    return b"%x\r\n%s\r\n" % (len(event), event)


async def _serve(port: int, kv_socket: Path) -> None:
    async with StubEngine(kv_socket, capacity=1_000_000, max_sequences=4096):
        server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", port, backlog=4096)
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), Path(sys.argv[2])))
