"""The client of `bench_sidecar`: requests as bytes over plain connections, and when their bytes came back.

It reads no more of an answer than it must, so that what is measured is the subject and not the client.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

CHAT = "/v1/chat/completions"
_END = b"0\r\n\r\n"


def chat(prompt: str, *, stream: tuple[int, float] | None = None) -> bytes:
    """A body; `stream` is how many chunks, and the seconds between two of them."""
    if stream is not None:
        prompt = f"#{stream[0]},{stream[1]}#{prompt}"
    body: dict[str, object] = {"model": "stub-model", "messages": [{"role": "user", "content": prompt}]}
    if stream is not None:
        body["stream"] = True
    return json.dumps(body, separators=(",", ":")).encode()


def request(url: str, body: bytes | None, path: str = CHAT) -> bytes:
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
    if body is None:
        return head.encode() + b"\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@dataclass(slots=True)
class Answered:
    """One answer. Times are those of the monotonic clock."""

    sent: float
    first_byte: float = 0.0  # of the body
    ended: float = 0.0
    status: int = 0
    whole: bool = False
    delays: list[float] = field(default_factory=list)  # from the engine's clock in a chunk to its arrival

    @property
    def good(self) -> bool:
        return self.whole and self.status == 200


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._head = bytearray()
        self._left: int | None = None  # bytes of the body; None: chunked
        self._in_body = False
        self._tail = b""
        self._current: Answered | None = None
        self._done: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only

    @property
    def open(self) -> bool:
        return self._transport is not None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, message: bytes, seconds: float = 60.0) -> Answered:
        """Send a request and wait for the end of its answer, good or not."""
        self._head.clear()
        self._in_body, self._tail = False, b""
        self._current = Answered(time.monotonic())
        self._done = self._loop.create_future()
        if self._transport is None:
            return self._current
        self._transport.write(message)
        try:
            async with asyncio.timeout(seconds):
                await self._done
        except TimeoutError:
            self.close()
        return self._current

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        answer = self._current
        if answer is None:
            return
        if not self._in_body:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._head[:end]).lower()
            answer.status = int(head.split(b" ", 2)[1])
            found = head.find(b"\r\ncontent-length:")
            self._left = None if found < 0 else int(head[found + 17 :].split(b"\r\n", 1)[0])
            data = bytes(self._head[end + 4 :])
            self._in_body = True
            if not data and self._left != 0:
                return
        if not answer.first_byte:
            answer.first_byte = now
        answer.delays += [now - float(piece) for piece in _stamps(data)]
        if self._left is not None:
            self._left -= len(data)
            ended = self._left <= 0
        else:
            self._tail = (self._tail + data)[-5:]
            ended = self._tail == _END
        if ended:
            answer.ended, answer.whole = now, True
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def _stamps(data: bytes) -> Iterator[bytes]:
    """The clock's times in a piece of a stream; one that is cut by the network is left out."""
    parts = data.split(b"@")
    return (parts[n] for n in range(1, len(parts) - 1, 2))


async def connect(url: str) -> Client:
    parts = urlsplit(url)
    _, client = await asyncio.get_running_loop().create_connection(Client, parts.hostname or "", parts.port or 80)
    return client


class Connections:
    """Connections that are kept and used again, as clients do."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._idle: list[Client] = []

    async def ask(self, message: bytes, seconds: float = 60.0) -> Answered:
        client = None
        while self._idle and client is None:
            client = self._idle.pop()
            client = client if client.open else None
        client = client or await connect(self._url)
        answer = await client.ask(message, seconds)
        if client.open:
            self._idle.append(client)
        return answer

    def close(self) -> None:
        for client in self._idle:
            client.close()


async def open_loop(url: str, message: bytes, *, rate: float, seconds: float) -> list[Answered]:
    """Requests at a fixed rate, however long the answers take."""
    connections, loop = Connections(url), asyncio.get_running_loop()
    start, tasks = loop.time(), []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, start + number / rate - loop.time()))
        tasks.append(asyncio.create_task(connections.ask(message)))
    answers = list(await asyncio.gather(*tasks))
    connections.close()
    return answers


async def closed_loop(url: str, message: bytes, *, connections: int, seconds: float) -> list[Answered]:
    """As many requests as so many connections can carry."""
    loop = asyncio.get_running_loop()
    end, answers = loop.time() + seconds, []

    async def one() -> None:
        client = await connect(url)
        while loop.time() < end:
            if not client.open:
                client = await connect(url)
            answers.append(await client.ask(message))
        client.close()

    await asyncio.gather(*(one() for _ in range(connections)))
    return answers
