"""A pool as pods: reads what is there from the store, applies what differs, tells the sidecars.

Server-side apply with our field manager, never forced. Nothing is written before it is sure that every object of our
names is ours; what others set beside our fields stays theirs; where nothing differs nothing is written. The wanted view
is in its ConfigMap before any sidecar is told, so that its number is never used twice. What is wanted is decided in
`plan.py` and built in `cluster/`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cacheaware_api import wire
from cacheaware_api.conditions import Reason
from cacheaware_operator import drift, pod_parts
from cacheaware_operator.cluster import names
from cacheaware_operator.cluster.errors import PodRefused
from cacheaware_operator.cluster.images import Images
from cacheaware_operator.cluster.internal_secret import InternalSecret
from cacheaware_operator.cluster.objects import Discovered, build_objects
from cacheaware_operator.cluster.view_file import read_view
from cacheaware_operator.cluster_store import ClusterStore, ObjectKey, PoolKey, key_of
from cacheaware_operator.drift import Applied
from cacheaware_operator.errors import ApiRefused, FieldConflict, PoolBlocked, PoolGone, Unreachable
from cacheaware_operator.fleet import ReplicaSnapshot, Snapshot
from cacheaware_operator.kinds import CONFIG_MAP, DEPLOYMENT, POD, POOL, SECRET, Kind, Object, kind_of
from cacheaware_operator.kubernetes_api import KubernetesApi
from cacheaware_operator.plan import PoolPlan, Wanted
from cacheaware_operator.readings import Page
from cacheaware_operator.sidecars import Sidecars

log = logging.getLogger(__name__)

TOLD_AGAIN_AFTER = 5.0  # seconds for an engine to acknowledge a view
CONFLICT_REST, LONGEST_CONFLICT_REST = 10.0, 60.0  # seconds between two tries at a field that is another's


@dataclass(frozen=True, slots=True)
class _Conflict:
    wanted: str  # digest
    words: str
    until: float
    tries: int


@dataclass(frozen=True, slots=True)
class _Told:
    revision: wire.Revision
    at: float
    problem: str | None  # why the sidecar refused it


@dataclass(slots=True)
class FleetMemory:
    """What is kept of one pool between two passes. All of it may be lost: then a little more is written and told."""

    applied: dict[ObjectKey, Applied] = field(default_factory=dict)
    conflicts: dict[ObjectKey, _Conflict] = field(default_factory=dict)
    told: dict[str, _Told] = field(default_factory=dict)  # by the pod's uid
    view: wire.View | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """Through what a fleet acts, the same for all pools."""

    api: KubernetesApi
    store: ClusterStore
    sidecars: Sidecars
    images: Images
    operator_namespace: str | None
    clock: Callable[[], float]


class KubernetesFleet:
    """One pool for one pass: `observe`, then `apply`. Raises `PoolBlocked` where its author or another has to act."""

    def __init__(self, cluster: Cluster, wanted: Wanted, memory: FleetMemory, discovered: Discovered) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._memory = memory
        self._discovered = discovered
        self._key = PoolKey(wanted.namespace, wanted.name)
        self._internal: InternalSecret | None = None
        self._answers: dict[str, wire.PoolStatus] = {}

    # -- Fleet -----------------------------------------------------------------------------------------------------

    async def observe(self) -> Snapshot:
        pods = self._pods()
        self._answers = await self._cluster.sidecars.statuses(pods, (await self._keys()).bearer)
        return Snapshot(
            view=await self._last_view(),
            replicas=tuple(self._replica(pod) for pod in pods),
            rollout=self._rollout(),
        )

    async def apply(self, plan: PoolPlan) -> None:
        try:
            wanted = build_objects(
                self._wanted,
                plan,
                images=self._cluster.images,
                internal=await self._keys(),
                discovered=self._discovered,
                operator_namespace=self._cluster.operator_namespace,
            )
        except PodRefused as refused:
            raise PoolBlocked(Reason.INVALID_SPEC, str(refused)) from None
        there = await self._there(wanted)
        conflicts = [words for each in wanted if (words := await self._apply_one(each, there)) is not None]
        await self._remove_what_is_left_over({key_of(kind_of(each), each) for each in wanted})
        view_file = ObjectKey(CONFIG_MAP, self._wanted.namespace, names.view_config_map(self._wanted.name))
        if view_file not in self._memory.conflicts:
            self._memory.view = plan.view
            await self._tell(plan.view)
        if conflicts:
            fix = "remove the field there, or let its manager give it up"
            raise PoolBlocked(Reason.FIELD_CONFLICT, f"{'; '.join(conflicts)}: {fix}")

    # -- for the rebalancer ------------------------------------------------------------------------------------------

    async def pages(self) -> dict[str, Page]:
        """The metrics page of every ready replica whose sidecar answers."""
        ready = [pod for pod in self._pods() if pod_parts.is_ready(pod)]
        return await self._cluster.sidecars.pages(ready, (await self._keys()).bearer)

    # -- what is there -------------------------------------------------------------------------------------------------

    async def _keys(self) -> InternalSecret:
        """Those that are there. New ones are made only where there are none: pods and callers rely on them."""
        if self._internal is None:
            secret = await self._ours(SECRET, names.internal_secret(self._wanted.name))
            self._internal = InternalSecret.completed(None if secret is None else secret.get("data"))
        return self._internal

    async def _ours(self, kind: Kind, name: str) -> Object | None:
        """An object of the pool, from the API server where the store lacks it: its label may have been removed."""
        store, namespace = self._cluster.store, self._wanted.namespace
        found = store.get(kind, namespace, name)
        if found is None:
            found = await self._cluster.api.find(kind.path(namespace, name))
        return found if found is not None and drift.is_owned_by(found, self._wanted.uid) else None

    def _pods(self) -> list[Object]:
        pods = [pod for _, pod in self._cluster.store.of_pool(self._key, POD) if pod_parts.counts(pod)]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))

    async def _last_view(self) -> wire.View | None:
        """The one with the highest number: the ConfigMap may have been deleted, or written by hand."""
        config_map = await self._ours(CONFIG_MAP, names.view_config_map(self._wanted.name))
        written = None if config_map is None else read_view(config_map.get("data"))
        views = [
            view
            for view in (written, self._memory.view)
            if view is not None and view.revision.pool_uid == self._wanted.uid
        ]
        return max(views, key=lambda view: view.revision.number, default=None)

    def _replica(self, pod: Object) -> ReplicaSnapshot:
        name, told = pod["metadata"]["name"], self._memory.told.get(pod["metadata"]["uid"])
        return ReplicaSnapshot(
            name=name,
            parts=pod_parts.parts(pod),
            ready=pod_parts.is_ready(pod),
            status=self._answers.get(name),
            problem=None if told is None else told.problem,
        )

    def _rollout(self) -> str | None:
        deployment = self._cluster.store.get(DEPLOYMENT, self._wanted.namespace, names.deployment(self._wanted.name))
        status = (deployment or {}).get("status") or {}
        old = status.get("replicas", 0) - status.get("updatedReplicas", 0)
        return f"{old} pods of an older version are being replaced" if old > 0 else None

    # -- writing -------------------------------------------------------------------------------------------------------

    async def _there(self, wanted: tuple[Object, ...]) -> dict[ObjectKey, Object]:
        """What has our names now; raises `PoolBlocked` if any of it is not ours. Nothing was written then.

        The store sees only what carries our label, so what it lacks is asked for: once, when a pool begins.
        """
        store, namespace = self._cluster.store, self._wanted.namespace
        found: dict[ObjectKey, Object] = {}
        missing: list[ObjectKey] = []
        for each in wanted:
            key = key_of(kind_of(each), each)
            known = store.get(key.kind, key.namespace, key.name)
            if known is not None:
                found[key] = known
            else:
                missing.append(key)
        if missing:
            api = self._cluster.api
            pool, *answers = await asyncio.gather(
                api.find(POOL.path(namespace, self._wanted.name)),
                *(api.find(key.kind.path(namespace, key.name)) for key in missing),
            )
            if pool is None or pool["metadata"]["uid"] != self._wanted.uid or pool["metadata"].get("deletionTimestamp"):
                raise PoolGone(str(self._key))
            found |= {key: answer for key, answer in zip(missing, answers, strict=True) if answer is not None}
        for key, known in found.items():
            if not drift.is_owned_by(known, self._wanted.uid):
                raise PoolBlocked(
                    Reason.FIELD_CONFLICT,
                    f"{key.kind} {key.name} exists and is not this pool's ({drift.owner_in_words(known)}): "
                    "delete or rename it, or give the pool another name",
                )
        return found

    async def _apply_one(self, wanted: Object, there: Mapping[ObjectKey, Object]) -> str | None:
        """Apply it where it differs; in words which field is another's, if one is."""
        memory, now = self._memory, self._cluster.clock()
        kind = kind_of(wanted)
        key = key_of(kind, wanted)
        if not drift.differs(wanted, there.get(key), memory.applied.get(key)):
            memory.conflicts.pop(key, None)
            return None
        digest, before = drift.digest(wanted), memory.conflicts.get(key)
        if before is not None and before.wanted == digest and now < before.until:
            return before.words
        try:
            answer = await self._cluster.api.apply(kind.path(key.namespace, key.name), wanted)
        except FieldConflict as conflict:
            words = ", ".join(f"{field} of {kind} {key.name} is managed by {who}" for who, field in conflict.fields)
            tries = before.tries + 1 if before is not None and before.wanted == digest else 0
            rest = min(LONGEST_CONFLICT_REST, CONFLICT_REST * 2.0 ** min(tries, 8))
            memory.conflicts[key] = _Conflict(digest, words, now + rest, tries)
            return words
        memory.conflicts.pop(key, None)
        memory.applied[key] = Applied.of(wanted, answer)
        self._cluster.store.put(kind, answer)
        return None

    async def _remove_what_is_left_over(self, wanted: set[ObjectKey]) -> None:
        """Objects of this pool that it needs no more, such as the ServiceAccount of an earlier version."""
        for key, known in self._cluster.store.of_pool(self._key):
            owned = key.kind not in (POD, POOL) and drift.is_owned_by(known, self._wanted.uid)
            if owned and key not in wanted and not known["metadata"].get("deletionTimestamp"):
                await self._remove(key, known["metadata"]["uid"])

    async def _remove(self, key: ObjectKey, uid: str) -> None:
        """That it stays harms nobody, and it may be of a kind that our rights do not let us delete."""
        try:
            await self._cluster.api.delete(key.kind.path(key.namespace, key.name), uid)
        except ApiRefused as refused:
            log.warning("%s %s of pool %s is superfluous and stays: %s", key.kind, key.name, self._key, refused)
        self._memory.applied.pop(key, None)

    # -- telling -------------------------------------------------------------------------------------------------------

    async def _tell(self, view: wire.View) -> None:
        """The mounted ConfigMap is enough for a sidecar to find the view; telling it makes it quick."""
        memory, now = self._memory, self._cluster.clock()
        pods = {pod["metadata"]["name"]: pod for pod in self._pods()}
        uids = {pod["metadata"]["uid"] for pod in pods.values()}
        memory.told = {uid: told for uid, told in memory.told.items() if uid in uids}
        behind = [
            pod
            for name, pod in pods.items()
            if (answer := self._answers.get(name)) is not None
            and answer.applied != view.revision
            and not self._was_told(pod, view, now)
        ]
        for name, problem in (await self._cluster.sidecars.put_view(behind, (await self._keys()).bearer, view)).items():
            if not isinstance(problem, Unreachable):
                words = None if problem is None else str(problem)
                memory.told[pods[name]["metadata"]["uid"]] = _Told(view.revision, now, words)

    def _was_told(self, pod: Object, view: wire.View, now: float) -> bool:
        told = self._memory.told.get(pod["metadata"]["uid"])
        return told is not None and told.revision == view.revision and now - told.at < TOLD_AGAIN_AFTER
