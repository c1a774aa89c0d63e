"""From what is wanted and what runs to what is to be made true. Pure: any fleet can apply the plan.

`Wanted` is a valid object with everything it refers to resolved. What an edit of it means for a running pool is in
`changes.py`; command lines are in `commands.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from cacheaware_api import wire
from cacheaware_api.objects import PoolFile
from cacheaware_api.v1alpha1 import CacheAwarePoolSpec, EngineType, KVCacheDtype
from cacheaware_operator.fleet import Snapshot
from cacheaware_operator.view import build_view, shares_in_force


@dataclass(frozen=True, slots=True)
class Wanted:
    """One version of a pool object, with the Secrets and ConfigMaps it names already read."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: CacheAwarePoolSpec
    api_keys: wire.ApiKeys = field(default_factory=lambda: wire.ApiKeys(()))
    prefix_texts: Mapping[str, str] = field(default_factory=dict)  # by the prefix's name

    @classmethod
    def from_file(cls, file: PoolFile, *, uid: str, generation: int) -> Wanted:
        return cls(
            namespace=file.namespace,
            name=file.pool.metadata.name,
            uid=uid,
            generation=generation,
            spec=file.pool.spec,
            api_keys=file.api_keys,
            prefix_texts={prefix.name: prefix.text for prefix in file.public_prefixes},
        )


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What an engine is started with. None of it can change while it runs."""

    type: EngineType
    model: str  # source, or the folder that it was fetched to
    served_model_name: str
    max_model_len: int | None
    kv_cache_memory: int | None  # bytes
    block_size: int | None
    kv_cache_dtype: KVCacheDtype
    arguments: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What is to run: so many replicas of one engine, all with one view and the same keys."""

    namespace: str
    name: str
    replicas: tuple[str, ...]  # names
    engine: EnginePlan
    view: wire.View
    api_keys: wire.ApiKeys


def plan_pool(wanted: Wanted, snapshot: Snapshot, effective: Mapping[str, int] | None = None) -> PoolPlan:
    """`effective`: the shares that rebalancing decided on just now; None: those in force stay."""
    spec = wanted.spec
    view = build_view(
        spec,
        uid=wanted.uid,
        prefix_texts=wanted.prefix_texts,
        effective_percent=shares_in_force(spec, snapshot.view) if effective is None else effective,
        previous=snapshot.view,
    )
    return PoolPlan(
        namespace=wanted.namespace,
        name=wanted.name,
        replicas=tuple(f"{wanted.name}-{number}" for number in range(spec.replicas)),
        engine=plan_engine(spec),
        view=numbered(view, snapshot),
        api_keys=wanted.api_keys,
    )


def numbered(view: wire.View, snapshot: Snapshot) -> wire.View:
    """The view with a number that no replica has seen with other content.

    Where the last view is not known any more, the replicas still refuse what is older than what they have.
    """
    uid, number = view.revision.pool_uid, view.revision.number
    seen = [
        replica.status.applied.number
        for replica in snapshot.replicas
        if replica.status is not None and replica.status.applied is not None
        if replica.status.applied.pool_uid == uid
    ]
    newest = max(seen, default=0)
    if number > newest or (number == newest and snapshot.view is not None and snapshot.view.revision.pool_uid == uid):
        return view
    return dataclasses.replace(view, revision=wire.Revision(uid, newest + 1))


def plan_engine(spec: CacheAwarePoolSpec) -> EnginePlan:
    engine = spec.engine
    return EnginePlan(
        type=engine.type,
        model=spec.model.source,
        served_model_name=spec.model.name,
        max_model_len=spec.model.max_model_len,
        kv_cache_memory=engine.kv_cache.memory_bytes,
        block_size=engine.kv_cache.block_size,
        kv_cache_dtype=engine.kv_cache.dtype,
        arguments=engine.args,
        environment={variable.name: variable.value or "" for variable in engine.env},
    )
