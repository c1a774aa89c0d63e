"""A stub engine that can misbehave on purpose, and a sidecar in front of it: real servers on loopback, for tests.

`StubEngine` speaks both sides of an engine: OpenAI over TCP, `/kv/*` over a Unix socket. What it answers is a
`Behaviour`, which a test may change at any time; what it was asked is in `requests`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import aiohttp
from aiohttp import web

from cacheaware_api import wire
from cacheaware_sidecar.settings import Settings
from cacheaware_sidecar.sidecar import Sidecar

MODEL = "stub-model"
CONTROL_TOKEN = "control-token-of-the-test"
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
    left: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)  # its connection was closed before the end
    ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class StubEngine:
    """`async with StubEngine(folder / "kv.sock") as engine: engine.url`"""

    def __init__(self, kv_socket: Path, *, capacity: int = 1000, max_sequences: int | None = 32) -> None:
        self.kv_socket = kv_socket
        self.behaviour = Behaviour()
        self.requests: list[Recorded] = []
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
        self.metrics_page = 'vllm:num_requests_waiting{engine="0"} 2.0\nvllm:num_requests_running{engine="0"} 1.0\n'
        self.keep_alive = 75.0
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
        openai.router.add_post("/v1/chat/completions", self._generate)
        openai.router.add_post("/v1/completions", self._generate)
        kv = web.Application()
        kv.router.add_get("/kv/ledger", self._get_ledger)
        kv.router.add_put("/kv/quotas", self._put_quotas)
        kv.router.add_put("/kv/public", self._put_public)
        options: dict[str, Any] = {"handler_cancellation": True, "access_log": None, "shutdown_timeout": 0.1}
        for app, site in ((openai, web.TCPSite), (kv, web.UnixSite)):
            runner = web.AppRunner(app, keepalive_timeout=self.keep_alive, **options)
            await runner.setup()
            self._stack.push_async_callback(runner.cleanup)
            if site is web.TCPSite:
                await web.TCPSite(runner, "127.0.0.1", self.port).start()
                self.port = runner.addresses[0][1]
            else:
                await web.UnixSite(runner, str(self.kv_socket)).start()

    async def stop(self) -> None:
        await self._stack.aclose()

    async def count(self, number: int) -> list[Recorded]:
        """Wait until so many generations have arrived."""
        async with asyncio.timeout(10), self.arrived:
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
        return web.json_response({"tokens": list(body["prompt"].encode()), "count": len(body["prompt"])})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        recorded = Recorded(request.method, request.path, request.headers.copy(), await request.read())
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


# -- a sidecar in front of it -----------------------------------------------------------------------------------------


def tier(name: str, priority: int = 0, weight: int = 1, **more: Any) -> dict[str, Any]:
    sla = {"timeToFirstToken": more.pop("ttft")} if "ttft" in more else {}
    quota = {"nominalPercent": more.pop("nominal", 0)}
    return {
        "name": name,
        "priority": priority,
        "weight": weight,
        "quota": quota,
        "sla": sla,
        "effectivePercent": quota["nominalPercent"],
        **more,
    }


def view_json(number: int = 1, uid: str = "pool-1", **changes: Any) -> dict[str, Any]:
    return {
        "revision": {"pool_uid": uid, "number": number},
        "model": MODEL,
        "tiers": [tier("gold", 100, 4, nominal=50, ttft="800ms"), tier("bronze", 0, 1, nominal=30, ttft="10s")],
        "defaultTier": "bronze",
        "sharing": "Pool",
        "identity": {"type": "Open"},
        **changes,
    }


def view(number: int = 1, uid: str = "pool-1", **changes: Any) -> wire.View:
    return wire.from_json(wire.View, view_json(number, uid, **changes))


def api_keys_json(keys: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`{"secret of acme": {"tenant": "acme", "tiers": ["gold"], "defaultTier": "gold"}}`"""
    return {
        "keys": [
            {"name": f"key-{number}", "sha256": hashlib.sha256(key.encode()).hexdigest(), **entry}
            for number, (key, entry) in enumerate(keys.items())
        ]
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """A sidecar that serves, and the files it reads."""

    sidecar: Sidecar
    url: str
    control_url: str
    view_file: Path
    secrets_dir: Path
    client: aiohttp.ClientSession

    async def control(self, method: str, path: str, message: Any = None, token: str = CONTROL_TOKEN) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}"}
        async with self.client.request(method, self.control_url + path, json=message, headers=headers) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if "json" in answer.content_type else text

    async def ready(self) -> None:
        """Until the quotas are applied and the ledger says so."""
        link = self.sidecar.link
        await eventually(lambda: link.ready and link.ledger is not None and link.ledger.revision == link.applied)

    def is_idle(self) -> bool:
        """Nothing queued, nothing in flight, no account left open."""
        self.sidecar.dispatcher.budget.check_integrity()
        gate = self.sidecar.gate
        return gate.queued == 0 and gate.in_flight == 0 and self.sidecar.traffic.inside == 0


def write_files(folder: Path, wanted: Mapping[str, Any], keys: Mapping[str, Mapping[str, Any]] | None) -> None:
    (folder / "view.json").write_text(json.dumps(wanted))
    secrets = folder / "secrets"
    secrets.mkdir(exist_ok=True)
    (secrets / "salt-key").write_text("salt key of the test\n")
    (secrets / "control-token").write_text(CONTROL_TOKEN + "\n")
    (secrets / "hop-key").write_text("hop key of the test\n")
    if keys is not None:
        (secrets / "api-keys.json").write_text(json.dumps(api_keys_json(keys)))


@contextlib.asynccontextmanager
async def running_sidecar(
    engine: StubEngine,
    folder: Path,
    *,
    wanted: Mapping[str, Any] | None = None,
    keys: Mapping[str, Mapping[str, Any]] | None = None,
    wait_ready: bool = True,
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> AsyncIterator[Running]:
    """A sidecar on ports that the system picks, ready if not told otherwise."""
    write_files(folder, wanted or view_json(), keys)
    sidecar = Sidecar(
        Settings(
            engine_url=engine.url,
            kv_socket=engine.kv_socket,
            view_file=folder / "view.json",
            secrets_dir=folder / "secrets",
            port=0,
            control_port=0,
            **settings,
        ),
        clock,
    )
    async with sidecar.serving() as ports, aiohttp.ClientSession() as client:
        running = Running(
            sidecar,
            f"http://127.0.0.1:{ports.port}",
            f"http://127.0.0.1:{ports.control_port}",
            folder / "view.json",
            folder / "secrets",
            client,
        )
        if wait_ready:
            await running.ready()
        yield running


class CancelledAt:
    """Drives a coroutine and cancels it at its nth suspension, as a client that leaves at that very moment does."""

    def __init__(self, work: Coroutine[Any, Any, Any], number: int) -> None:
        self._work = work
        self._left = number
        self.reached = False

    def __await__(self) -> Generator[Any, None, Any]:
        throw: BaseException | None = None
        while True:
            try:
                waits_for = self._work.send(None) if throw is None else self._work.throw(throw)
            except StopIteration as stop:
                return stop.value
            throw = None
            if self._left == 0 and not self.reached:
                self.reached = True
                if waits_for is not None:
                    waits_for._asyncio_future_blocking = False
                    waits_for.cancel()
                throw = asyncio.CancelledError()
                continue
            self._left -= 1
            try:
                yield waits_for
            except BaseException as error:
                throw = error


async def eventually(true: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for what no event tells. Fails with a TimeoutError."""
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110  # the condition belongs to another object, which has no event for it
            await asyncio.sleep(0.002)
