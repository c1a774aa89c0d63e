"""The KV side, on a Unix socket: who may use how many blocks, who does, and what steps cost.

Whoever may open the socket may set quotas; file permissions decide. Every command runs between two steps of the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from cacheaware_api.wire import Hints, PublicPrefix, PublicPrefixes, Quotas, WireError, from_json, to_json

from .blocks import QuotaRefused, StaleRevision
from .chat import Tokenizer
from .errors import BadRequest, RequestError
from .fields import load_json
from .http_errors import error_middleware
from .openai_requests import messages
from .openai_responses import event
from .service import Service

SERVICE = web.AppKey("service", Service)

REPORTS_PER_SECOND = 20
MAX_WAIT_S = 60
MAX_HINTED_GROUPS = 1024
MAX_BODY_BYTES = 16 * 2**20


class Stale(RequestError):
    """Newer quotas are in force."""

    status = 409
    type = "conflict"


class DoesNotFit(RequestError):
    """Well-formed, and more than this engine has."""

    status = 422
    type = "unprocessable"


def create_kv_app(service: Service) -> web.Application:
    app = web.Application(middlewares=[error_middleware()], client_max_size=MAX_BODY_BYTES)
    app[SERVICE] = service
    app.router.add_get("/kv/ledger", ledger)
    app.router.add_put("/kv/quotas", quotas)
    app.router.add_put("/kv/public", public)
    app.router.add_put("/kv/hints", hints)
    app.router.add_get("/kv/steps", steps)
    return app


async def ledger(request: web.Request) -> web.Response:
    """The ledger; with `after=<sequence>&wait=<seconds>` once it is newer than that, or when the time is over."""
    engine = request.app[SERVICE].running().engine
    after = _number(request, "after", 2**63)
    wait = _number(request, "wait", MAX_WAIT_S) or 0
    if after is not None and engine.ledger.sequence <= after and wait > 0:
        with engine.following() as changed:
            deadline = asyncio.get_running_loop().time() + wait
            while engine.ledger.sequence <= after and (left := deadline - asyncio.get_running_loop().time()) > 0:
                changed.clear()
                try:
                    await asyncio.wait_for(changed.wait(), left)
                except TimeoutError:
                    break
            else:
                await asyncio.sleep(1 / REPORTS_PER_SECOND)  # what changes right after belongs to the same answer
    return web.json_response(to_json(engine.ledger))


async def quotas(request: web.Request) -> web.Response:
    engine = request.app[SERVICE].running().engine
    wanted = _message(Quotas, load_json(await request.read()))
    try:
        applied = await engine.call(lambda core: core.set_quotas(wanted))
    except StaleRevision as error:
        raise Stale(str(error), param="revision", code="stale_revision") from error
    except QuotaRefused as error:
        raise DoesNotFit(str(error), code="quota_refused") from error
    return web.json_response(to_json(applied))


async def public(request: web.Request) -> web.Response:
    model = request.app[SERVICE].running()
    wanted = _message(PublicPrefixes, load_json(await request.read()))
    names = [prefix.name for prefix in wanted.prefixes]
    if len(names) != len(set(names)):
        raise BadRequest("prefixes: names must be unique", param="prefixes")
    tokens = {
        prefix.name: await asyncio.to_thread(_tokens, model.tokenizer, prefix, f"prefixes[{number}]")
        for number, prefix in enumerate(wanted.prefixes)
    }
    for name, prefix_tokens in tokens.items():
        if len(prefix_tokens) >= model.max_model_len:
            raise DoesNotFit(
                f"the public prefix {name!r} has {len(prefix_tokens)} tokens, and the model's context is "
                f"{model.max_model_len}: shorten it",
                code="context_length_exceeded",
            )
    try:
        applied = await model.engine.call(lambda core: core.set_public(tokens))
    except QuotaRefused as error:
        raise DoesNotFit(str(error), param="prefixes", code="quota_refused") from error
    return web.json_response(to_json(applied))


async def hints(request: web.Request) -> web.Response:
    """Blocks are set aside for groups; the answer is how many for each group now."""
    engine = request.app[SERVICE].running().engine
    wanted = _message(Hints, load_json(await request.read()))
    if len(wanted.groups) > MAX_HINTED_GROUPS:
        raise BadRequest(f"groups: at most {MAX_HINTED_GROUPS}, got {len(wanted.groups)}", param="groups")
    set_aside = await engine.call(lambda core: core.set_hints(wanted))
    return web.json_response({"set_aside": dict(set_aside)})


async def steps(request: web.Request) -> web.StreamResponse:
    """Server-sent events: sums over the steps since the last one, at most twenty a second."""
    engine = request.app[SERVICE].running().engine
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    seen = engine.totals
    with engine.following() as changed:
        while engine.death is None:
            await changed.wait()
            changed.clear()
            totals = engine.totals
            if totals.steps > seen.steps:
                await response.write(event(to_json(totals.since(seen))))
                seen = totals
                await asyncio.sleep(1 / REPORTS_PER_SECOND)
    return response


def _tokens(tokenizer: Tokenizer, prefix: PublicPrefix, where: str) -> tuple[int, ...]:
    if prefix.text is not None:
        return tokenizer.encode(prefix.text)
    return tokenizer.chat(messages(list(prefix.messages or ()), f"{where}.messages"), add_generation_prompt=False)


def _message(kind: type[Any], body: Mapping[str, Any]) -> Any:
    try:
        return from_json(kind, body)
    except WireError as error:
        raise BadRequest(str(error), param=error.path or None) from error


def _number(request: web.Request, name: str, most: int) -> int | None:
    text = request.query.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) > most:
        raise BadRequest(f"{name}: expected a whole number from 0 to {most}, got {text[:40]!r}", param=name)
    return int(text)
