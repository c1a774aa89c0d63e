"""The client's side of HTTP/1.1 for the one engine behind this sidecar: connections that are kept for a moment.

It exists because it is on every token's way, where a general client costs several times as much. It does what this hop
needs and nothing else; a single connection is `engine_connection.py`, and what failures mean to a client is
`upstream.py`'s to say. Nothing is ever sent twice here.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from cacheaware_sidecar.content_coding import CodingError, Decoder
from cacheaware_sidecar.engine_connection import Broken, Connection, Head

# Shorter than any server's keep-alive, so that a connection is never reused while the engine is closing it: a request
# lost that way could not be repeated. Connecting to the same host costs less than a token.
KEEP_ALIVE_SECONDS = 0.5


class ConnectFailed(Exception):
    """No connection: nothing was sent."""


class EngineAnswer:
    """The head of an answer, and its body to be read."""

    __slots__ = ("_connection", "_decoder", "content_type", "headers", "status")

    def __init__(self, connection: Connection, head: Head) -> None:
        """Raises `Broken` for a coding that cannot be taken off."""
        self._connection = connection
        self.status = head.status
        self.headers = head.headers  # names in lower case
        self.content_type = head.value("content-type").partition(";")[0].strip().lower()
        try:
            self._decoder = Decoder.of(head.value("content-encoding"))
        except CodingError as error:
            raise Broken(str(error)) from None

    @property
    def ended(self) -> bool:
        """All of it has been read, but what is in a coding and was not asked for."""
        return self._connection.ended

    async def read(self) -> bytes:
        """Some bytes, decoded; b"" at the end. Raises `Broken`."""
        if self._decoder is None:
            return await self._connection.read()
        try:
            return await self._decoder.read(self._connection.read)
        except CodingError as error:
            raise Broken(str(error)) from None

    async def pour(self, take: Callable[[bytes], bool]) -> bool:
        """Give what comes to `take`, decoded, until it says False, or to the end, which is True. Raises `Broken`, and
        what `take` raises.
        """
        if self._decoder is None:
            return await self._connection.pour(take)
        while data := await self.read():
            if not take(data):
                return False
        return True

    def close(self) -> None:
        """Close the connection at once, unless the answer came to its end: that is how the engine learns that nobody
        waits any more.
        """
        self._connection.leave()


class EngineClient:
    """`async with EngineClient("http://127.0.0.1:8001", connect_timeout=5.0) as client: ...`"""

    def __init__(self, url: str, *, connect_timeout: float) -> None:
        parts = urlsplit(url)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._ssl else 80)
        self._prefix = parts.path
        self._host_header = parts.netloc
        self._connect_timeout = connect_timeout
        self._open: set[Connection] = set()
        self._idle: list[tuple[Connection, float]] = []  # and since when; the newest last
        self._sweep: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._open):
            connection.abort()

    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> EngineAnswer:
        """Send a request and wait for the head of its answer. Raises `ConnectFailed` or `Broken`; a cancellation closes
        the connection.
        """
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", f"host: {self._host_header}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None:
            lines.append(f"content-length: {len(body)}")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape")  # bytes that are no UTF-8 pass
        connection = self._kept() or await self._connect()
        try:
            return EngineAnswer(connection, await connection.ask(head, body or b""))
        except BaseException:
            connection.abort()
            raise

    def _kept(self) -> Connection | None:
        """The one used last: others then stay idle, and are dropped."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection, since = self._idle.pop()
            if connection.idle and now - since < KEEP_ALIVE_SECONDS:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, on_idle=self._keep, on_lost=self._open.discard),
                    self._host,
                    self._port,
                    ssl=self._ssl,
                )
        except (OSError, TimeoutError) as error:
            raise ConnectFailed(str(error) or type(error).__name__) from error
        if connection.idle:  # it may be lost again already
            self._open.add(connection)
        return connection

    def _keep(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        self._idle.append((connection, loop.time()))
        if self._sweep is None:
            self._sweep = loop.call_later(KEEP_ALIVE_SECONDS, self._drop_old)

    def _drop_old(self) -> None:
        loop = asyncio.get_running_loop()
        kept = []
        for connection, since in self._idle:
            if connection.idle and loop.time() - since < KEEP_ALIVE_SECONDS:
                kept.append((connection, since))
            else:
                connection.abort()
        self._idle = kept
        self._sweep = loop.call_later(KEEP_ALIVE_SECONDS, self._drop_old) if kept else None
