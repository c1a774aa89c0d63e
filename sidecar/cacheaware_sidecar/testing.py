"""A stub engine that can misbehave on purpose: a real server on loopback, for tests.

`StubEngine` speaks both sides of an engine: OpenAI over TCP, `/kv/*` over a Unix socket; without a socket it is a plain
vLLM (`plain_vllm_page` makes its metrics). What it answers is a `Behaviour`, which a test may change at any time; what
it was asked is in `requests`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from cacheaware_api import wire

MODEL = "stub-model"
WORDS = ("The", " capital", " of", " France", " is", " Paris", ".")


@dataclasses.dataclass(frozen=True, slots=True)
class Behaviour:
    """What the engine does with a generation. The default answers `words` at once."""

    words: tuple[str, ...] = WORDS
    prompt_tokens: int = 100
    cached_tokens: int | None = 64
    status: int = 200
    body: bytes | None = None  # sent as it is, instead of an answer
    content_type: str = "application/json"
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pieces: tuple[bytes, ...] | None = None  # a stream to be sent piece by piece, each as its own network chunk
    flush: bool = False  # let each piece reach the other side before the next is sent
    hold: asyncio.Event | None = None  # wait for it before anything is answered
    pause: float = 0.0  # seconds between two pieces
    hang_after: int | None = None  # pieces, then silence; 0: before the first byte
    die_after: int | None = None  # pieces, then the connection is cut; 0: before the first byte
    end_after: int | None = None  # pieces, then a proper end without the rest
    compressed: bool = False  # gzip, whatever was asked for


@dataclasses.dataclass(slots=True, eq=False)
class Recorded:
    """One request as it reached the engine."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    peer: Any  # address of the other side: one a connection
    left: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)  # its connection was closed before the end
    ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class StubEngine:
    """`async with StubEngine(folder / "kv.sock") as engine: engine.url`"""

    def __init__(self, kv_socket: Path | None, *, capacity: int = 1000, max_sequences: int | None = 32) -> None:
        self.kv_socket = kv_socket
        self.behaviour = Behaviour()
        self.requests: list[Recorded] = []
        self.steps: tuple[wire.StepReport, ...] | None = None  # what /kv/steps tells; None: there is no such path
        self.tokenized: list[Any] = []  # bodies of /tokenize
        self.counts_tokens_as: int | None = None  # what /tokenize answers; None: one token a byte of the prompt
        self.arrived = asyncio.Condition()
        self.healthy = True
        self.capacity = capacity
        self.max_sequences = max_sequences
        self.slots: Mapping[str, int] = {}  # nominal slots of a tier
        self.quotas: wire.Quotas | None = None
        self.quotas_put: list[wire.Quotas] = []
        self.public: wire.PublicPrefixes | None = None
        self.refuse_quotas: str | None = None  # a 422 with this text
        self.refuse_public: str | None = None
        self.hints: list[wire.Hints] = []
        self.metrics_page = 'vllm:num_requests_waiting{engine="0"} 2.0\nvllm:num_requests_running{engine="0"} 1.0\n'
        self.port = 0
        self._sequence = 1
        self._changed = asyncio.Condition()
        self._stack = contextlib.AsyncExitStack()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start, or start again on the same port as a new process would: without quotas, counting from the start."""
        self._sequence, self.quotas, self.public = 1, None, None
        openai = web.Application(client_max_size=2**30)
        openai.router.add_get("/health", self._health)
        openai.router.add_get("/metrics", self._metrics)
        openai.router.add_get("/v1/models", self._models)
        openai.router.add_post("/tokenize", self._tokenize)
        openai.router.add_post("/detokenize", self._detokenize)
        openai.router.add_post("/v1/chat/completions", self._generate)
        openai.router.add_post("/v1/completions", self._generate)
        kv = web.Application()
        kv.router.add_get("/kv/ledger", self._get_ledger)
        kv.router.add_get("/kv/steps", self._get_steps)
        kv.router.add_put("/kv/quotas", self._put_quotas)
        kv.router.add_put("/kv/public", self._put_public)
        kv.router.add_put("/kv/hints", self._put_hints)
        runner = await self._runner(openai)
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        self.port = runner.addresses[0][1]
        if self.kv_socket is not None:
            await web.UnixSite(await self._runner(kv), str(self.kv_socket)).start()

    async def _runner(self, app: web.Application) -> web.AppRunner:
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        return runner

    async def stop(self) -> None:
        await self._stack.aclose()

    async def count(self, number: int) -> list[Recorded]:
        """Wait until so many generations have arrived."""
        async with asyncio.timeout(30), self.arrived:
            await self.arrived.wait_for(lambda: len(self.requests) >= number)
        return self.requests

    async def touch(self) -> None:
        """The ledger changed."""
        self._sequence += 1
        async with self._changed:
            self._changed.notify_all()

    # -- OpenAI side ---------------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok" if self.healthy else "loading"}, status=200 if self.healthy else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics_page)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "stub"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.tokenized.append(body)
        if self.counts_tokens_as is not None:
            return web.json_response({"count": self.counts_tokens_as, "max_model_len": 4096, "tokens": []})
        if not isinstance(body.get("prompt"), str):
            return web.json_response({"error": {"message": "prompt must be a string"}}, status=400)
        return web.json_response(
            {"tokens": list(body["prompt"].encode("utf-8", "replace")), "count": len(body["prompt"])}
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"prompt": "".join(WORDS)})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        peer = None if request.transport is None else request.transport.get_extra_info("peername")
        recorded = Recorded(request.method, request.path, request.headers.copy(), body, peer)
        self.requests.append(recorded)
        async with self.arrived:
            self.arrived.notify_all()
        try:
            response = await self._answer(request, recorded, self.behaviour)
            recorded.ended.set()
            return response
        except (asyncio.CancelledError, ConnectionError):
            recorded.left.set()
            raise

    async def _answer(self, request: web.Request, recorded: Recorded, how: Behaviour) -> web.StreamResponse:
        if how.hold is not None:
            await how.hold.wait()
        if how.hang_after == 0:
            await asyncio.Event().wait()
        if how.die_after == 0:
            return self._die(request)
        streams = bool(recorded.json.get("stream"))
        if how.body is not None:
            return web.Response(
                status=how.status, body=how.body, headers=dict(how.headers), content_type=how.content_type
            )
        if streams or how.pieces is not None:
            return await self._stream(request, recorded.json, how)
        await asyncio.sleep(how.pause * len(how.words))  # it generates no faster for not streaming
        answer = json.dumps(whole_answer(request.path, how)).encode()
        headers = dict(how.headers)
        if how.compressed:
            answer = gzip.compress(answer)
            headers["Content-Encoding"] = "gzip"
        return web.Response(status=how.status, body=answer, headers=headers, content_type="application/json")

    async def _stream(self, request: web.Request, body: Mapping[str, Any], how: Behaviour) -> web.StreamResponse:
        pieces = how.pieces
        if pieces is None:
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            pieces = tuple(stream_events(request.path, how, usage))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", **how.headers})
        if how.compressed:
            response.headers["Content-Encoding"] = "gzip"
            pieces = (gzip.compress(b"".join(pieces)),)
        await response.prepare(request)
        for number, piece in enumerate(pieces):
            if number == how.hang_after:
                await asyncio.Event().wait()
            if number == how.die_after:
                return self._die(request)
            if number == how.end_after:
                return response
            await response.write(piece)
            if how.flush or how.pause:
                await asyncio.sleep(how.pause)
        return response

    def _die(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError

    # -- /kv/* ---------------------------------------------------------------------------------------------------------

    async def _get_ledger(self, request: web.Request) -> web.Response:
        after = int(request.query.get("after", "-1"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(request.query.get("wait", "0"))), self._changed:
                await self._changed.wait_for(lambda: self._sequence != after)  # a larger one is another process's
        return web.json_response(wire.to_json(self.ledger()))

    async def _get_steps(self, request: web.Request) -> web.StreamResponse:
        if self.steps is None:
            raise web.HTTPNotFound
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for report in self.steps:
            await response.write(b"data: " + json.dumps(wire.to_json(report)).encode() + b"\n\n")
        await asyncio.Event().wait()
        return response

    async def _put_quotas(self, request: web.Request) -> web.Response:
        if self.refuse_quotas is not None:
            return web.json_response({"error": {"message": self.refuse_quotas}}, status=422)
        self.quotas = wire.from_json(wire.Quotas, await request.json())
        self.quotas_put.append(self.quotas)
        await self.touch()
        return web.json_response(wire.to_json(self.quotas))

    async def _put_public(self, request: web.Request) -> web.Response:
        if self.refuse_public is not None:
            return web.json_response({"error": {"message": self.refuse_public}}, status=422)
        self.public = wire.from_json(wire.PublicPrefixes, await request.json())
        await self.touch()
        return web.json_response({})

    async def _put_hints(self, request: web.Request) -> web.Response:
        self.hints.append(wire.from_json(wire.Hints, await request.json()))
        return web.json_response({"set_aside": {}})

    def ledger(self) -> wire.Ledger:
        tiers = () if self.quotas is None else self.quotas.tiers
        prefixes = () if self.public is None else self.public.prefixes
        return wire.Ledger(
            sequence=self._sequence,
            revision=None if self.quotas is None else self.quotas.revision,
            block_size=16,
            bytes_per_token=1024,
            capacity=self.capacity,
            free=self.capacity,
            public=wire.PublicLedger(0, 0, 0, {prefix.name: wire.PrefixLedger(4, 4) for prefix in prefixes}),
            tiers={
                tier.name: wire.TierLedger(
                    nominal=tier.nominal,
                    effective=tier.effective,
                    limit=tier.limit,
                    held=6,
                    cached=5,
                    lapsed=4,
                    borrowed=3,
                    lent=2,
                    slots=wire.Slots(self.slots.get(tier.name, 0), 0),
                    evicted_total=10,
                    reclaimed_total=11,
                    preempted_total=12,
                    hit_tokens_total=13,
                    query_tokens_total=14,
                )
                for tier in tiers
            },
            running=0,
            waiting=0,
            max_sequences=self.max_sequences,
        )


def plain_vllm_page(blocks: int = 1001, *, block_size: int = 16, usage: float = 0.0, preemptions: int = 0) -> str:
    """Metrics as vLLM's: of `blocks` one is its own."""
    label = 'engine="0",model_name="stub-model"'
    return (
        "# TYPE vllm:num_requests_waiting gauge\n"
        f"vllm:num_requests_waiting{{{label}}} 0.0\n"
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        f"vllm:kv_cache_usage_perc{{{label}}} {usage}\n"
        "# TYPE vllm:num_preemptions_total counter\n"
        f"vllm:num_preemptions_total{{{label}}} {float(preemptions)}\n"
        "# TYPE vllm:cache_config_info gauge\n"
        f'vllm:cache_config_info{{block_size="{block_size}",engine="0",num_gpu_blocks="{blocks}"}} 1.0\n'
    )


