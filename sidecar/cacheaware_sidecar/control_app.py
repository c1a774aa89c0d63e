"""The control side: what the operator tells and asks. A bearer token guards everything but health."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from cacheaware_api import wire
from cacheaware_sidecar import metrics as pages
from cacheaware_sidecar.app import plain_errors, readiness
from cacheaware_sidecar.engine_state import EngineState
from cacheaware_sidecar.errors import BadRequest, Reason, Refusal, Unauthorized
from cacheaware_sidecar.explain import KEPT, Decisions
from cacheaware_sidecar.foresight import Foresight, question
from cacheaware_sidecar.metrics import Metrics
from cacheaware_sidecar.relay import refusal_response
from cacheaware_sidecar.request_body import read_body
from cacheaware_sidecar.rewrite import parse_object
from cacheaware_sidecar.secret_files import Secrets
from cacheaware_sidecar.traffic import Traffic
from cacheaware_sidecar.view_source import StaleView, ViewRefused, ViewSource

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_LARGEST_VIEW = 4 * 1024 * 1024  # public prefixes are texts
_VIEW_SECONDS = 30.0
_QUESTION_BYTES = 64 * 1024  # of a question about a request, beside the request's body
_OPEN_PATHS = frozenset({"/healthz", "/readyz"})


class Conflict(Refusal):
    """409: a newer view is in force."""

    status = 409
    type = "conflict_error"
    default_reason = Reason.STALE_VIEW


def create_control_app(
    *,
    views: ViewSource,
    secrets: Callable[[], Secrets],
    state: EngineState,
    traffic: Traffic,
    metrics: Metrics,
    decisions: Decisions,
    status: Callable[[], wire.PoolStatus],
    foresight: Foresight,
) -> web.Application:
    @web.middleware
    async def token_needed(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in _OPEN_PATHS and not holds_token(request.headers, secrets().control_tokens):
            return refusal_response(
                Unauthorized("the control token is needed: send it as 'Authorization: Bearer <control-token>'")
            )
        return await handler(request)

    async def put_view(request: web.Request) -> web.Response:
        try:
            view = wire.from_json(
                wire.View,
                parse_object(
                    await read_body(request, most=_LARGEST_VIEW, seconds=_VIEW_SECONDS, silence=_VIEW_SECONDS)
                ),
            )
            views.offer(view)
        except (wire.WireError, ViewRefused) as error:
            raise BadRequest(str(error), param=getattr(error, "path", None)) from None
        except StaleView as error:
            raise Conflict(str(error)) from None
        return web.json_response({"revision": wire.to_json(view.revision)})

    async def get_status(request: web.Request) -> web.Response:
        return web.json_response(wire.to_json(status()))

    async def explain(request: web.Request) -> web.Response:
        text = request.query.get("n", "100")
        if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 6):
            raise BadRequest(f"n must be a number of decisions, 1 to {KEPT}", param="n")
        now = status()
        answer = {"decisions": decisions.last(int(text)), "advice": now.advice, "groups": now.groups}
        return web.json_response(wire.to_json(answer))

    async def foresee(request: web.Request) -> web.Response:
        """What would happen to a request now; it is answered at once, and nothing is changed by asking."""
        most = foresight.most_bytes + _QUESTION_BYTES
        asked = question(await read_body(request, most=most, seconds=_VIEW_SECONDS, silence=_VIEW_SECONDS))
        return web.json_response(wire.to_json(await foresight.of(asked)))

    async def drain(request: web.Request) -> web.Response:
        """From now on new requests are refused; asked again, it tells how many of the others are left."""
        traffic.draining = True
        return web.json_response({"inside": traffic.inside})

    async def metrics_page(request: web.Request) -> web.Response:
        return web.Response(body=metrics.page(), headers={"Content-Type": pages.CONTENT_TYPE})

    async def alive(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def ready(request: web.Request) -> web.Response:
        return readiness(state, traffic)

    app = web.Application(middlewares=[plain_errors, token_needed])
    app.router.add_put("/pool/view", put_view)
    app.router.add_get("/pool/status", get_status)
    app.router.add_get("/pool/explain", explain)
    app.router.add_post("/pool/explain", foresee)
    app.router.add_post("/pool/drain", drain)
    app.router.add_get("/metrics", metrics_page)
    app.router.add_get("/healthz", alive)
    app.router.add_get("/readyz", ready)
    return app


def holds_token(headers: Mapping[str, str], tokens: tuple[bytes, ...]) -> bool:
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    given = token.strip().encode("utf-8", "surrogateescape")
    # Every token is compared, so that the time tells nothing about which one nearly fitted.
    matches = [hmac.compare_digest(given, known) for known in tokens]
    return scheme.lower() == "bearer" and any(matches)
