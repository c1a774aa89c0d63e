"""An answer of the engine on its way to the client, whole or as a stream.

The library writes a head in four coroutines and each piece of a stream in another, with checks for what these answers
never have (a length, a coding, cookies), and that costs more than a token may. So they are written to the connection
here, framed as the head says: by length, in chunks, or to the end of the connection for HTTP/1.0. The library is told
when it is over. Refusals and whatever else is answered here are its own responses.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from email.utils import formatdate

from aiohttp import HttpVersion10, HttpVersion11, web


class ClientGone(ConnectionError):
    """The client has left, or reads no more: its place in the engine goes to somebody else.

    The client library's own exception would also be one of the engine's connection.
    """


class Written(web.StreamResponse):
    """What the library is told of an answer that it did not write: nothing is left to send."""

    def __init__(self, request: web.BaseRequest, stays: bool) -> None:
        super().__init__()
        self._request = request
        self._stays = stays

    @property
    def keep_alive(self) -> bool:
        return self._stays

    async def prepare(self, request: web.BaseRequest) -> None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """The next request is read once the client has taken this answer."""
        await self._request.writer.drain()


class ClientAnswer:
    """Any number of `write`, each followed by `keep_up` where it says so, then `end`. The head waits for the first
    piece and goes with it. Where a `length` is given, `write` is called once with all of it, and there is no `end`.
    """

    __slots__ = ("_chunked", "_head", "_protocol", "_request", "_stays")

    def __init__(
        self,
        request: web.BaseRequest,
        headers: Iterable[tuple[str, str]],
        *,
        length: int | None = None,
        closes: bool = False,
    ) -> None:
        """A 200 with these headers; those of framing and of the server are put to them. `closes`: no other request is
        wanted on this connection.
        """
        version = request.version
        self._request = request
        self._protocol = request.protocol
        self._chunked = length is None and version >= HttpVersion11
        # Without a length or chunks only the connection's end tells the body's.
        self._stays = request.keep_alive and not closes and (length is not None or self._chunked)
        self._head = _head(version, headers, length, self._stays)

    @property
    def response(self) -> Written:
        """For the library, when all was written."""
        return Written(self._request, self._stays)

    def write(self, data: bytes) -> bool:
        """Send a piece. False: more is under way than the client takes, so wait for `keep_up` before the next. Raises
        `ClientGone`, as all the others.
        """
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        return self._send(data)

    async def keep_up(self) -> None:
        """Wait until the client has taken most of what was sent; whoever calls limits how long."""
        if not self._protocol.writing_paused:
            return
        try:
            await self._request.writer.drain()
        except ConnectionError as error:
            raise ClientGone("the client left") from error

    def end(self, last: bytes = b"") -> bool:
        """Send the last piece, and with it the end; the result is that of `write`."""
        if self._chunked:
            last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last) if last else b"0\r\n\r\n"
        return self._send(last)

    def _send(self, data: bytes) -> bool:
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ClientGone("the client left")
        if self._head:
            data, self._head = self._head + data, b""
            self._request.writer.output_size += len(data)  # so it knows that no other answer can follow
        transport.write(data)
        return not self._protocol.writing_paused


def _head(version: tuple[int, int], headers: Iterable[tuple[str, str]], length: int | None, stays: bool) -> bytes:
    # No value ends its line: the engine's parser lets no control character in, and ours are of our own making.
    lines, typed = [f"HTTP/{version[0]}.{version[1]} 200 OK"], False
    for name, value in headers:
        lines.append(f"{name}: {value}")
        typed = typed or name == "content-type"
    if not typed and length != 0:
        lines.append("Content-Type: application/octet-stream")
    if length is not None:
        lines.append(f"Content-Length: {length}")
    elif version >= HttpVersion11:
        lines.append("Transfer-Encoding: chunked")
    lines += ("Server: cacheaware", _date(int(time.time())))
    if not stays:
        lines.append("Connection: close")
    elif version == HttpVersion10:
        lines.append("Connection: keep-alive")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@functools.lru_cache(maxsize=1)
def _date(second: int) -> str:
    return f"Date: {formatdate(second, usegmt=True)}"
