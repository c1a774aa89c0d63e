"""One connection to the engine: a request at a time, its answer parsed as it comes.

Bodies are by length, by chunks, or to the end of the connection. There is back-pressure in both directions: a body is
sent as fast as the engine takes it, and an answer is read only as far ahead as fits a small buffer. An answer may come
before its request was sent whole; nothing more is sent then.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

_LARGEST_HEAD = 128 * 1024
_HIGH, _LOW = 256 * 1024, 64 * 1024  # bytes of an answer that wait to be read: pause above, resume below
_PIECE = 128 * 1024  # of a request's body; other requests go on between two of them


class Broken(Exception):
    """The connection broke, or what came is no answer; the message says how. Something may have been sent."""


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: list[tuple[str, str]]

    def value(self, name: str) -> str:
        return next((value for each, value in self.headers if each == name), "")


class Connection(asyncio.Protocol):
    """`on_idle` is called when an answer has ended and the next request may be sent, `on_lost` once at the end."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        on_idle: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self._loop = loop
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._problem: str | None = None  # why nothing more can come
        self._busy = False
        # Of the answer that is awaited:
        self._headers: list[tuple[str, str]] = []
        self._head_bytes = 0
        self._head: asyncio.Future[Head] | None = None
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._paused = False
        self._ended = False
        self._keep_alive = False
        self._surplus = False  # another answer follows that nobody asked for
        self._until_close = False  # only the end of the connection tells the end of the body
        self._reader: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool] | None = None  # gets what comes while the reader waits
        self._writer: asyncio.Future[None] | None = None  # while the engine takes no more
        self._sent = True  # the request is out

    @property
    def idle(self) -> bool:
        """It is open and nothing is going on."""
        return self._transport is not None and self._problem is None and not self._busy

    @property
    def ended(self) -> bool:
        """The answer has come to its end, and nothing of it is left to read."""
        return self._ended and not self._chunks

    async def ask(self, head: bytes, body: bytes) -> Head:
        """Send a request and wait for the head of its answer. Raises `Broken`."""
        if self._problem is not None:
            raise Broken(self._problem)
        self._busy, self._ended, self._until_close, self._surplus = True, False, False, False
        self._headers, self._head_bytes = [], 0
        self._head = self._loop.create_future()
        await self._send(head, body)
        return await self._head

    async def read(self) -> bytes:
        """What has come of the body, at least a byte; b"" at its end. Raises `Broken`."""
        while not self._chunks:
            if self._ended:
                return b""
            if self._problem is not None:
                raise Broken(self._problem)
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._taken()

    async def pour(self, take: Callable[[bytes], bool]) -> bool:
        """Give the body to `take` until it says False, or to its end, which is True. Raises `Broken`, and what `take`
        raises.

        What comes is given in the very moment it comes: a task that wakes for each piece costs as much as the piece.
        """
        while True:
            if self._chunks:
                if not take(self._taken()):
                    return False
            elif self._ended:
                return True
            elif self._problem is not None:
                raise Broken(self._problem)
            else:
                self._reader = self._loop.create_future()
                self._take = take
                try:
                    await self._reader
                    if self._take is None:
                        return False
                finally:
                    self._reader = self._take = None

    def _taken(self) -> bytes:
        data = self._chunks.popleft() if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered = 0
        if self._paused:
            self._resume_reading()
        return data

    def leave(self) -> None:
        """Nobody reads on. Where the answer has ended the next request may follow; any other connection is closed."""
        if self._problem is not None or not self._busy:
            return
        if self._ended and self._sent and not self._surplus and self._keep_alive:
            self._busy = False
            self._chunks.clear()
            self._buffered = 0
            self._resume_reading()
            self._on_idle(self)
        else:
            self.abort()

    def abort(self) -> None:
        self._fail("the connection was closed")

    def _resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            if self._transport is not None:
                self._transport.resume_reading()

    # -- sending -------------------------------------------------------------------------------------------------------

    async def _send(self, head: bytes, body: bytes) -> None:
        if self._transport is None or self._head is None:
            return
        self._sent = False
        if len(body) <= _PIECE:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            for start in range(0, len(body), _PIECE):
                if self._writer is not None:
                    await self._writer
                if self._transport is None or self._head.done():  # lost, or answered already
                    return
                self._transport.write(body[start : start + _PIECE])
                await asyncio.sleep(0)
        self._sent = True

    def pause_writing(self) -> None:
        self._writer = self._loop.create_future()

    def resume_writing(self) -> None:
        _wake(self._writer)
        self._writer = None

    # -- receiving: asyncio's calls ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only

    def data_received(self, data: bytes) -> None:
        if not self._busy:
            self._fail("the engine sent bytes that nobody asked for")
        if self._problem is not None:
            return
        if self._head is not None and not self._head.done():
            self._head_bytes += len(data)
            if self._head_bytes > _LARGEST_HEAD + _HIGH:  # the last piece may hold a part of the body
                self._fail(f"the head of the engine's answer is longer than {_LARGEST_HEAD} bytes")
                return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the engine's answer cannot be read ({type(error).__name__})")
        if self._take is not None:
            if self._chunks:
                self._give(self._take)
            if self._ended:
                _wake(self._reader)

    def _give(self, take: Callable[[bytes], bool]) -> None:
        try:
            if take(self._taken()):
                return
            _wake(self._reader)
        except Exception as error:  # whoever waits gets it
            if self._reader is not None and not self._reader.done():
                self._reader.set_exception(error)
        self._take = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._until_close and exc is None and not self._ended:
            self._ended = True
            _wake(self._reader)
        begun = self._head is not None and self._head.done()
        self._fail("the engine broke off its answer" if begun else "the engine broke the connection")
        self.resume_writing()
        self._on_lost(self)

    # -- receiving: the parser's calls ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._surplus = self._ended

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.decode("latin-1").lower(), value.decode("utf-8", "replace")))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._head is None or self._head.done():
            return
        names = {name for name, _ in self._headers}
        self._until_close = not names & {"content-length", "transfer-encoding"}
        self._head.set_result(Head(status, self._headers))
        _wake(self._writer)  # the rest of the request interests nobody any more

    def on_body(self, data: bytes) -> None:
        if self._surplus:
            return
        self._chunks.append(data)
        self._buffered += len(data)
        if self._buffered > _HIGH and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        if self._take is None:
            _wake(self._reader)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # "100 Continue" and its kind: the answer follows
            self._headers = []
            return
        self._ended = True
        self._keep_alive = self._parser.should_keep_alive()  # it forgets afterwards
        if self._take is None:
            _wake(self._reader)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _fail(self, problem: str) -> None:
        if self._problem is not None:
            return
        self._problem = problem
        if self._head is not None and not self._head.done():
            self._head.set_exception(Broken(problem))
            self._head.exception()  # it may be that nobody waits for it any more
        _wake(self._reader)
        if self._transport is not None:
            self._transport.abort()


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
