"""What requests and the operator need to know of an engine, whichever way it is told what to do: is it well, and is the
wanted view in force?

`EngineLink` of an engine with `/kv/*` and `EstimatedLink` of one without fill it in; asking for `/health` is the same
for both and is done here.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Protocol

import aiohttp

from cacheaware_api import wire
from cacheaware_sidecar.errors import NoEngine
from cacheaware_sidecar.logs import values

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.2  # local and cheap, and readers wait for it
_HEALTH_EVERY = 1.0
_HEALTH_PATIENCE = 5.0  # a busy engine on shared cores answers late without being dead
_SETTLE = 2.0  # seconds a request waits for a view that is just being applied
_PACE = 0.02  # seconds between two questions, where many requests doubt at once

FAILURES = (aiohttp.ClientError, TimeoutError, OSError)


class Link(Protocol):
    """One engine, as the rest of the sidecar sees it."""

    @property
    def state(self) -> EngineState: ...

    @property
    def ledger(self) -> wire.Ledger | None: ...

    @property
    def enforcement(self) -> wire.Enforcement: ...

    def want(self, view: wire.View) -> None:
        """Apply this view as soon as the engine can be reached."""

    def conditions(self) -> tuple[wire.Condition, ...]: ...

    async def run(self) -> None:
        """Runs until cancelled."""


class EngineState:
    def __init__(self) -> None:
        self.wanted: wire.View | None = None
        self.applied: wire.Revision | None = None  # what is in force; None for a process that was told nothing yet
        self.problem: str | None = None  # why the wanted quotas are refused
        self.healthy = False
        self.health_reason = "not asked yet"
        self._probe = asyncio.Event()  # health should be asked now
        self._news = asyncio.Condition()  # applied or health changed

    @property
    def ready(self) -> bool:
        return self.healthy and self.in_force

    @property
    def in_force(self) -> bool:
        return self.wanted is not None and self.applied == self.wanted.revision

    def doubt(self) -> None:
        """A request failed on its way: ask for the engine's health now."""
        self._probe.set()

    async def usable(self) -> None:
        """Return when a request may be sent; raises `NoEngine`.

        A view that is just being applied is waited for, so that no request of a new tier meets an engine that does not
        know it yet. One that the engine refused is not: it goes on with what it has.
        """
        if self.ready:
            return
        if not self.healthy:
            raise NoEngine(f"the engine is not ready ({self.health_reason}): try again in a moment")
        if self.problem is None:
            try:
                async with asyncio.timeout(_SETTLE), self._news:
                    await self._news.wait_for(lambda: self.ready or not self.healthy or bool(self.problem))
            except TimeoutError:
                pass  # judged below
        if not self.healthy or self.applied is None:
            raise NoEngine("the engine has not taken the pool's quotas yet: try again in a moment")

    async def tell(self) -> None:
        """Something changed: whoever waits in `usable` or `health_changes` looks again."""
        async with self._news:
            self._news.notify_all()

    async def health_changes(self, seconds: float) -> None:
        """Return when the engine became well or ill, or after so many seconds."""
        before = self.healthy
        try:
            async with asyncio.timeout(seconds), self._news:
                await self._news.wait_for(lambda: self.healthy != before)
        except TimeoutError:
            pass

    async def watch_health(self, session: aiohttp.ClientSession, engine_url: str) -> None:
        """Runs until cancelled."""
        late = 0
        while True:
            try:
                healthy, reason = await _ask_health(session, engine_url)
                late = 0
            except TimeoutError:
                late += 1  # one late answer is a busy engine
                healthy, reason = self.healthy and late < 2, "it does not answer"
            except FAILURES as error:
                # Clients read the reason: it names no address of ours.
                log.debug("the engine's health cannot be asked", extra=values(problem=words(error)))
                healthy, reason = False, "it cannot be reached"
            if (healthy, reason) != (self.healthy, self.health_reason):
                if healthy != self.healthy:
                    log.info("the engine's health changed", extra=values(healthy=healthy, why=reason or None))
                self.healthy, self.health_reason = healthy, reason
                await self.tell()
            try:
                async with asyncio.timeout(_HEALTH_EVERY if healthy else RETRY_SECONDS):
                    await self._probe.wait()
                await asyncio.sleep(_PACE)
            except TimeoutError:
                pass  # time to ask again
            self._probe.clear()


async def _ask_health(session: aiohttp.ClientSession, engine_url: str) -> tuple[bool, str]:
    timeout = aiohttp.ClientTimeout(total=_HEALTH_PATIENCE)
    async with session.get(f"{engine_url}/health", timeout=timeout) as response:
        text = await response.text(errors="replace")
        return response.status == 200, "" if response.status == 200 else message_in(text) or f"{response.status}"


def message_in(text: str) -> str:
    """The readable part of an error body."""
    try:
        body = json.loads(text)
    except ValueError:
        return text[:500].strip()
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error.get("reason") or error.get("status") or error
    return str(error)[:500]


def words(error: BaseException) -> str:
    return str(error) or type(error).__name__
