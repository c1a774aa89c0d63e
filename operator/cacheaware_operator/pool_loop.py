"""The one loop over all pools: what changed is queued, workers look at one pool each, lists catch what watches missed.

A pool is never looked at twice at the same time; changes that come together are one look. What a look does is in
`pool_pass.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NoReturn

from cacheaware_operator.cluster.names import POOL_LABEL
from cacheaware_operator.cluster.objects import Discovered, OptionalKind
from cacheaware_operator.cluster_store import ObjectKey, PoolKey, key_of, pool_of
from cacheaware_operator.errors import KubernetesError
from cacheaware_operator.kinds import OPTIONAL, POD, POOL, Kind, Object, owned_kinds
from cacheaware_operator.kubernetes_fleet import Cluster
from cacheaware_operator.metrics import Metrics
from cacheaware_operator.pool_pass import PoolPass
from cacheaware_operator.references import references
from cacheaware_operator.schema_check import openapi_path, schema_problem
from cacheaware_operator.work_queue import WorkQueue

log = logging.getLogger(__name__)

WORKERS = 16  # pools that are looked at at the same time; most of a look is waiting for sidecars
CHILD_DELAY = 0.3  # seconds: a rollout is many changes at once


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between what the loop does without being told."""

    lists: float = 300.0
    crd: float = 2.0  # until it is installed; its schema is published a second after it
    schema: float = 15.0  # between two looks at one that is not as it should be


PACE = Pace()


class PoolLoop:
    """`namespaces`: empty for the whole cluster."""

    def __init__(
        self,
        cluster: Cluster,
        look: PoolPass,
        metrics: Metrics,
        namespaces: Collection[str],
        clock: Callable[[], float],
        pace: Pace = PACE,
    ) -> None:
        self._pace = pace
        self._cluster = cluster
        self._look = look
        self._metrics = metrics
        self._scopes: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._clock = clock
        self._queue: WorkQueue[PoolKey] = WorkQueue(clock)
        self._references: dict[PoolKey, frozenset[ObjectKey]] = {}
        self._users: dict[ObjectKey, set[PoolKey]] = {}

    # -- what watches tell ---------------------------------------------------------------------------------------------

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """All that is to be watched, once `prepare` has seen what there is."""
        return (POOL, POD, *owned_kinds(self._look.discovered.kinds))

    def saw(self, kind: Kind, written: Object, *, gone: bool) -> None:
        """Take in a change; whatever does not concern a pool is passed over."""
        store, pool = self._cluster.store, pool_of(kind, written)
        if pool is not None:
            news = store.remove(kind, written) if gone else store.put(kind, written)
            if kind == POOL:
                self._note_references(pool, None if gone else written)
            if news:
                self._queue.add(pool, 0.0 if kind == POOL else CHILD_DELAY)
        key = key_of(kind, written)
        for user in self._users.get(key, ()):
            if gone:
                store.remove(kind, written)
            else:
                store.put(kind, written)
            self._queue.add(user)

    def _note_references(self, pool: PoolKey, written: Object | None) -> None:
        before = self._references.pop(pool, frozenset())
        now = (
            frozenset[ObjectKey]()
            if written is None
            else frozenset(ObjectKey(each.kind, pool.namespace, each.name) for each in references(written))
        )
        if now:
            self._references[pool] = now
        for key in before - now:
            self._users[key].discard(pool)
            if not self._users[key]:
                del self._users[key]
                known = self._cluster.store.get(key.kind, key.namespace, key.name)
                if known is not None and pool_of(key.kind, known) is None:
                    self._cluster.store.drop(key.kind, key.namespace, key.name)  # nobody reads it any more
        for key in now - before:
            self._users.setdefault(key, set()).add(pool)

    # -- running -------------------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Wait for a CRD, then read everything there is: a look that knows half of it would write nonsense."""
        document = await self._cluster.api.find(openapi_path())
        if document is None:
            log.warning("%s", schema_problem(None))
        while document is None:
            await asyncio.sleep(self._pace.crd)
            document = await self._cluster.api.find(openapi_path())
        self._judge(schema_problem(document))
        await self._discover()
        await self._resync()

    async def run(self) -> NoReturn:
        """Until cancelled. Whatever goes wrong with one pool is logged, and tried again later and later."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(WORKERS):
                tasks.create_task(self._work())
            tasks.create_task(self._resync_for_ever())
            tasks.create_task(self._check_schema_for_ever())
        raise AssertionError("its tasks never end by themselves")

    async def _work(self) -> NoReturn:
        while True:
            key = await self._queue.get()
            began = self._clock()
            try:
                again_in = await self._look.run(key)
            except KubernetesError as error:
                log.warning("pool %s: %s; again in %.0f s", key, error, self._queue.failed(key))
            except Exception:
                log.exception("pool %s: a fault of the operator; again in %.0f s", key, self._queue.failed(key))
            else:
                self._queue.done(key, again_in)
            self._metrics.count_pass(self._clock() - began)

    async def _resync_for_ever(self) -> NoReturn:
        while True:
            await asyncio.sleep(self._pace.lists)
            try:
                await self._resync()
            except KubernetesError as error:
                log.warning("could not list everything: %s; again in %.0f s", error, self._pace.lists)

    async def _resync(self) -> None:
        """What watches may have missed: a silent one, or what was deleted while one was broken."""
        store, api = self._cluster.store, self._cluster.api
        for scope in self._scopes:
            for kind in self.kinds:
                listed = await api.list(kind, scope, "" if kind == POOL else POOL_LABEL)
                told = store.replace(kind, scope, listed.items, listed.version)
                if kind == POOL:
                    for pool in listed.items:
                        self._note_references(PoolKey(pool["metadata"]["namespace"], pool["metadata"]["name"]), pool)
                for key in told:
                    self._queue.add(key)
        await self._reread_references()
        self._cluster.sidecars.keep_only({pod["metadata"]["uid"] for pod in store.all(POD)})

    async def _reread_references(self) -> None:
        for key in list(self._users):
            there = await self._cluster.api.find(key.kind.path(key.namespace, key.name))
            if there is None:
                self._cluster.store.drop(key.kind, key.namespace, key.name)
            elif not self._cluster.store.put(key.kind, there):
                continue
            for user in self._users.get(key, ()):
                self._queue.add(user)

    async def _check_schema_for_ever(self) -> NoReturn:
        while True:
            await asyncio.sleep(self._pace.schema if self._look.schema_problem else self._pace.lists)
            try:
                self._judge(schema_problem(await self._cluster.api.find(openapi_path())))
            except KubernetesError as error:
                log.warning("could not read the installed schema: %s", error)

    def _judge(self, problem: str | None) -> None:
        if problem == self._look.schema_problem:
            return
        if problem is not None:
            log.error("%s", problem)
        self._look.schema_problem = problem
        for pool in self._cluster.store.all(POOL):
            self._queue.add(PoolKey(pool["metadata"]["namespace"], pool["metadata"]["name"]))

    async def _discover(self) -> None:
        """Which optional kinds there are. One that is installed later is found by the next start."""
        found: set[OptionalKind] = set()
        for name, kind in OPTIONAL.items():
            resources = await self._cluster.api.find(f"/apis/{kind.group}/{kind.version}")
            if any(each["name"] == kind.plural for each in (resources or {}).get("resources", ())):
                found.add(name)
        self._look.discovered = Discovered(frozenset(found))
