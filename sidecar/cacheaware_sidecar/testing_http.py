"""A client that writes bytes instead of requests, for tests of what no HTTP library would send."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

_NEVER = 60.0  # seconds; what has not come by then does not come


@dataclasses.dataclass(frozen=True, slots=True)
class RawAnswer:
    """What came back to the end of the connection, or until nothing more came."""

    data: bytes
    closed: bool

    @property
    def status(self) -> int:
        return int(self.data.split(b" ", 2)[1])

    @property
    def head(self) -> str:
        return self.data.partition(b"\r\n\r\n")[0].decode("latin-1").lower()

    @property
    def body(self) -> bytes:
        return self.data.partition(b"\r\n\r\n")[2]

    @property
    def whole(self) -> bool:
        """All of it came, as far as its own length tells."""
        if "\r\ntransfer-encoding: chunked" in self.head:
            return self.closed or self.data.endswith(b"\r\n0\r\n\r\n")
        _, found, rest = self.head.partition("\r\ncontent-length: ")
        return self.closed or (bool(found) and len(self.body) >= int(rest.partition("\r\n")[0]))

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object; fails for any other answer."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


def raw_post(
    body: bytes,
    *headers: bytes,
    path: bytes = b"/v1/completions",
    version: bytes = b"1.1",
    length: bytes | None = None,
) -> bytes:
    """A request as bytes; `length` instead of the body's own."""
    lines = [
        b"POST %s HTTP/%s" % (path, version),
        b"Host: test",
        b"Content-Type: application/json",
        b"Content-Length: " + (str(len(body)).encode() if length is None else length),
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@dataclasses.dataclass(frozen=True, slots=True)
class RawConnection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def rest(self, until: bytes | None = None, *, whole: bool = False) -> RawAnswer:
        """Read to the end of the connection; or until `until` has come; or until an answer is there `whole`."""
        answer = RawAnswer(b"", False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_NEVER):
                while not (answer.closed or (until is not None and until in answer.data) or (whole and answer.whole)):
                    try:
                        chunk = await self.reader.read(65536)
                    except ConnectionError:
                        chunk = b""
                    answer = RawAnswer(answer.data + chunk, not chunk)
        return answer


@contextlib.asynccontextmanager
async def raw_connection(url: str) -> AsyncIterator[RawConnection]:
    """A connection to the server of `url`."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        yield RawConnection(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def raw_exchange(url: str, data: bytes, *, whole: bool = False) -> RawAnswer:
    """Send bytes on a connection of their own and read what comes back."""
    async with raw_connection(url) as connection:
        await connection.send(data)
        return await connection.rest(whole=whole)
