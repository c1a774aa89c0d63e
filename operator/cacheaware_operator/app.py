"""What the operator serves: its metrics, and whether it is alive and leads."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from cacheaware_operator import metrics as pages
from cacheaware_operator.metrics import Metrics


def create_app(metrics: Metrics, fault: Callable[[], str | None]) -> web.Application:
    """`fault` says what makes this process useless, if anything. A standby is ready: it waits for its turn."""

    async def page(request: web.Request) -> web.Response:
        return web.Response(body=metrics.page(), headers={"Content-Type": pages.CONTENT_TYPE})

    async def health(request: web.Request) -> web.Response:
        problem = fault()
        return web.Response(text=problem or "ok", status=200 if problem is None else 500)

    app = web.Application()
    app.router.add_get("/metrics", page)
    app.router.add_get("/healthz", health)
    app.router.add_get("/readyz", health)
    return app