# -- answers ----------------------------------------------------------------------------------------------------------


def usage(how: Behaviour) -> dict[str, Any]:
    counted: dict[str, Any] = {
        "prompt_tokens": how.prompt_tokens,
        "completion_tokens": len(how.words),
        "total_tokens": how.prompt_tokens + len(how.words),
    }
    if how.cached_tokens is not None:
        counted["prompt_tokens_details"] = {"cached_tokens": how.cached_tokens}
    return counted


def whole_answer(path: str, how: Behaviour) -> dict[str, Any]:
    text = "".join(how.words)
    chat = path == "/v1/chat/completions"
    choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    kind = "chat.completion" if chat else "text_completion"
    return _envelope(kind, [{"index": 0, **choice, "finish_reason": "stop"}]) | {"usage": usage(how)}


def stream_events(path: str, how: Behaviour, with_usage: bool) -> Iterable[bytes]:
    chat = path == "/v1/chat/completions"
    kind = "chat.completion.chunk" if chat else "text_completion"

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + json.dumps(_envelope(kind, choices) | more, ensure_ascii=False).encode() + b"\n\n"

    for number, word in enumerate(how.words):
        last = "stop" if number == len(how.words) - 1 else None
        said = {"delta": {"content": word}} if chat else {"text": word}
        yield event([{"index": 0, **said, "finish_reason": last}])
    if with_usage:
        yield event([], usage=usage(how))
    yield b"data: [DONE]\n\n"


def _envelope(kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": "stub-1", "object": kind, "created": 1_700_000_000, "model": MODEL, "choices": choices}
