"""One call to the engine: failures of HTTP become what a client is told, by how far the request got.

A failure to connect sent nothing (`NoEngine`: a retry is safe). Any later one may have reached the engine
(`EngineBroke`), so it is never repeated. Closing an answer closes its connection at once, which is how the engine
learns that nobody waits any more.

Requests of clients go through `engine_client.py`. What this sidecar asks for itself (health, metrics, the ledger) goes
through the sessions of a general library.
"""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp

from cacheaware_sidecar.engine_client import KEEP_ALIVE_SECONDS, ConnectFailed, EngineAnswer, EngineClient
from cacheaware_sidecar.engine_connection import Broken
from cacheaware_sidecar.errors import EngineBroke, NoEngine

_LARGEST_HEADER = 64 * 1024


def engine_session(connect_timeout: float) -> aiohttp.ClientSession:
    """The session for what the sidecar asks itself. No total limit: every limit is set where it is meant."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout, sock_read=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent",),
        max_line_size=_LARGEST_HEADER,
        max_field_size=_LARGEST_HEADER,
    )


def kv_session(socket_path: str) -> aiohttp.ClientSession:
    """The session for `/kv/*`. On a connection that was used before, the library would repeat a GET that failed, and
    the long poll of an engine that just died would wait in the next one, as if nothing had happened."""
    connector = aiohttp.UnixConnector(socket_path, force_close=True)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


class call:  # it reads as a function
    """`async with call(...) as answer`: send a request and give its answer's head; whatever happens inside, the answer
    is closed at the end.

    Raises `NoEngine` or `EngineBroke`, for failures of reading inside the block too. `TimeoutError` of the caller's own
    limits passes.
    """

    __slots__ = ("_answer", "_asked", "_engine")

    def __init__(
        self, engine: EngineClient, method: str, path: str, *, headers: Mapping[str, str], body: bytes | None = None
    ) -> None:
        self._engine = engine
        self._asked = (method, path, headers, body)
        self._answer: EngineAnswer | None = None

    async def __aenter__(self) -> EngineAnswer:
        try:
            self._answer = await self._engine.request(*self._asked)
        except ConnectFailed as error:
            raise NoEngine("the engine cannot be reached: try again in a moment") from error
        except Broken as error:
            raise _broke(error) from error
        return self._answer

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert self._answer is not None
        self._answer.close()
        if isinstance(error, Broken):
            raise _broke(error) from error


def _broke(error: Broken) -> EngineBroke:
    return EngineBroke(f"{error}: the request may have run in part")
