"""Passing an engine's answer on to the client: streams event by event, other answers whole.

Until the first byte everything that goes wrong is a plain error response; after it, it is an SSE error event. A stream
has no total limit, only one on the silence between two bytes. The engine's side of it is `upstream.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from aiohttp import web

from cacheaware_sidecar.client_answer import ClientAnswer, ClientGone
from cacheaware_sidecar.engine_client import EngineAnswer
from cacheaware_sidecar.engine_connection import Broken
from cacheaware_sidecar.errors import EngineBroke, NoEngine, Reason, Refusal, error_event
from cacheaware_sidecar.metering import Meter
from cacheaware_sidecar.record import Outcome, Record, outcome_of
from cacheaware_sidecar.rewrite import response_headers
from cacheaware_sidecar.sse import DONE, Event, EventParser, EventTooLarge

_LONGEST_ERROR = 1024 * 1024
_LONGEST_ANSWER = 64 * 1024 * 1024  # that does not stream: it is held whole, and sixteen answers of 1M tokens fit
_TAIL_SECONDS = 0.05  # after [DONE], for the end of the engine's message, so that its connection can be used again


R = TypeVar("R", bound=web.StreamResponse)


class Translation(Protocol):
    """Another shape for the client than the engine's; without one its bytes pass unchanged."""

    def whole(self, body: bytes) -> bytes: ...
    def event(self, event: Event) -> bytes: ...
    def broken(self, message: str, reason: Reason) -> bytes:
        """The end of a stream that broke. The others raise `Broken` for what they cannot read."""


def is_event_stream(answer: EngineAnswer) -> bool:
    return answer.content_type == "text/event-stream"


async def read_whole(answer: EngineAnswer) -> bytes:
    """All of an answer that does not stream. Raises `Broken` for one without an end."""
    return await _read_all(answer, _LONGEST_ANSWER)


async def read_error(answer: EngineAnswer) -> bytes:
    return await _read_all(answer, _LONGEST_ERROR)


async def _read_all(answer: EngineAnswer, most: int) -> bytes:
    chunks, size = [], 0
    while chunk := await answer.read():
        chunks.append(chunk)
        size += len(chunk)
        if size > most:
            raise Broken(f"the engine answered {answer.status} with more than {most} bytes")
    return b"".join(chunks)


def with_headers_of(answer: EngineAnswer, response: R) -> R:
    """The engine's headers on our response, each as often as it came."""
    response.headers.popall("Content-Type", None)
    for name, value in response_headers(answer.headers):
        response.headers.add(name, value)
    return response


def refused_by_engine(answer: EngineAnswer, body: bytes, record: Record) -> web.Response:
    """The engine said no. What it says to the client passes as it is; what is wrong with itself becomes our error."""
    if answer.status == 503:
        raise NoEngine(f"the engine is not ready: {_message(body)}")
    if answer.status >= 500 or answer.status < 400:
        raise EngineBroke(f"the engine answered {answer.status}: {_message(body)}")
    record.status = answer.status
    record.ended(outcome_of(answer.status), Reason.ENGINE_REFUSED)
    response = with_headers_of(answer, web.Response(status=answer.status, body=body))
    response.headers["x-cacheaware-reason"] = str(Reason.ENGINE_REFUSED)
    return response


def _message(body: bytes) -> str:
    return body[:300].decode("utf-8", "replace").strip() or "(nothing)"


