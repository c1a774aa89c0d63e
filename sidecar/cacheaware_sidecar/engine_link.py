"""The engine's control side and health: follows the ledger, keeps the wanted quotas and public prefixes applied.

One task long-polls `/kv/ledger`, one applies what is wanted whenever the ledger says that something else is in force (a
new view, or a new engine process), one asks for `/health`. Nothing here is on a request's path but reading what they
found. Requests themselves are `proxy.py`'s.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import aiohttp

from cacheaware_api import quota, wire
from cacheaware_api.conditions import ConditionType, Reason
from cacheaware_sidecar.errors import NoEngine
from cacheaware_sidecar.logs import values

log = logging.getLogger(__name__)

LONG_POLL_SECONDS = 10
_SLACK = 5.0  # seconds beyond a long poll before the engine counts as silent
_PACE = 0.02  # seconds between two polls, where the ledger changes all the time
_RETRY = 0.2  # seconds; local and cheap, and readers wait for it
_HEALTH_EVERY = 1.0
_HEALTH_PATIENCE = 5.0  # a busy engine on shared cores answers late without being dead
_SETTLE = 2.0  # seconds a request waits for a view that is just being applied

_FAILURES = (aiohttp.ClientError, TimeoutError, OSError)


class _Refused(Exception):
    """The engine will not apply this, however often it is asked."""


class EngineLink:
    """What is known of one engine. `on_ledger` is called with each new ledger, `on_restart` with a new process."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        kv_session: aiohttp.ClientSession,
        engine_url: str,
        *,
        on_ledger: Callable[[wire.Ledger], None],
        on_restart: Callable[[], None],
    ) -> None:
        self._session = session
        self._kv = kv_session  # its connector goes to the Unix socket
        self._url = engine_url
        self._on_ledger = on_ledger
        self._on_restart = on_restart
        self._wanted: wire.View | None = None
        self._ledger: wire.Ledger | None = None
        self._reachable = False  # the last poll of the ledger was answered
        self._applied: wire.Revision | None = None
        self._public: tuple[wire.PublicPrefix, ...] | None = None  # as this engine process was last told
        self._quota_problem: str | None = None  # why the engine refused the wanted quotas
        self._public_problem: str | None = None
        self._healthy = False
        self._health_reason = "not asked yet"
        self._work = asyncio.Event()  # something may have to be applied
        self._probe = asyncio.Event()  # health should be asked now
        self._news = asyncio.Condition()  # applied or health changed

    # -- what others read ----------------------------------------------------------------------------------------------

    @property
    def ledger(self) -> wire.Ledger | None:
        return self._ledger

    @property
    def applied(self) -> wire.Revision | None:
        """The revision that the engine acknowledged; None for a process that has acknowledged none."""
        return self._applied

    @property
    def healthy(self) -> bool:
        return self._healthy

    @property
    def health_reason(self) -> str:
        return self._health_reason

    @property
    def ready(self) -> bool:
        return self._healthy and self._wanted is not None and self._applied == self._wanted.revision

    def want(self, view: wire.View) -> None:
        """Apply this view as soon as the engine can be reached."""
        self._wanted = view
        self._quota_problem = self._public_problem = None
        self._work.set()

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
        if not self._healthy:
            raise NoEngine(f"the engine is not ready ({self._health_reason}): try again in a moment")
        if self._quota_problem is None:
            try:
                async with asyncio.timeout(_SETTLE), self._news:
                    await self._news.wait_for(lambda: self.ready or not self._healthy or bool(self._quota_problem))
            except TimeoutError:
                pass  # judged below
        if not self._healthy or self._applied is None:
            raise NoEngine("the engine has not taken the pool's quotas yet: try again in a moment")

    def conditions(self) -> tuple[wire.Condition, ...]:
        conditions = [self._quota_condition()]
        if self._wanted is not None:
            conditions.append(self._public_condition(self._wanted))
        return tuple(conditions)

    # -- tasks ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_ledger())
            tasks.create_task(self._keep_applied())
            tasks.create_task(self._watch_health())

    async def _follow_ledger(self) -> None:
        while True:
            try:
                ledger = await self._get_ledger()
            except (*_FAILURES, wire.WireError) as error:
                if self._reachable:
                    log.warning("the engine's ledger cannot be read", extra=values(problem=_words(error)))
                self._reachable = False
                self._probe.set()
                await asyncio.sleep(_RETRY)
                continue
            await self._see(ledger)
            await asyncio.sleep(_PACE)

    async def _get_ledger(self) -> wire.Ledger:
        known = self._ledger if self._reachable else None
        query = {} if known is None else {"after": str(known.sequence), "wait": str(LONG_POLL_SECONDS)}
        timeout = aiohttp.ClientTimeout(total=LONG_POLL_SECONDS + _SLACK)
        async with self._kv.get("http://engine/kv/ledger", params=query, timeout=timeout) as response:
            text = await response.text(errors="replace")
            if response.status != 200:
                raise wire.WireError("GET /kv/ledger", f"answered {response.status}: {text[:200]}")
            try:
                return wire.from_json(wire.Ledger, json.loads(text))
            except json.JSONDecodeError:
                raise wire.WireError("GET /kv/ledger", "answered with something that is not JSON") from None

    async def _see(self, ledger: wire.Ledger) -> None:
        before, again = self._ledger, not self._reachable
        self._ledger, self._reachable = ledger, True
        if before is not None and _is_new_process(before, ledger, again):
            log.info("the engine was started anew")
            self._applied = self._public = self._quota_problem = self._public_problem = None
            self._on_restart()
            await self._tell()
        self._on_ledger(ledger)
        wanted = self._wanted
        if wanted is not None and (
            ledger.revision != wanted.revision or self._applied != wanted.revision or self._public is None
        ):
            self._work.set()

    async def _keep_applied(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                await self._apply()
            except _FAILURES as error:
                log.debug("the engine could not be told yet", extra=values(problem=_words(error)))
                await asyncio.sleep(_RETRY)
                self._work.set()

    async def _apply(self) -> None:
        view, ledger = self._wanted, self._ledger
        if view is None or ledger is None or self._quota_problem is not None:
            return  # a new view, a new ledger or a new process comes back here
        quotas = quota.quotas_for(view, ledger.capacity)
        if self._applied != view.revision or ledger.revision != view.revision:
            try:
                await self._put("/kv/quotas", wire.to_json(quotas))
            except _Refused as error:
                self._quota_problem = str(error)
                log.error("the engine refused the quotas", extra=values(problem=self._quota_problem))
                await self._tell()
                return
            if self._applied != view.revision:
                log.info("quotas applied", extra=values(revision=view.revision.number, blocks=ledger.capacity))
            self._applied = view.revision
            await self._tell()
        prefixes = public_prefixes(view)
        if prefixes != self._public and self._public_problem is None:
            try:
                if prefixes or ledger.public.prefixes:
                    await self._put("/kv/public", wire.to_json(wire.PublicPrefixes(prefixes)))
                self._public = prefixes
            except _Refused as error:
                self._public_problem = str(error)
                self._public = prefixes
                log.error("the engine refused the public prefixes", extra=values(problem=self._public_problem))

    async def _put(self, path: str, message: Any) -> None:
        timeout = aiohttp.ClientTimeout(total=30)  # prewarming tokenises every public prefix
        async with self._kv.put(f"http://engine{path}", json=message, timeout=timeout) as response:
            if response.status == 200:
                await response.read()
                return
            text = await response.text(errors="replace")
            if response.status >= 500:
                raise OSError(f"PUT {path} answered {response.status}: {text[:200]}")
            raise _Refused(f"PUT {path} answered {response.status}: {_message(text)}")

    async def _watch_health(self) -> None:
        late = 0
        while True:
            try:
                healthy, reason = await self._ask_health()
                late = 0
            except TimeoutError:
                late += 1  # one late answer is a busy engine
                healthy, reason = self._healthy and late < 2, "it does not answer"
            except _FAILURES as error:
                # Clients read the reason: it names no address of ours.
                log.debug("the engine's health cannot be asked", extra=values(problem=_words(error)))
                healthy, reason = False, "it cannot be reached"
            if (healthy, reason) != (self._healthy, self._health_reason):
                if healthy != self._healthy:
                    log.info("the engine's health changed", extra=values(healthy=healthy, why=reason or None))
                self._healthy, self._health_reason = healthy, reason
                await self._tell()
            try:
                async with asyncio.timeout(_HEALTH_EVERY if healthy else _RETRY):
                    await self._probe.wait()
                await asyncio.sleep(_PACE)  # many requests may doubt at once
            except TimeoutError:
                pass  # time to ask again
            self._probe.clear()

    async def _ask_health(self) -> tuple[bool, str]:
        timeout = aiohttp.ClientTimeout(total=_HEALTH_PATIENCE)
        async with self._session.get(f"{self._url}/health", timeout=timeout) as response:
            text = await response.text(errors="replace")
            return response.status == 200, "" if response.status == 200 else _message(text) or f"{response.status}"

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    # -- conditions ----------------------------------------------------------------------------------------------------

    def _quota_condition(self) -> wire.Condition:
        kind = str(ConditionType.QUOTA_ENFORCED)
        if self._quota_problem is not None:
            return wire.Condition(kind, "False", str(Reason.QUOTA_REFUSED), self._quota_problem)
        if self._wanted is not None and self._applied == self._wanted.revision:
            return wire.Condition(kind, "True", str(Reason.ENFORCED_BY_ENGINE))
        return wire.Condition(kind, "Unknown", str(Reason.NOT_KNOWN_YET), "the engine has not answered yet")

    def _public_condition(self, view: wire.View) -> wire.Condition:
        kind = str(ConditionType.PUBLIC_PREFIXES_RESIDENT)
        if self._public_problem is not None:
            return wire.Condition(kind, "False", str(Reason.SHARE_TOO_SMALL), self._public_problem)
        if not view.public_prefixes:
            return wire.Condition(kind, "True", str(Reason.NO_PUBLIC_PREFIXES))
        if self._ledger is None or self._public is None:
            return wire.Condition(kind, "Unknown", str(Reason.NOT_KNOWN_YET), "the engine has not taken them yet")
        known = self._ledger.public.prefixes
        absent = [
            prefix.name
            for prefix in view.public_prefixes
            if prefix.name not in known or known[prefix.name].resident < known[prefix.name].blocks
        ]
        if absent:
            return wire.Condition(kind, "False", str(Reason.NOT_RESIDENT), f"not in the cache: {', '.join(absent)}")
        return wire.Condition(kind, "True", str(Reason.RESIDENT))


def public_prefixes(view: wire.View) -> tuple[wire.PublicPrefix, ...]:
    """A public prefix is a system prompt: as a message, so that the engine puts it where its template does."""
    return tuple(
        wire.PublicPrefix(prefix.name, messages=({"role": "system", "content": prefix.text},))
        for prefix in view.public_prefixes
    )


def _is_new_process(before: wire.Ledger, now: wire.Ledger, after_silence: bool) -> bool:
    """A new process counts from the start and has no revision."""
    if now.sequence < before.sequence:
        return True
    return now.revision is None and (after_silence or before.revision is not None)


def _message(text: str) -> str:
    """The readable part of an error body."""
    try:
        body = json.loads(text)
    except ValueError:
        return text[:500].strip()
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error.get("reason") or error.get("status") or error
    return str(error)[:500]


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
