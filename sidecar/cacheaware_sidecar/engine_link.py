"""The control side of an engine that keeps the pool's accounts: follows its ledger, keeps the wanted quotas and public
prefixes applied.

One task long-polls `/kv/ledger`, one applies what is wanted whenever the ledger says that something else is in force (a
new view, or a new engine process), one asks for `/health` (`engine_state.py`). Nothing here is on a request's path but
reading what they found. Requests themselves are `proxy.py`'s; an engine without `/kv/*` is `estimated_link.py`'s.
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
from cacheaware_sidecar.engine_state import FAILURES, RETRY_SECONDS, EngineState, message_in, words
from cacheaware_sidecar.logs import values

log = logging.getLogger(__name__)

LONG_POLL_SECONDS = 10
_NO_ACCOUNTS = 501  # the status of an engine that was asked for accounts and keeps none
_SLACK = 5.0  # seconds beyond a long poll before the engine counts as silent
_PACE = 0.02  # seconds between two polls, where the ledger changes all the time


class _Refused(Exception):
    """The engine will not apply this, however often it is asked."""


class EngineLink:
    """What is known of one engine. `on_ledger` is called with each new ledger, `on_restart` with a new process, and
    `on_no_accounts` with what an engine says that keeps none: a vLLM whose version the plugin does not know.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        kv_session: aiohttp.ClientSession,
        engine_url: str,
        *,
        on_ledger: Callable[[wire.Ledger], None],
        on_restart: Callable[[], None],
        on_no_accounts: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._session = session
        self._kv = kv_session  # its connector goes to the Unix socket
        self._url = engine_url
        self._on_ledger = on_ledger
        self._on_restart = on_restart
        self._on_no_accounts = on_no_accounts
        self.state = EngineState()
        self._ledger: wire.Ledger | None = None
        self._reachable = False  # the last poll of the ledger was answered
        self._public: tuple[wire.PublicPrefix, ...] | None = None  # as this engine process was last told
        self._public_problem: str | None = None
        self._work = asyncio.Event()  # something may have to be applied

    # -- what others read ----------------------------------------------------------------------------------------------

    @property
    def ledger(self) -> wire.Ledger | None:
        return self._ledger

    @property
    def enforcement(self) -> wire.Enforcement:
        return wire.Enforcement.ENGINE

    def want(self, view: wire.View) -> None:
        """Apply this view as soon as the engine can be reached."""
        self.state.wanted = view
        self.state.problem = self._public_problem = None
        self._work.set()

    def conditions(self) -> tuple[wire.Condition, ...]:
        conditions = [self._quota_condition()]
        if self.state.wanted is not None:
            conditions.append(self._public_condition(self.state.wanted))
        return tuple(conditions)

    # -- tasks ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_ledger())
            tasks.create_task(self._keep_applied())
            tasks.create_task(self.state.watch_health(self._session, self._url))

    async def _follow_ledger(self) -> None:
        while True:
            try:
                ledger = await self._get_ledger()
            except (*FAILURES, wire.WireError) as error:
                if self._reachable:
                    log.warning("the engine's ledger cannot be read", extra=values(problem=words(error)))
                self._reachable = False
                self.state.doubt()
                await asyncio.sleep(RETRY_SECONDS)
                continue
            await self._see(ledger)
            await asyncio.sleep(_PACE)

    async def _get_ledger(self) -> wire.Ledger:
        known = self._ledger if self._reachable else None
        query = {} if known is None else {"after": str(known.sequence), "wait": str(LONG_POLL_SECONDS)}
        timeout = aiohttp.ClientTimeout(total=LONG_POLL_SECONDS + _SLACK)
        async with self._kv.get("http://engine/kv/ledger", params=query, timeout=timeout) as response:
            text = await response.text(errors="replace")
            if response.status == _NO_ACCOUNTS:
                self._on_no_accounts(message_in(text))
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
            self.state.applied = self._public = self.state.problem = self._public_problem = None
            self._on_restart()
            await self.state.tell()
        self._on_ledger(ledger)
        wanted = self.state.wanted
        if wanted is not None and (
            ledger.revision != wanted.revision or self.state.applied != wanted.revision or self._public is None
        ):
            self._work.set()

    async def _keep_applied(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                await self._apply()
            except FAILURES as error:
                log.debug("the engine could not be told yet", extra=values(problem=words(error)))
                await asyncio.sleep(RETRY_SECONDS)
                self._work.set()

    async def _apply(self) -> None:
        view, ledger = self.state.wanted, self._ledger
        if view is None or ledger is None or self.state.problem is not None:
            return  # a new view, a new ledger or a new process comes back here
        quotas = quota.quotas_for(view, ledger.capacity)
        if self.state.applied != view.revision or ledger.revision != view.revision:
            try:
                await self._put("/kv/quotas", wire.to_json(quotas))
            except _Refused as error:
                self.state.problem = str(error)
                log.error("the engine refused the quotas", extra=values(problem=self.state.problem))
                await self.state.tell()
                return
            if self.state.applied != view.revision:
                log.info("quotas applied", extra=values(revision=view.revision.number, blocks=ledger.capacity))
            self.state.applied = view.revision
            await self.state.tell()
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
            raise _Refused(f"PUT {path} answered {response.status}: {message_in(text)}")

    # -- conditions ----------------------------------------------------------------------------------------------------

    def _quota_condition(self) -> wire.Condition:
        kind = str(ConditionType.QUOTA_ENFORCED)
        if self.state.problem is not None:
            return wire.Condition(kind, "False", str(Reason.QUOTA_REFUSED), self.state.problem)
        if self.state.in_force:
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
