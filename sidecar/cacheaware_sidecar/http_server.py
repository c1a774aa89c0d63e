"""The server's side of HTTP: connections of clients, and what is answered to bytes that are no request.

The library parses strictly (two lengths, a length beside chunks, folded headers and the like are refused, so that no
proxy in front can read a request differently). Here it is told how long a head may take, how large it may be, and to
refuse in OpenAI's shape without repeating what was sent, which may hold a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from cacheaware_sidecar.client_answer import ClientGone
from cacheaware_sidecar.errors import BadRequest, HeadTooLarge, Reason, TooSlow, error_body
from cacheaware_sidecar.logs import values
from cacheaware_sidecar.relay import refusal_response

log = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

# By path: what answers a POST past the library's router, middlewares and signals, which would cost as much as parsing
# the request did. Such a handler answers every failure itself; the router knows these paths too, for all else.
POSTS: web.AppKey[dict[str, Handler]] = web.AppKey("posts", dict)

LARGEST_HEADER = 16 * 1024  # bytes of the request line and of one header: a long token, a long trace state
_MOST_HEADERS = 128
_CONTINUE = "100-continue"
_BACKLOG = 1024  # connections that wait to be accepted while the loop is busy
_LINGERING_SECONDS = 5.0  # for the rest of a body that was refused: closing at once could lose the answer on its way
_CLOSING_SECONDS = 0.25  # for connections that are left after draining


class Connection(web.RequestHandler):
    """A client's connection. An idle one may stay (a gateway keeps them for an hour); a head that has begun may not."""

    __slots__ = ("_head_deadline", "_head_seconds")

    def __init__(self, server: web.Server, *, loop: asyncio.AbstractEventLoop, head_seconds: float) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # None is how the library spells "no access log"
            max_line_size=LARGEST_HEADER,
            max_field_size=LARGEST_HEADER,
            max_headers=_MOST_HEADERS,
            lingering_time=_LINGERING_SECONDS,
        )
        self._head_seconds = head_seconds
        self._head_deadline: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not data:  # the library's own call, to go on with what it has
            return
        # The task that serves this connection waits for a request only while no whole head has come.
        waits = self._waiter is not None and not self._waiter.done()
        if not waits:
            self._forget_deadline()
        elif self._head_deadline is None:
            self._head_deadline = self._loop.call_later(self._head_seconds, self._give_up)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is answered instead of a request that cannot be read; the connection closes after it."""
        if request.writer.output_size > 0 or isinstance(exc, ClientGone):
            raise ConnectionError("an answer has been begun, or nobody waits for one") from exc
        if status == 500:
            log.error("a request failed in the sidecar", exc_info=exc)
            body = error_body("the sidecar failed; its log has the details", "server_error", str(Reason.INTERNAL))
            response = web.Response(status=status, body=body, content_type="application/json")
        else:
            refusal = _unreadable(exc, message)
            log.info("a request could not be read", extra=values(status=refusal.status, problem=type(exc).__name__))
            response = refusal_response(refusal)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **named: Any) -> None:
        """The library's own tracebacks; that the rest of a body was no gzip either is none of them."""
        if not isinstance(named.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **named)

    def _forget_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _give_up(self) -> None:
        self._head_deadline = None
        if self.transport is not None:
            refusal = TooSlow(f"the head of the request did not arrive within {self._head_seconds:g} s")
            self.transport.write(_bare(refusal))
            self.transport.close()


def _unreadable(exc: BaseException | None, message: str | None) -> BadRequest:
    if isinstance(exc, LineTooLong):
        return HeadTooLarge(LARGEST_HEADER)
    # The library's first line says what is wrong, the others repeat what was sent.
    problem = (message or "").strip().split("\n", 1)[0].rstrip(" :") or "it makes no sense"
    return BadRequest(f"this is no HTTP/1.1 request that can be read here: {problem}")


def _routed(handler: Handler, posts: Mapping[str, Handler]) -> Handler:
    def route(request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        if request.method == "POST" and "Expect" not in request.headers and (post := posts.get(request.path)):
            return post(request)
        return handler(request)

    return route


def _in_openais_shape(handler: Handler) -> Handler:
    """The refusals of the library itself, before any handler of ours was asked; and an unknown Expect, which the
    library would repeat, and break on where it is no UTF-8.
    """

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        try:
            if (request.headers.get("Expect") or _CONTINUE).lower() != _CONTINUE:
                raise web.HTTPExpectationFailed(text=f"the only Expect that is met here is {_CONTINUE}")
            return await handler(request)
        except web.HTTPException as error:
            body = error_body(error.text or error.reason, "invalid_request_error", str(Reason.BAD_REQUEST))
            headers = {"x-cacheaware-reason": str(Reason.BAD_REQUEST)}
            return web.Response(status=error.status, body=body, content_type="application/json", headers=headers)

    return handle


def _bare(refusal: BadRequest) -> bytes:
    """A refusal as it goes over the wire, where there is no request to answer."""
    lines = [
        f"HTTP/1.1 {refusal.status} Request Timeout",
        "Content-Type: application/json",
        f"Content-Length: {len(refusal.body)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in refusal.headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + refusal.body


@contextlib.asynccontextmanager
async def listening(app: web.Application, host: str, port: int, *, head_seconds: float) -> AsyncIterator[int]:
    """Serve `app` until the block ends; gives the port. Raises `OSError` for one in use."""
    # Without handler_cancellation a client that leaves would go unnoticed, and its request would run to the end.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSING_SECONDS)
    await runner.setup()
    try:
        posts = app.get(POSTS, {})
        server, loop = runner.server, asyncio.get_running_loop()
        assert server is not None, "it exists between setup and cleanup"
        server.request_handler = _routed(_in_openais_shape(server.request_handler), posts)
        sockets = await loop.create_server(
            lambda: Connection(server, loop=loop, head_seconds=head_seconds), host, port, backlog=_BACKLOG
        )
        try:
            yield int(sockets.sockets[0].getsockname()[1])
        finally:
            sockets.close()
    finally:
        await runner.cleanup()