class StreamRelay:
    """Relays one stream."""

    def __init__(
        self,
        answer: EngineAnswer,
        record: Record,
        *,
        wants_usage: bool,
        idle_timeout: float,
        clock: Callable[[], float],
        translation: Translation | None = None,
    ) -> None:
        self._answer = answer
        self._record = record
        self._meter: Meter = record.meter
        self._wants_usage = wants_usage
        self._idle = idle_timeout
        self._clock = clock
        self._translation = translation
        self._unsent = b""  # what came before an event that made no sense
        self._parser = EventParser()
        self._last = b""  # what goes with the end
        self._broken: Exception | None = None  # before anything was sent

    async def first_bytes(self) -> bytes:
        """Wait for the first bytes; the caller limits how long. Raises `Broken`."""
        chunk = await self._answer.read()
        if not chunk:
            raise Broken("the engine ended the stream before its first byte")
        return chunk

    def open(self, client: ClientAnswer, chunk: bytes) -> None:
        """Send what `chunk` completes. Raises `ClientGone`."""
        first = b""
        try:
            first = self._fed(chunk)
        except (Broken, EventTooLarge) as error:
            self._broken = error  # the answer has begun: it is told in it, as any later one
        if self._meter.done:  # the whole stream in one piece: it goes with its end
            self._last, first = first, b""
        if first:
            client.write(first)

    async def run(self, client: ClientAnswer) -> None:
        """Send all that follows. Raises `ClientGone`."""
        try:
            if self._broken is not None:
                raise self._broken
            await self._pass_on(client)
        except (Broken, EventTooLarge) as error:
            self._record.ended(Outcome.ENGINE_BROKE, Reason.ENGINE_BROKE)
            await self._break_off(client, str(error), Reason.ENGINE_BROKE)
        except TimeoutError:
            self._record.ended(Outcome.TIMED_OUT, Reason.IDLE_TIMEOUT)
            message = f"the engine was silent for {self._idle:g} s (--idle-timeout)"
            await self._break_off(client, message, Reason.IDLE_TIMEOUT)
        else:
            self._record.ended(Outcome.ENGINE_BROKE if self._meter.error else Outcome.ANSWERED)
            await self._end(client, self._last)
            await self._read_tail()

    async def _pass_on(self, client: ClientAnswer) -> None:
        """Send all but the last piece, which goes with the end."""
        loop = asyncio.get_running_loop()
        slack = self._idle / 8  # the limit is moved that seldom: moving it costs as much as a chunk
        moved = loop.time()
        waits_for_client = False

        def take(chunk: bytes) -> bool:
            nonlocal moved
            now = loop.time()
            if now - moved >= slack:
                moved = now
                silence.reschedule(now + self._idle + slack)
            events = self._fed(chunk)
            if self._meter.done:
                self._last = events
                return False
            return client.write(events) if events else True

        try:
            async with asyncio.timeout_at(moved + self._idle + slack) as silence:
                ended = False
                while True:
                    waits_for_client = True
                    await client.keep_up()
                    waits_for_client = False
                    if ended or self._meter.done:
                        break
                    ended = await self._answer.pour(take)
                if ended:
                    self._last = self._wanted(self._last_events())
        except TimeoutError:
            if waits_for_client:
                raise ClientGone(f"the client read nothing for {self._idle:g} s") from None
            raise
        if not self._meter.done and not self._meter.error:
            if self._last:
                client.write(self._last)
            raise Broken("the engine ended the stream early")

    def _last_events(self) -> list[Event]:
        """What the end of the stream completes. Half an event is dropped: it would swallow the error event after it."""
        events = self._parser.finish()
        rest = Event(self._parser.rest)
        return [*events, rest] if rest.data == DONE else events  # the one that engines leave without its blank line

    def _fed(self, chunk: bytes) -> bytes:
        """The bytes for the client that a piece of the engine's stream completes."""
        said = None if self._translation is not None else self._parser.said(chunk)
        if said is None:
            return self._wanted(self._parser.feed(chunk))
        only_usage = self._meter.observe_data(said, self._clock())
        return chunk if self._wants_usage or not only_usage else b""

    def _wanted(self, events: Iterable[Event]) -> bytes:
        """The bytes for the client: everything but the usage chunk that only we asked for."""
        now = self._clock()
        kept = []
        for event in events:
            only_usage = self._meter.observe(event, now)
            if self._translation is not None:
                try:
                    kept.append(self._translation.event(event))
                except Broken:
                    self._unsent = b"".join(kept)
                    raise
            elif self._wants_usage or not only_usage:
                kept.append(event.raw)
        return b"".join(kept)

    async def _break_off(self, client: ClientAnswer, message: str, reason: Reason) -> None:
        translation = self._translation
        told = error_event(message, reason) if translation is None else translation.broken(message, reason)
        await self._end(client, self._unsent + told)

    async def _end(self, client: ClientAnswer, last: bytes) -> None:
        if client.end(last):
            return
        try:
            async with asyncio.timeout(self._idle):
                await client.keep_up()
        except TimeoutError:
            raise ClientGone(f"the client read nothing for {self._idle:g} s") from None

    async def _read_tail(self) -> None:
        if self._answer.ended:
            return
        try:
            async with asyncio.timeout(_TAIL_SECONDS):
                while await self._answer.read():
                    pass
        except (TimeoutError, Broken):
            pass  # the connection is closed instead of kept


def refusal_response(refusal: Refusal) -> web.Response:
    return web.Response(
        status=refusal.status, body=refusal.body, content_type="application/json", headers=refusal.headers
    )
