"""The OpenAI side: an allow-list of paths, and errors in OpenAI's shape for everything else.

Paths that the engine may have and that are not listed (its admin paths, `/kv/*`) are 404 here, whatever they are.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp
from aiohttp import web

from cacheaware_sidecar import metrics as pages
from cacheaware_sidecar.client_answer import Written
from cacheaware_sidecar.engine_state import EngineState
from cacheaware_sidecar.errors import MethodNotAllowed, NotFound, Reason, Refusal, error_body
from cacheaware_sidecar.gate import Gate
from cacheaware_sidecar.http_server import POSTS, Handler
from cacheaware_sidecar.metrics import Metrics
from cacheaware_sidecar.openapi import description
from cacheaware_sidecar.proxy import Proxy
from cacheaware_sidecar.relay import refusal_response
from cacheaware_sidecar.traffic import Traffic

log = logging.getLogger(__name__)

Q = TypeVar("Q", bound=web.BaseRequest)

# Paths that clients know and that tiers and isolation cannot be put into yet.
UNSUPPORTED = (
    "/v1/responses/",  # one that was kept: none is
    "/v1/embeddings",
    "/v1/messages",
    "/v1/audio/",
    "/v1/images/",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/score",
)
_ENGINE_PAGE_SECONDS = 2.0


def create_app(
    proxy: Proxy,
    state: EngineState,
    gate: Gate,
    traffic: Traffic,
    metrics: Metrics,
    session: aiohttp.ClientSession,
    engine_url: str,
) -> web.Application:
    app = web.Application(middlewares=[plain_errors])

    async def health(request: web.Request) -> web.Response:
        """As an engine's: whether requests can be answered."""
        return readiness(state, traffic)

    async def alive(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def metrics_page(request: web.Request) -> web.Response:
        page = await _engine_page(session, engine_url)
        page = pages.engine_page(page, gate.queued)
        return web.Response(body=page.encode() + metrics.page(), headers={"Content-Type": pages.CONTENT_TYPE})

    async def openapi(request: web.Request) -> web.Response:
        return web.json_response(description())

    def finish(response: web.StreamResponse) -> None:
        response.headers["Server"] = "cacheaware"
        if traffic.draining:  # whoever has this connection open sends the next request elsewhere
            response.force_close()
            response.headers["Connection"] = "close"

    async def finish_head(request: web.Request, response: web.StreamResponse) -> None:
        finish(response)

    async def generate(request: web.BaseRequest) -> web.StreamResponse:
        response = await plain_errors(request, proxy.generate)
        if not isinstance(response, Written):
            finish(response)
        return response

    app.on_response_prepare.append(finish_head)
    posts: dict[str, Handler] = dict.fromkeys(("/v1/chat/completions", "/v1/completions", "/v1/responses"), generate)
    app[POSTS] = posts
    app.router.add_post("/v1/chat/completions", proxy.generate)
    app.router.add_post("/v1/completions", proxy.generate)
    app.router.add_post("/v1/responses", proxy.generate)
    app.router.add_get("/v1/models", proxy.pass_through)
    app.router.add_post("/tokenize", proxy.pass_through)
    app.router.add_post("/detokenize", proxy.pass_through)
    app.router.add_get("/health", health)
    app.router.add_get("/healthz", alive)
    app.router.add_get("/readyz", health)
    app.router.add_get("/metrics", metrics_page)
    app.router.add_get("/openapi.json", openapi)
    return app


def readiness(state: EngineState, traffic: Traffic) -> web.Response:
    if traffic.draining:
        return web.json_response({"status": "draining"}, status=503)
    if not state.healthy:
        return web.json_response({"status": "engine not ready", "reason": state.health_reason}, status=503)
    if not state.ready:
        return web.json_response({"status": "view not applied by the engine yet"}, status=503)
    return web.json_response({"status": "ok"})


@web.middleware
async def plain_errors(request: Q, handler: Callable[[Q], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Errors of routing and of our own, as OpenAI clients expect them."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        return refusal_response(not_found(request.path))
    except web.HTTPMethodNotAllowed as error:
        return refusal_response(
            MethodNotAllowed(f"{request.method} is not allowed on {request.path}", error.allowed_methods)
        )
    except Refusal as refusal:
        return refusal_response(refusal)
    except (web.HTTPException, ConnectionError):
        raise
    except Exception:
        log.exception("a request failed in the sidecar")
        body = error_body("the sidecar failed; its log has the details", "server_error", str(Reason.INTERNAL))
        headers = {"x-cacheaware-reason": str(Reason.INTERNAL)}
        return web.Response(status=500, body=body, content_type="application/json", headers=headers)


def not_found(path: str) -> NotFound:
    if path.startswith(UNSUPPORTED):
        return NotFound(
            f"{path[:100]} is not supported: use /v1/chat/completions, /v1/completions or /v1/responses",
            reason=Reason.UNSUPPORTED,
        )
    return NotFound(f"there is nothing at {path[:100]}")


async def _engine_page(session: aiohttp.ClientSession, engine_url: str) -> str:
    """The engine's metrics, or nothing where it does not answer: ours are then all there is."""
    timeout = aiohttp.ClientTimeout(total=_ENGINE_PAGE_SECONDS)
    headers = {"accept": "text/plain;version=0.0.4"}
    try:
        async with session.get(f"{engine_url}/metrics", timeout=timeout, headers=headers) as answer:
            return await answer.text(errors="replace") if answer.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError, OSError):
        return ""
