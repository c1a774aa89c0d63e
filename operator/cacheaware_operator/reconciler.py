"""One loop for one pool: observe, rebalance, plan, apply, tell the status. What it decides is in the pure modules."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from cacheaware_api import wire
from cacheaware_api.conditions import ConditionType, Reason
from cacheaware_api.status import CacheAwarePoolStatus
from cacheaware_operator.fleet import Fleet, Snapshot
from cacheaware_operator.plan import Wanted, plan_pool
from cacheaware_operator.rebalance_rounds import RebalanceRounds
from cacheaware_operator.rebalance_status import last_rebalance
from cacheaware_operator.rebalance_terms import terms_of
from cacheaware_operator.rebalance_values import Decision, Move
from cacheaware_operator.status import pool_status

log = logging.getLogger(__name__)

BUSY_SECONDS = 0.2  # between passes while something is on its way: an edit should show at once
CALM_SECONDS = 1.0  # otherwise; a pass costs two small requests a replica


@dataclass(frozen=True, slots=True)
class Pass:
    """What one turn of the loop found and decided."""

    wanted: Wanted
    view: wire.View  # that the replicas are given
    snapshot: Snapshot
    status: CacheAwarePoolStatus
    moves: tuple[Move, ...] = ()  # of quota, in this turn

    @property
    def settled(self) -> bool:
        """Every wanted replica is ready and its engine has acknowledged the view."""
        replicas = self.snapshot.replicas
        return len(replicas) == self.wanted.spec.replicas and all(
            replica.ready and replica.status is not None and replica.status.applied == self.view.revision
            for replica in replicas
        )

    @property
    def refused(self) -> str | None:
        """Why an engine will not apply the wanted quotas, however long one waits."""
        if self.snapshot.view != self.view:
            return None  # the replicas were asked before they were given this view: they speak of another
        for condition in self.status.conditions:
            if (condition.type, condition.reason) == (ConditionType.STALLED, Reason.QUOTA_REFUSED):
                return condition.message
        return None


class Reconciler:
    """Keeps a fleet as wanted. `publish` gets every pass; `now` is the wall clock, for the status's times; whoever sets
    `wake` has the loop look again at once.
    """

    def __init__(
        self,
        fleet: Fleet,
        wanted: Wanted,
        *,
        publish: Callable[[Pass], None],
        now: Callable[[], datetime],
        wake: asyncio.Event,
    ) -> None:
        self._fleet = fleet
        self._wanted = wanted
        self._publish = publish
        self._now = now
        self._wake = wake
        self._status: CacheAwarePoolStatus | None = None
        self._rounds = RebalanceRounds()

    @property
    def wanted(self) -> Wanted:
        return self._wanted

    def want(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._wake.set()

    async def run(self) -> None:
        """Reconcile until cancelled. A full disk or a lost file is logged and tried again at the next pass."""
        while True:
            self._wake.clear()
            settled = False
            try:
                settled = (await self.reconcile()).settled
            except OSError:
                log.exception("could not reconcile; trying again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CALM_SECONDS if settled else BUSY_SECONDS):
                    await self._wake.wait()

    async def reconcile(self) -> Pass:
        """One turn."""
        wanted = self._wanted  # it may change while we wait
        snapshot = await self._fleet.observe()
        decision = await self._rebalance(wanted, snapshot)
        plan = plan_pool(wanted, snapshot, None if decision is None else decision.effective)
        await self._fleet.apply(plan)
        before = self._status
        last = None if before is None else before.last_rebalance
        self._status = pool_status(
            wanted,
            plan.view.revision,
            {tier.name: tier.effective_percent for tier in plan.view.tiers},
            snapshot,
            before,
            self._now(),
            rebalanced=None if decision is None else last_rebalance(decision, last, self._now()),
            overrides=self._rounds.closer_look,
        )
        moves = () if decision is None else decision.made
        done = Pass(wanted, plan.view, snapshot, self._status, moves)
        self._publish(done)
        return done

    async def _rebalance(self, wanted: Wanted, snapshot: Snapshot) -> Decision | None:
        """The round of this interval; None where none is due."""
        terms, clock = terms_of(wanted.spec), asyncio.get_running_loop().time
        if not self._rounds.due(terms, clock()):
            return None
        return self._rounds.hold(terms, snapshot, await self._fleet.pages(), clock())
