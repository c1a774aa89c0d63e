"""The OpenAI side: routes that parse, ask the service for submissions, and write what the engine makes of them.

A client that goes away cancels its handler, and leaving a handler aborts its requests, whichever way it is left. A slow
reader holds up its own handler only: the step loop posts into an outbox and goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from aiohttp import web

from .errors import RequestError
from .fields import load_json
from .http_errors import LABEL, REQUEST_ID, error_middleware
from .openai_requests import Wanted, chat_request, completion_request, detokenize_request, tokenize_request
from .openai_responses import DONE, ChatShape, CompletionShape, Envelope, Shape, error_json, event
from .outbox import Outbox, merged
from .requests import Delta, Submission, Usage
from .service import Phase, Service

SERVICE = web.AppKey("service", Service)


def create_app(service: Service, max_body_bytes: int) -> web.Application:
    app = web.Application(middlewares=[error_middleware()], client_max_size=max_body_bytes)
    app[SERVICE] = service
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    return app


async def chat_completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    parsed = chat_request(load_json(await request.read()), service.ready().limits)
    return await _generate(request, await service.chat(parsed, request[LABEL]), parsed.wanted, ChatShape())


async def completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    parsed = completion_request(load_json(await request.read()), service.ready().limits)
    return await _generate(request, await service.completion(parsed, request[LABEL]), parsed.wanted, CompletionShape())


async def models(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    model = service.ready()
    entry = {
        "id": service.model_name,
        "object": "model",
        "created": model.created,
        "owned_by": "cacheaware",
        "root": service.source,
        "max_model_len": model.max_model_len,
    }
    return web.json_response({"object": "list", "data": [entry]})


async def tokenize(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    model = service.ready()
    parsed = tokenize_request(load_json(await request.read()))
    service.require_model(parsed.model)
    if parsed.messages is not None:
        tokens = await asyncio.to_thread(model.tokenizer.chat, parsed.messages, parsed.add_generation_prompt)
    else:
        tokens = await asyncio.to_thread(model.tokenizer.encode, parsed.prompt or "", parsed.add_special_tokens)
    return web.json_response({"count": len(tokens), "max_model_len": model.max_model_len, "tokens": tokens})


async def detokenize(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    model = service.ready()
    parsed = detokenize_request(load_json(await request.read()), model.limits)
    service.require_model(parsed.model)
    return web.json_response({"prompt": await asyncio.to_thread(model.tokenizer.decode_all, parsed.tokens)})


async def health(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    match service.phase:
        case Phase.READY:
            return web.json_response({"status": service.phase})
        case Phase.DEAD:
            return web.json_response({"status": service.phase, "reason": str(service.death)}, status=500)
        case Phase.LOADING | Phase.DRAINING:
            return web.json_response({"status": service.phase}, status=503)


async def metrics(request: web.Request) -> web.Response:
    text = request.app[SERVICE].metrics.exposition()
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


# -- generation -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    """One API call being answered: its submissions, where their output arrives, and what was counted of it."""

    submissions: Sequence[Submission]
    envelope: Envelope
    outbox: Outbox
    completion_tokens: int = 0
    finished: set[int] = field(default_factory=set)

    @property
    def choices(self) -> int:
        return sum(submission.generation.n for submission in self.submissions)

    @property
    def ended(self) -> bool:
        return len(self.finished) == self.choices

    async def take(self) -> list[Delta]:
        deltas = await self.outbox.take()
        self.completion_tokens += sum(len(delta.tokens) for delta in deltas)
        self.finished.update(delta.index for delta in deltas if delta.finish is not None)
        return deltas

    def usage(self) -> Usage:
        prompt_tokens = sum(len(submission.prompt) for submission in self.submissions)
        return Usage(prompt_tokens, self.outbox.cached_tokens, self.completion_tokens)


async def _generate(
    request: web.Request, submissions: Sequence[Submission], wanted: Wanted, shape: Shape
) -> web.StreamResponse:
    service = request.app[SERVICE]
    engine = service.ready().engine
    envelope = Envelope(
        shape, shape.id_prefix + submissions[0].id, int(time.time()), service.model_name, wanted.include_usage
    )
    call = _Call(submissions, envelope, engine.outbox(len(submissions)))
    service.call_started()
    try:
        for submission in submissions:
            await engine.submit(submission, call.outbox)
        return await (_stream(request, call) if wanted.stream else _whole(call))
    finally:
        if not call.ended:
            for submission in submissions:
                engine.abort(submission.id)
        service.call_ended()


async def _whole(call: _Call) -> web.Response:
    choices: dict[int, Delta] = {}
    while deltas := await call.take():
        for delta in deltas:
            choices[delta.index] = merged(choices[delta.index], delta) if delta.index in choices else delta
    return web.json_response(call.envelope.body(list(choices.values()), call.usage()))


async def _stream(request: web.Request, call: _Call) -> web.StreamResponse:
    """Server-sent events. The status waits for the first token, so what fails before that is an ordinary error."""
    deltas = await call.take()
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", REQUEST_ID: request[LABEL]}
    )
    await response.prepare(request)
    text = call.envelope.opening(call.choices)
    try:
        while deltas:
            if text := text + call.envelope.chunks(deltas):
                await response.write(text)
            text, deltas = b"", await call.take()
    except RequestError as error:
        await response.write(event(error_json(error)) + DONE)
    else:
        await response.write(call.envelope.closing(call.usage()))
    await response.write_eof()
    return response
