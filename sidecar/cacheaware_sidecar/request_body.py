"""Reading a request's body: all of it, within limits of size and time, or a refusal that says why."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from cacheaware_sidecar.errors import BadRequest, TooLarge


async def read_body(request: web.Request, *, most: int, seconds: float) -> bytes:
    """At most `most` bytes, counted as they come and after any decoding. Raises `TooLarge` or `BadRequest`."""
    if request.content_length is not None and request.content_length > most:
        raise TooLarge(most)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > most:
                    raise TooLarge(most)
    except TimeoutError:
        raise BadRequest(f"the body did not arrive within {seconds:g} s (--request-timeout)") from None
    except (web.RequestPayloadError, aiohttp.ClientError, HttpProcessingError) as error:
        raise BadRequest(f"the body cannot be read ({type(error).__name__})") from None
    return bytes(body)
