"""Reading a request's body: all of it, within limits of size and time, or a refusal that says why."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from cacheaware_sidecar.errors import BadRequest, Busy, Reason, TooLarge, TooSlow, UnknownCoding

_DECODED = frozenset({"", "identity", "gzip", "deflate"})  # by the HTTP library, as the bytes come
_LONG = 512 * 1024  # bytes: putting so many together takes a tenth of a millisecond


class BodyRoom:
    """The bytes of all bodies that are being read: clients that send slowly, together, must not fill the memory."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken = 0

    def take(self, size: int) -> None:
        """Raises `Busy`."""
        if self.taken + size > self._most:
            raise Busy(
                "too many large requests arrive at once: try again in a moment",
                reason=Reason.QUEUE_FULL,
                retry_after=1.0,
            )
        self.taken += size

    def give(self, size: int) -> None:
        self.taken -= size


async def read_body(
    request: web.BaseRequest, *, most: int, seconds: float, silence: float, room: BodyRoom | None = None
) -> bytes:
    """At most `most` bytes, counted as they come and after any decoding, in at most so many seconds and without a
    longer silence. Raises `TooLarge`, `TooSlow`, `UnknownCoding`, `BadRequest`, or `Busy` for no room.
    """
    coding = request.headers.get("Content-Encoding", "").strip().lower()
    if coding not in _DECODED:
        raise UnknownCoding(
            f"a body in content-encoding {coding[:30]!r} cannot be read here: send gzip, deflate, or none",
            param="content-encoding",
        )
    if request.content_length is not None and request.content_length > most:
        raise TooLarge(most)
    if request.content.is_eof() and request.content.exception() is None:
        # It came with its head, as most do: there is nothing to wait for, and it takes no more room than it has.
        body = request.content.read_nowait()
        if len(body) > most:
            raise TooLarge(most)
        return body
    chunks: list[bytes] = []
    size = 0
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds

    async def read(limit: asyncio.Timeout) -> None:
        nonlocal size
        while not request.content.at_eof():
            limit.reschedule(min(end, loop.time() + silence))
            chunk = await request.content.readany()
            if room is not None:
                room.take(len(chunk))
            chunks.append(chunk)
            size += len(chunk)
            if size > most:
                raise TooLarge(most)

    try:
        async with asyncio.timeout(None) as limit:
            await read(limit)
    except TimeoutError:
        raise TooSlow(
            f"the body did not arrive: more than {silence:g} s without a byte (--idle-timeout), "
            f"or {seconds:g} s in all (--request-timeout)"
        ) from None
    except (web.RequestPayloadError, aiohttp.ClientError, HttpProcessingError) as error:
        raise BadRequest(f"the body cannot be read ({type(error).__name__})") from None
    finally:
        if room is not None:
            room.give(size)
    if len(chunks) == 1:
        return chunks[0]
    body = b"".join(chunks)
    if size >= _LONG:
        chunks.clear()
        await asyncio.sleep(0)  # whoever reads on will take a while too
    return body
