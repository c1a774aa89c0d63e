"""The data path: one request from its first header to its last byte.

    identity → body → tier, salt, prefix key → the engine usable? → a place in the queue → forward → relay → record

Decisions are those of the modules named; here they are only put in order, and whatever ends a request (an answer, an
error, the client leaving at any moment) gives everything back once and is recorded once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from cacheaware_sidecar import relay, upstream
from cacheaware_sidecar.client_answer import ClientAnswer
from cacheaware_sidecar.costs import OutputLengths
from cacheaware_sidecar.divergence import Divergence
from cacheaware_sidecar.engine_client import EngineAnswer, EngineClient
from cacheaware_sidecar.engine_state import Link
from cacheaware_sidecar.errors import EngineBroke, NoEngine, Reason, Refusal, TooLate
from cacheaware_sidecar.estimates import Estimates, count_prompt_tokens
from cacheaware_sidecar.gate import Gate
from cacheaware_sidecar.prefix_key import PrefixKey
from cacheaware_sidecar.preparing import Prepared, Preparing, Wanted
from cacheaware_sidecar.record import Outcome, Record, Recorder
from cacheaware_sidecar.relay import StreamRelay, Translation
from cacheaware_sidecar.request_body import BodyRoom, read_body
from cacheaware_sidecar.rewrite import (
    Asked,
    for_engine,
    label,
    parse_object,
    request_headers,
    response_headers,
    trace_id,
    without_private,
)
from cacheaware_sidecar.scheduling import Dispatch, Used
from cacheaware_sidecar.settings import Settings
from cacheaware_sidecar.token_lengths import TokenLengths
from cacheaware_sidecar.traffic import Traffic
from cacheaware_sidecar.turns import Turns
from cacheaware_sidecar.unhurried import Unhurried
from cacheaware_sidecar.working_set import WorkingSets

_MOST_READ_AT_ONCE = 256 * 1024 * 1024  # bytes of bodies that are on their way

R = TypeVar("R", bound=web.StreamResponse)


class Proxy:
    def __init__(
        self,
        settings: Settings,
        engine: EngineClient,
        *,
        preparing: Preparing,
        link: Link,
        gate: Gate,
        lengths: TokenLengths,
        outputs: OutputLengths,
        working_sets: WorkingSets,
        divergence: Divergence,
        traffic: Traffic,
        recorder: Recorder,
        estimates: Estimates | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._room = BodyRoom(max(_MOST_READ_AT_ONCE, settings.max_body_bytes))
        self._preparing = preparing
        self._link = link
        self._gate = gate
        self._lengths = lengths
        self._working_sets = working_sets
        self._divergence = divergence
        self._traffic = traffic
        self._recorder = recorder
        self._estimates = estimates  # absent: the engine keeps the accounts of blocks
        self._clock = clock
        self._wall_clock = wall_clock
        self._outputs = outputs
        self._unhurried = Unhurried()
        self._turns = Turns()

    # -- paths ---------------------------------------------------------------------------------------------------------

    async def generate(self, request: web.BaseRequest) -> web.StreamResponse:
        """`/v1/chat/completions`, `/v1/completions`, `/v1/responses`."""
        record = self._record(request)
        try:
            with self._traffic.request():
                await self._turns.begin()
                return await self._generate(request, record)
        except Refusal as refusal:
            record.refused(refusal)
            if isinstance(refusal, (NoEngine, EngineBroke)):
                self._link.state.doubt()
            return _with_ours(relay.refusal_response(refusal), record)
        except (asyncio.CancelledError, ConnectionError):  # the client has left
            record.ended(Outcome.CANCELLED)
            raise
        finally:
            self._recorder.finish(record)

    async def pass_through(self, request: web.Request) -> web.StreamResponse:
        """A path that generates nothing (`/v1/models`, `/tokenize`): identity counts, tiers and the queue do not."""
        record = self._record(request)
        try:
            with self._traffic.request():
                self._preparing.identify(request.headers, record)
                body = None
                if request.method == "POST":
                    body = without_private(parse_object(await self._read_body(request)))
                return _with_ours(await self._ask(request, record, body), record)
        except Refusal as refusal:
            if isinstance(refusal, (NoEngine, EngineBroke)):
                self._link.state.doubt()
            return _with_ours(relay.refusal_response(refusal), record)

    # -- a generation --------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.BaseRequest, record: Record) -> web.StreamResponse:
        preparing = self._preparing
        caller = preparing.identify(request.headers, record)
        wanted = preparing.wanted(request.path, await self._read_body(request), record)
        prepared = await preparing.prepare(request.headers, record, wanted, caller, preparing.view())
        await self._link.state.usable()
        prepared = await self._sized(request, record, prepared)
        async with self._gate.place(
            prepared.waiting, prepared.demand, patience=self._patience(record), reject_late=prepared.rejects_late
        ) as dispatch:
            try:
                return await self._forward(request, record, prepared, dispatch)
            finally:
                self._learn(record, prepared)

    async def _sized(self, request: web.BaseRequest, record: Record, prepared: Prepared) -> Prepared:
        """With an estimate of its blocks, where the engine keeps no account; raises `BadRequest` for a prompt that
        could never fit. Before that it is counted: an estimate refuses nobody.
        """
        estimates, tier, asked = self._estimates, prepared.tier.name, prepared.asked
        if estimates is None:
            return prepared
        demand = estimates.demand(tier, prepared.key, asked)
        if estimates.too_large(tier, demand) is not None:
            headers = request_headers(request.headers.items(), record.id)
            counted = await count_prompt_tokens(self._engine, prepared.wanted.path, asked.body, headers)
            if counted is not None:
                demand = estimates.demand(tier, prepared.key, asked, counted)
                if (refusal := estimates.too_large(tier, demand)) is not None:
                    raise refusal
        return dataclasses.replace(prepared, demand=demand)

    async def _forward(
        self, request: web.BaseRequest, record: Record, prepared: Prepared, dispatch: Dispatch
    ) -> web.StreamResponse:
        record.queued, record.held = dispatch.queued, dispatch.held
        record.flush_reason, record.group = dispatch.flush_reason, dispatch.group
        record.group_size = dispatch.group_size
        if prepared.key is not None:
            record.predicted_tokens = dispatch.predicted_tokens
        record.forwarded_at = self._clock()
        asked = prepared.asked
        body = for_engine(
            asked,
            tier=prepared.tier.name,
            priority=prepared.tier.priority,
            salt=prepared.salt,
            group=dispatch.group,
        )
        seconds = self._settings.first_byte_timeout if asked.streams else self._patience(record)
        try:
            async with (
                asyncio.timeout(seconds) as limit,
                upstream.call(
                    self._engine,
                    "POST",
                    prepared.wanted.path,
                    headers=request_headers(request.headers.items(), record.id),
                    body=body,
                ) as answer,
            ):
                if answer.status != 200:
                    return _with_ours(relay.refused_by_engine(answer, await relay.read_error(answer), record), record)
                if relay.is_event_stream(answer):
                    return await self._stream(request, record, prepared.wanted, answer, limit)
                return await self._whole(request, record, answer, prepared.wanted.translation)
        except TimeoutError:
            raise self._too_late(asked, seconds) from None

    async def _stream(
        self,
        request: web.BaseRequest,
        record: Record,
        wanted: Wanted,
        answer: EngineAnswer,
        limit: asyncio.Timeout,
    ) -> web.StreamResponse:
        stream = StreamRelay(
            answer,
            record,
            wants_usage=wanted.asked.wants_usage,
            idle_timeout=self._settings.idle_timeout,
            clock=self._clock,
            translation=wanted.translation,
        )
        chunk = await stream.first_bytes()
        limit.reschedule(None)  # a stream has no total limit
        record.status = 200
        client = ClientAnswer(request, self._headers(answer, record), closes=self._traffic.draining)
        stream.open(client, chunk)
        self._gate.first_byte(record.id)  # who waits for it can wait until it is sent
        self._turns.streams += 1
        try:
            await stream.run(client)
        except Exception:
            # Nothing can follow a head that was sent, and closing would wait for a client that does not read.
            if request.transport is not None:
                request.transport.abort()
            raise
        finally:
            self._turns.streams -= 1
        return client.response

    async def _whole(
        self, request: web.BaseRequest, record: Record, answer: EngineAnswer, translation: Translation | None
    ) -> web.StreamResponse:
        body = await relay.read_whole(answer)
        record.meter.observe_body(body, self._clock())
        if translation is not None:
            body = translation.whole(body)
        record.status = 200
        headers = self._headers(answer, record)
        client = ClientAnswer(request, headers, length=len(body), closes=self._traffic.draining)
        client.write(body)
        record.ended(Outcome.ANSWERED)
        return client.response

    def _learn(self, record: Record, prepared: Prepared) -> None:
        """What the engine told corrects what was expected: the scheduler's accounts and index, the lengths of a tier's
        answers; and its working set grows.
        """
        meter = record.meter
        if record.outcome in (Outcome.BAD_REQUEST, Outcome.REJECTED):
            self._gate.refused(record.id)
        elif meter.usage is not None:
            used = Used(meter.usage.prompt_tokens, meter.usage.output_tokens, meter.usage.cached_tokens)
            self._gate.finished(record.id, used)
        if meter.usage is not None:
            self._outputs.learn(prepared.tier.name, meter.usage.output_tokens / prepared.asked.sequences)
            if self._estimates is not None:
                self._estimates.learn(prepared.tier.name, meter.usage, prepared.asked.sequences)
        if prepared.key is None:
            return
        if meter.usage is not None:
            self._lengths.learn(prepared.key, meter.usage.prompt_tokens)
            if meter.usage.cached_tokens is not None:
                record.diverging_tokens = self._divergence.note(
                    prepared.tier.name,
                    prepared.salt,
                    prepared.asked.body,
                    prompt_tokens=meter.usage.prompt_tokens,
                    cached_tokens=meter.usage.cached_tokens,
                    now=self._clock(),
                )
        if meter.usage is not None or meter.first_token_at is not None:
            self._note_blocks(record, prepared.tier.name, prepared.key)

    def _note_blocks(self, record: Record, tier: str, key: PrefixKey) -> None:
        """The engine has computed the prompt: the tier's working set has seen its blocks."""
        ledger, meter = self._link.ledger, record.meter
        if ledger is None:
            return
        self._unhurried.add(
            self._working_sets.refer_steps(
                tier, key, chunk_tokens=self._lengths.chunk_tokens(key), block_size=ledger.block_size
            )
        )
        if meter.usage is not None and meter.first_token_at is not None and record.forwarded_at is not None:
            seconds = meter.first_token_at - record.forwarded_at
            self._working_sets.first_token(tier, meter.usage, seconds, block_size=ledger.block_size)

    # -- parts of both -------------------------------------------------------------------------------------------------

    def _record(self, request: web.BaseRequest) -> Record:
        return Record(
            id=f"req-{secrets.token_hex(16)}",
            path=request.path,
            arrived=self._clock(),
            time=self._wall_clock(),
            label=label(request.headers.get("x-request-id")),
            trace=trace_id(request.headers.get("traceparent")),
        )

    async def _read_body(self, request: web.BaseRequest) -> bytes:
        settings = self._settings
        return await read_body(
            request,
            most=settings.max_body_bytes,
            seconds=settings.request_timeout,
            silence=settings.idle_timeout,
            room=self._room,
        )

    async def _ask(self, request: web.Request, record: Record, body: bytes | None) -> web.Response:
        method = "GET" if request.method == "HEAD" else request.method  # the server leaves the body out
        headers = request_headers(request.headers.items(), record.id)
        record.forwarded_at = self._clock()
        try:
            async with (
                asyncio.timeout(self._settings.first_byte_timeout),
                upstream.call(self._engine, method, request.path, headers=headers, body=body) as answer,
            ):
                if answer.status != 200:
                    return relay.refused_by_engine(answer, await relay.read_error(answer), record)
                response = web.Response(body=await relay.read_whole(answer))
                relay.with_headers_of(answer, response)
                response.headers["Server-Timing"] = self._server_timing(record)
                return response
        except TimeoutError:
            raise TooLate(
                f"the engine did not answer within {self._settings.first_byte_timeout:g} s (--first-byte-timeout)",
                reason=Reason.NO_FIRST_BYTE,
            ) from None

    def _patience(self, record: Record) -> float:
        """Seconds that are left of --request-timeout."""
        return max(0.0, record.arrived + self._settings.request_timeout - self._clock())

    def _too_late(self, asked: Asked, seconds: float) -> TooLate:
        if asked.streams:
            return TooLate(
                f"the engine sent no first byte within {seconds:g} s (--first-byte-timeout)",
                reason=Reason.NO_FIRST_BYTE,
            )
        return TooLate(
            f"there was no answer within {self._settings.request_timeout:g} s (--request-timeout): "
            "ask for fewer tokens, or stream",
            reason=Reason.REQUEST_TIMEOUT,
        )

    def _headers(self, answer: EngineAnswer, record: Record) -> list[tuple[str, str]]:
        """The engine's, and ours."""
        headers = response_headers(answer.headers)
        headers += (("x-request-id", record.id), ("Server-Timing", self._server_timing(record)))
        if record.tier is not None:
            headers.append(("x-cacheaware-tier", record.tier))
        return headers

    def _server_timing(self, record: Record) -> str:
        engine = 0.0 if record.forwarded_at is None else self._clock() - record.forwarded_at
        return (
            f"queue;dur={record.queued * 1000:.1f}, "
            f'hold;dur={record.held * 1000:.1f};desc="{record.flush_reason}", '
            f"engine;dur={engine * 1000:.1f}"
        )


def _with_ours(response: R, record: Record) -> R:
    """Our headers, on an answer of our own."""
    response.headers["x-request-id"] = record.id
    if record.tier is not None:
        response.headers["x-cacheaware-tier"] = record.tier
    return response
