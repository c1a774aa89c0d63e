"""The body of a streamed answer, on its way to the client.

The library writes each piece in a coroutine of its own, with checks for what a stream of events never has (a length, a
coding), and that costs more than a token may. So it writes the head and the end, and the pieces between them go to the
connection, framed as the head said: in chunks, or as they are for HTTP/1.0.
"""

from __future__ import annotations

from aiohttp import HttpVersion11, web


class ClientGone(ConnectionError):
    """The client has left, or reads no more: its place in the engine goes to somebody else.

    The client library's own exception would also be one of the engine's connection.
    """


class Streamed(web.StreamResponse):
    """An answer whose head waits for the first piece and goes with it. The library has this for whole answers only;
    where it forgets the name, the head goes alone.
    """

    _send_headers_immediately = False


class ClientBody:
    """`await open(…)`, then any number of `write`, each followed by `keep_up` where it says so, then `await end(…)`."""

    __slots__ = ("_begun", "_chunked", "_protocol", "_request", "_response")

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        self._request = request
        self._response = response
        self._protocol = request.protocol
        self._chunked = request.version >= HttpVersion11
        self._begun = False

    async def open(self, first: bytes) -> None:
        """Send the head and the first piece; without one, the head waits for it. Raises `ClientGone`, as all the
        others.
        """
        try:
            await self._response.prepare(self._request)
            if first:
                self._begun = True
                await self._response.write(first)
        except ConnectionError as error:
            raise ClientGone("the client left") from error

    def write(self, data: bytes) -> bool:
        """Send a piece. False: more is under way than the client takes, so wait for `keep_up` before the next."""
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ClientGone("the client left")
        if not self._begun:
            self._begun = True
            self._request.writer.send_headers()
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return not self._protocol.writing_paused

    async def keep_up(self) -> None:
        """Wait until the client has taken most of what was sent; whoever calls limits how long."""
        if not self._protocol.writing_paused:
            return
        try:
            await self._request.writer.drain()
        except ConnectionError as error:
            raise ClientGone("the client left") from error

    async def end(self, last: bytes = b"") -> None:
        """Send the last piece, and with it the end."""
        try:
            await self._response.write_eof(last)
        except ConnectionError as error:
            raise ClientGone("the client left") from error
