"""One call to the engine: the client library's failures become ours, by how far the request got.

A failure to connect sent nothing (`NoEngine`: a retry is safe). Any later one may have reached the engine
(`EngineBroke`), so it is never repeated. Closing an answer closes its connection at once, which is how the engine
learns that nobody waits any more.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import AsyncIterator, Mapping

import aiohttp

from cacheaware_sidecar.errors import EngineBroke, NoEngine

# Shorter than any server's keep-alive, so that a connection is never reused while the engine is closing it: a request
# lost that way could not be repeated. Connecting to the same host costs less than a token.
KEEP_ALIVE_SECONDS = 0.5

_LARGEST_HEADER = 64 * 1024


def engine_session(connect_timeout: float) -> aiohttp.ClientSession:
    """The session for requests. No total limit: streams may be long, and every limit is set where it is meant."""
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


@contextlib.asynccontextmanager
async def call(
    session: aiohttp.ClientSession, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None = None
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a request and give its answer's head; whatever happens inside, the answer is closed at the end.

    Raises `NoEngine` or `EngineBroke`, for failures of reading inside the block too. `TimeoutError` of the caller's own
    limits passes.
    """
    response: aiohttp.ClientResponse | None = None
    try:
        # From a file object a large body is written piece by piece, so that other requests go on meanwhile.
        data = None if body is None else io.BytesIO(body)
        response = await session.request(method, url, data=data, headers=headers, allow_redirects=False)
        yield response
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise NoEngine("the engine cannot be reached: try again in a moment") from error
    except EngineStream as error:
        raise EngineBroke(f"{error}: the request may have run in part") from error
    except aiohttp.ClientError as error:
        raise EngineBroke("the engine broke the connection: the request may have run in part") from error
    finally:
        if response is not None:
            response.close()  # one that was read to its end has given its connection back already


class EngineStream(Exception):
    """The engine's stream broke or makes no sense; the message says how."""
