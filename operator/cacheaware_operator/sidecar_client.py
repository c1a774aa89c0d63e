"""Talk to the control side of one sidecar, and ask an engine for its health; every failure is one of our errors."""

from __future__ import annotations

import functools
import json
from typing import Any

import aiohttp

from cacheaware_api import wire
from cacheaware_operator.errors import Unreachable, ViewRefused
from cacheaware_operator.processes import Health, Probe

_TIMEOUT = aiohttp.ClientTimeout(total=5)  # a control answer is small and local


class SidecarClient:
    """The control side of one sidecar (`PUT /pool/view`, `GET /pool/status`, health). The session is the caller's."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        control_url: str,
        token: str,
        timeout: aiohttp.ClientTimeout = _TIMEOUT,
    ) -> None:
        self._session = session
        self._timeout = timeout
        self._url = control_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}

    async def put_view(self, view: wire.View) -> wire.Revision:
        """Deliver the wanted view; raises `ViewRefused` with the sidecar's reason, or `Unreachable`."""
        status, text = await self._call("PUT", "/pool/view", wire.to_json(view))
        body = _decoded(text)
        if status == 200:
            try:
                return wire.from_json(wire.Revision, body.get("revision") if isinstance(body, dict) else body)
            except wire.WireError as error:
                raise ViewRefused(f"the sidecar at {self._url} answered with {error}") from None
        if status >= 500:
            raise Unreachable(f"the sidecar at {self._url} answered {status}: {_reason(body)}")
        raise ViewRefused(f"the sidecar at {self._url} refused the view ({status}): {_reason(body)}")

    async def status(self) -> wire.PoolStatus:
        status, text = await self._call("GET", "/pool/status")
        if status != 200:
            raise Unreachable(f"the sidecar at {self._url} answered {status}: {_reason(_decoded(text))}")
        try:
            return _pool_status(text)
        except wire.WireError as error:
            raise Unreachable(f"the sidecar at {self._url} sent a status that cannot be read: {error}") from None

    async def metrics(self) -> str:
        """Its own metrics page, as text."""
        status, text = await self._call("GET", "/metrics")
        if status != 200:
            raise Unreachable(f"the sidecar at {self._url} answered {status}: {_reason(_decoded(text))}")
        return text

    async def alive(self) -> Probe:
        """Whether the process answers at all; that is what supervision asks."""
        return await self._probe("/healthz")

    async def ready(self) -> bool:
        """Whether it takes requests: the view is applied by the engine and the engine is well."""
        return (await self._probe("/readyz")).health is Health.READY

    async def _probe(self, path: str) -> Probe:
        return await _ask(self._session, self._url + path)

    async def _call(self, method: str, path: str, message: Any = None) -> tuple[int, str]:
        try:
            async with self._session.request(
                method, self._url + path, json=message, headers=self._headers, timeout=self._timeout
            ) as response:
                return response.status, await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"the sidecar at {self._url} does not answer: {_words(error)}") from error


async def engine_health(session: aiohttp.ClientSession, engine_url: str) -> Probe:
    """`GET /health` of an engine: 503 while it loads, 200 when ready, 500 once its step loop has died."""
    return await _ask(session, engine_url + "/health", broken_status=500)


async def _ask(session: aiohttp.ClientSession, url: str, broken_status: int | None = None) -> Probe:
    try:
        async with session.get(url, timeout=_TIMEOUT) as response:
            if response.status == 200:
                return Probe(Health.READY)
            reason = _reason(_decoded(await response.text(errors="replace")))
            health = Health.BROKEN if response.status == broken_status else Health.NOT_READY
            return Probe(health, reason)
    except (aiohttp.ClientError, TimeoutError, OSError):
        return Probe(Health.NOT_READY, "does not answer")


@functools.lru_cache(maxsize=2048)  # one that is idle says the same each time, and a cluster may have a thousand
def _pool_status(text: str) -> wire.PoolStatus:
    return wire.from_json(wire.PoolStatus, _decoded(text))


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _reason(body: Any) -> str:
    """The readable part of an error body, whichever of the usual shapes it has."""
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict):
            for key in ("message", "reason", "status"):
                if isinstance(error.get(key), str):
                    return str(error[key])[:500]
        return str(error)[:500]
    return str(body)[:500].strip()


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
