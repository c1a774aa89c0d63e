"""One look at one pool: read what it wants, observe, decide, apply, write its status. Returns when to look again.

Decisions are in the pure modules; here is their order, and what is remembered of a pool from one look to the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from pydantic import ValidationError

from cacheaware_api.conditions import ConditionStatus, ConditionType, Reason
from cacheaware_api.defaults import RebalancingMode
from cacheaware_api.status import CacheAwarePoolStatus, LastRebalance
from cacheaware_operator import drift, events, pod_parts
from cacheaware_operator.cluster.objects import Discovered
from cacheaware_operator.cluster_store import PoolKey
from cacheaware_operator.errors import KubernetesError, PoolBlocked, PoolGone
from cacheaware_operator.events import PoolEvent
from cacheaware_operator.fleet import Snapshot
from cacheaware_operator.kinds import EVENT, POD, POOL, Kind, Object
from cacheaware_operator.kubernetes_fleet import Cluster, FleetMemory, KubernetesFleet
from cacheaware_operator.metrics import Metrics
from cacheaware_operator.plan import PoolPlan, Wanted, plan_pool
from cacheaware_operator.rebalance_rounds import RebalanceRounds
from cacheaware_operator.rebalance_status import last_rebalance
from cacheaware_operator.rebalance_terms import Terms, terms_of
from cacheaware_operator.rebalance_values import Decision
from cacheaware_operator.references import read_pool, references
from cacheaware_operator.status import blocked_status, pool_status, written_status
from cacheaware_operator.status_conditions import Finding

log = logging.getLogger(__name__)

PAUSED = "cacheaware.dev/paused"  # annotation; "true": the pool is left as it is

# Seconds until the next look. Changes of objects wake a pool at once; these are for what only sidecars know.
FIGURES_SECONDS = 240.0  # without rebalancing: figures cover five minutes, and a thousand sidecars are to be asked
ACKNOWLEDGED_SECONDS, LONGEST_ACKNOWLEDGED_SECONDS = 0.3, 5.0  # an engine acknowledges a view within a step
NOT_READY_SECONDS = 10.0
BLOCKED_SECONDS = 10.0


@dataclass(slots=True)
class PoolMemory:
    """All of it may be lost: a restart begins with what is in the cluster."""

    uid: str
    fleet: FleetMemory = field(default_factory=FleetMemory)
    rounds: RebalanceRounds = field(default_factory=RebalanceRounds)
    figures_at: float = float("-inf")  # when they were written last
    looks_for_acknowledgement: int = 0  # in a row


@dataclass(frozen=True, slots=True)
class _Looked:
    """What one look found, in order to write it down."""

    status: CacheAwarePoolStatus
    figures_due: bool
    again_in: float
    events: Sequence[PoolEvent] = ()


class PoolPass:
    """`now` is the wall clock, for times in objects; the cluster's clock is for everything else."""

    def __init__(self, cluster: Cluster, metrics: Metrics, now: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._now = now
        self._memories: dict[PoolKey, PoolMemory] = {}
        self.discovered = Discovered()
        self.schema_problem: str | None = None  # why no pool may be acted on

    async def run(self, key: PoolKey) -> float | None:
        """Seconds until the pool is to be looked at again at the latest; None: when something changes."""
        pool = self._cluster.store.get(POOL, key.namespace, key.name)
        if pool is None:
            self._memories.pop(key, None)
            self._metrics.forget(key)
            return None
        if pool["metadata"].get("deletionTimestamp") or is_paused(pool):
            return None
        memory = self._memories.get(key)
        if memory is None or memory.uid != pool["metadata"]["uid"]:
            memory = self._memories[key] = PoolMemory(pool["metadata"]["uid"])
        try:
            looked = await self._look(key, pool, memory)
        except PoolBlocked as blocked:
            looked = self._blocked(key, pool, blocked)
        except PoolGone:
            return None
        await self._write(key, pool, memory, looked)
        return looked.again_in

    # -- looking and acting --------------------------------------------------------------------------------------------

    async def _look(self, key: PoolKey, pool: Object, memory: PoolMemory) -> _Looked:
        if self.schema_problem is not None:
            raise PoolBlocked(Reason.SCHEMA_OUTDATED, self.schema_problem)
        wanted = read_pool(pool, await self._referred(key, pool))
        fleet = KubernetesFleet(self._cluster, wanted, memory.fleet, self.discovered)
        snapshot = await fleet.observe()
        terms = terms_of(wanted.spec)
        decision = await self._rebalance(key, fleet, snapshot, terms, memory)
        plan = plan_pool(wanted, snapshot, None if decision is None else decision.effective)
        await fleet.apply(plan)
        before, clock = read_status(pool), self._cluster.clock()
        status = pool_status(
            wanted,
            plan.view.revision,
            {tier.name: tier.effective_percent for tier in plan.view.tiers},
            snapshot,
            before,
            self._now(),
            rebalanced=None if decision is None else last_rebalance(decision, _last(before), self._now()),
            overrides=memory.rounds.closer_look,
        )
        interval = FIGURES_SECONDS if terms.mode is RebalancingMode.OFF else terms.interval
        due = clock >= memory.figures_at + interval
        if due:
            memory.figures_at = clock
        told = () if decision is None else tuple(events.of_moves(decision.made))
        wait = self._wait(wanted, plan, snapshot, memory)
        return _Looked(status, due, min(wait, memory.figures_at + interval - clock), told)

    async def _referred(self, key: PoolKey, pool: Object) -> dict[tuple[Kind, str], Object | None]:
        """What the pool refers to, from the API server the first time; then watches keep it true."""
        store, api = self._cluster.store, self._cluster.api
        found: dict[tuple[Kind, str], Object | None] = {}
        for reference in references(pool):
            there = store.get(reference.kind, key.namespace, reference.name)
            if there is None:
                there = await api.find(reference.kind.path(key.namespace, reference.name))
                if there is not None:
                    store.put(reference.kind, there)
            found[reference.kind, reference.name] = there
        return found

    async def _rebalance(
        self, key: PoolKey, fleet: KubernetesFleet, snapshot: Snapshot, terms: Terms, memory: PoolMemory
    ) -> Decision | None:
        """The round of this interval; None where none is due."""
        clock = self._cluster.clock
        if not memory.rounds.due(terms, clock()):
            return None
        decision = memory.rounds.hold(terms, snapshot, await fleet.pages(), clock())
        self._metrics.count_decision(key, decision)
        return decision

    def _wait(self, wanted: Wanted, plan: PoolPlan, snapshot: Snapshot, memory: PoolMemory) -> float:
        replicas = snapshot.replicas
        behind = [
            replica
            for replica in replicas
            if (replica.status is None and replica.ready)
            or (replica.status is not None and replica.status.applied != plan.view.revision)
        ]
        if behind:
            memory.looks_for_acknowledgement += 1
            grown = ACKNOWLEDGED_SECONDS * 1.5 ** min(memory.looks_for_acknowledgement - 1, 20)
            return min(LONGEST_ACKNOWLEDGED_SECONDS, grown)
        memory.looks_for_acknowledgement = 0
        settled = len(replicas) == wanted.spec.replicas and all(replica.ready for replica in replicas)
        return float("inf") if settled else NOT_READY_SECONDS

    def _blocked(self, key: PoolKey, pool: Object, blocked: PoolBlocked) -> _Looked:
        pods = [pod for _, pod in self._cluster.store.of_pool(key, POD) if pod_parts.counts(pod)]
        status = blocked_status(
            pool["metadata"].get("generation", 1),
            Finding(ConditionType.STALLED, ConditionStatus.TRUE, blocked.reason, blocked.message[:4096]),
            len(pods),
            sum(pod_parts.is_ready(pod) for pod in pods),
            read_status(pool),
            self._now(),
        )
        return _Looked(status, False, BLOCKED_SECONDS)

    # -- writing it down -----------------------------------------------------------------------------------------------

    async def _write(self, key: PoolKey, pool: Object, memory: PoolMemory, looked: _Looked) -> None:
        before = read_status(pool)
        status = written_status(before, looked.status, figures_due=looked.figures_due)
        api, path = self._cluster.api, POOL.path(key.namespace, key.name)
        patch = drift.merge_patch(pool.get("status"), plain_status(status))
        if patch:
            written = await api.merge_patch(f"{path}/status", {"status": patch})
            self._cluster.store.put(POOL, written)
        ready = next((each.status for each in status.conditions if each.type == ConditionType.READY), None)
        self._metrics.set_ready(key, ready == ConditionStatus.TRUE)
        await self._tell(pool, (*looked.events, *events.of_conditions(before, status)))

    async def _tell(self, pool: Object, told: Iterable[PoolEvent]) -> None:
        """Events are for people: that one is lost is no reason to do anything twice."""
        path = EVENT.path(pool["metadata"]["namespace"])
        writes = (self._cluster.api.create(path, events.build_event(pool, event, self._now())) for event in told)
        for problem in await asyncio.gather(*writes, return_exceptions=True):
            if isinstance(problem, KubernetesError):
                log.warning("could not write an Event: %s", problem)
            elif isinstance(problem, BaseException):
                raise problem


def _last(status: CacheAwarePoolStatus | None) -> LastRebalance | None:
    return None if status is None else status.last_rebalance


def is_paused(pool: Object) -> bool:
    return bool((pool["metadata"].get("annotations") or {}).get(PAUSED) == "true")


def read_status(pool: Object) -> CacheAwarePoolStatus | None:
    """None where there is none, or one that this release cannot read and will write anew."""
    written = pool.get("status")
    if not written:
        return None
    try:
        return CacheAwarePoolStatus.model_validate(written)
    except ValidationError:
        return None


def plain_status(status: CacheAwarePoolStatus) -> Object:
    plain: Object = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return plain
