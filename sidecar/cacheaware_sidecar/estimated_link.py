"""An engine without `/kv/*`, such as an unmodified vLLM: learns its KV cache's size from its metrics page and keeps
the wanted quotas applied to the sidecar's own estimate.

The quotas are in force as soon as they are here: nobody else would apply them. What that is worth is said in the
condition `QuotaEnforced`: False, whatever is known.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable

import aiohttp

from cacheaware_api import quota, wire
from cacheaware_api.conditions import ConditionType, Reason
from cacheaware_sidecar.block_budget import Cache
from cacheaware_sidecar.budget import SlotBudget
from cacheaware_sidecar.engine_metrics import EngineFigures, read_figures
from cacheaware_sidecar.engine_state import FAILURES, RETRY_SECONDS, EngineState, words
from cacheaware_sidecar.estimated_ledger import HitCounts, Sequences, build_ledger, sequences_of
from cacheaware_sidecar.logs import values

log = logging.getLogger(__name__)

DEFAULT_SEQUENCES = 256  # vLLM's own default of --max-num-seqs, as the metrics page does not tell it
EVERY_SECONDS = 2.0  # the page of a large vLLM takes milliseconds to make
_PATIENCE = 5.0
_MORE_CAUTION, _MOST_CAUTION = 1.1, 2.0  # after a preemption: the estimates were too low
_LESS_CAUTION = 0.99  # a second without one


class EstimatedLink:
    """What is known of one engine. `on_ledger` is called where new quotas are in force, `on_restart` when the engine
    came back after it was gone. `budget` has a block budget. `no_accounts`: why the engine keeps none, if it said so.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        engine_url: str,
        budget: SlotBudget,
        *,
        sequences: int | None,
        on_ledger: Callable[[wire.Ledger], None],
        on_restart: Callable[[], None],
        every: float = EVERY_SECONDS,
        no_accounts: str | None = None,
    ) -> None:
        assert budget.blocks is not None, "an estimate needs an account of blocks"
        self._session = session
        self._url = engine_url
        self._budget = budget
        self._blocks = budget.blocks
        self._most_sequences = sequences or DEFAULT_SEQUENCES
        self._on_ledger = on_ledger
        self._on_restart = on_restart
        self._every = every
        self._no_accounts = no_accounts
        self.state = EngineState()
        self.hits = HitCounts()
        self._figures: EngineFigures | None = None  # absent: this engine process has not been asked yet
        self._preemptions: float | None = None
        self._sequences: Sequences | None = None
        self._asked = 0
        self._work = asyncio.Event()

    # -- what others read ----------------------------------------------------------------------------------------------

    @property
    def enforcement(self) -> wire.Enforcement:
        return wire.Enforcement.ESTIMATE_ONLY

    @property
    def ledger(self) -> wire.Ledger | None:
        """As of now; None while the size of the cache is not known."""
        cache, sequences = self._blocks.cache, self._sequences
        if cache is None or sequences is None:
            return None
        return build_ledger(
            cache,
            self._blocks.held(),
            self.hits,
            sequences,
            self._budget.in_flight,
            sequence=self._asked,
            requests=self._budget.requests,
        )

    def want(self, view: wire.View) -> None:
        self.state.wanted = view
        self.state.problem = None
        self._work.set()

    def conditions(self) -> tuple[wire.Condition, ...]:
        quotas = self._quota_condition()
        wanted = self.state.wanted
        return (quotas,) if wanted is None else (quotas, _public_condition(wanted))

    # -- tasks ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.state.watch_health(self._session, self._url))
            tasks.create_task(self._follow_metrics())
            tasks.create_task(self._keep_applied())

    async def _follow_metrics(self) -> None:
        was_gone = False
        while True:
            if not self.state.healthy:
                # It tells no number of its process: one that was well, is ill and gets well again counts as another.
                was_gone = was_gone or self._figures is not None
                self._figures = self._preemptions = None
                await self.state.health_changes(self._every)
                continue
            try:
                figures = await self._ask()
            except FAILURES as error:
                log.debug("the engine's metrics cannot be read", extra=values(problem=words(error)))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if was_gone:
                was_gone = False
                self._on_restart()
            self._see(figures)
            await self.state.health_changes(self._every)

    async def _ask(self) -> EngineFigures:
        timeout = aiohttp.ClientTimeout(total=_PATIENCE)
        headers = {"accept": "text/plain;version=0.0.4"}
        async with self._session.get(f"{self._url}/metrics", timeout=timeout, headers=headers) as answer:
            if answer.status != 200:
                raise OSError(f"GET /metrics answered {answer.status}")
            return read_figures(await answer.text(errors="replace"))

    def _see(self, figures: EngineFigures) -> None:
        before = self._figures
        if before is not None and before.blocks is not None and figures.blocks is None:
            # A process keeps the cache that it has: this page is half of one.
            figures = dataclasses.replace(figures, blocks=before.blocks, block_size=before.block_size)
        self._figures = figures
        self._asked += 1
        self._blocks.measured(figures.held)
        if self._preemptions is not None and figures.preemptions is not None:
            preempted = figures.preemptions > self._preemptions
            caution = self._blocks.caution * (_MORE_CAUTION if preempted else _LESS_CAUTION**self._every)
            self._blocks.caution = min(_MOST_CAUTION, max(1.0, caution))
        self._preemptions = figures.preemptions
        if before is None or (before.blocks, before.block_size) != (figures.blocks, figures.block_size):
            self._work.set()

    async def _keep_applied(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            view, figures = self.state.wanted, self._figures
            if view is not None and figures is not None:
                self._apply(view, figures)
                await self.state.tell()

    def _apply(self, view: wire.View, figures: EngineFigures) -> None:
        if figures.blocks is None or figures.block_size is None:
            log.warning("the engine tells no size of its KV cache: only sequences are bounded")
            self._blocks.set_cache(None)
            self._sequences = None
            self.state.applied = view.revision
            return
        cache = Cache(figures.blocks, figures.block_size, quota.quotas_for(view, figures.blocks))
        try:
            sequences = sequences_of(cache, self._most_sequences)
        except ValueError as error:
            self.state.problem = str(error)
            log.error("the quotas cannot be applied", extra=values(problem=self.state.problem))
            return
        self.state.problem = None
        self._blocks.set_cache(cache)
        self._sequences = sequences
        self.state.applied = view.revision
        log.info("quotas applied by estimate", extra=values(revision=view.revision.number, blocks=figures.blocks))
        if (ledger := self.ledger) is not None:
            self._on_ledger(ledger)

    # -- conditions ----------------------------------------------------------------------------------------------------

    def _quota_condition(self) -> wire.Condition:
        kind = str(ConditionType.QUOTA_ENFORCED)
        if self.state.problem is not None:
            return wire.Condition(kind, "False", str(Reason.QUOTA_REFUSED), self.state.problem)
        if self.state.applied is None:
            return wire.Condition(kind, "Unknown", str(Reason.NOT_KNOWN_YET), "the engine has not answered yet")
        if self._blocks.cache is None:
            message = (
                "the engine's metrics page has no vllm:cache_config_info with block_size and num_gpu_blocks, so only "
                "sequences are bounded: use an engine that tells the size of its KV cache"
            )
            return wire.Condition(kind, "False", str(Reason.CAPACITY_UNKNOWN), message)
        if self._no_accounts is not None:
            message = f"{self._no_accounts}; what is admitted is bounded by estimate"
            return wire.Condition(kind, "False", str(Reason.UNSUPPORTED_VERSION), message)
        message = (
            "the engine keeps no account of tiers: what is admitted is bounded by estimate, and idle blocks and blocks "
            "of running requests are not taken back"
        )
        return wire.Condition(kind, "False", str(Reason.ESTIMATE_ONLY), message)


def _public_condition(view: wire.View) -> wire.Condition:
    kind = str(ConditionType.PUBLIC_PREFIXES_RESIDENT)
    if not view.public_prefixes:
        return wire.Condition(kind, "True", str(Reason.NO_PUBLIC_PREFIXES))
    message = "the engine knows no public prefixes: each sharing scope keeps its own copy, computed at its first use"
    return wire.Condition(kind, "False", str(Reason.NOT_RESIDENT), message)
