"""Kubernetes Events of a pool: one for each condition that changed, one for each share that moved. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cacheaware_api.conditions import ConditionStatus, ConditionType
from cacheaware_api.status import CacheAwarePoolStatus
from cacheaware_operator.kinds import POOL, Object
from cacheaware_operator.rebalance_values import Move

COMPONENT = "cacheaware-operator"
_LONGEST = 1024  # of a message; the API server refuses longer ones
_TOLD = (
    ConditionType.READY,
    ConditionType.STALLED,
    ConditionType.QUOTA_ENFORCED,
    ConditionType.METRICS_FRESH,
    ConditionType.SLA_MET,
    ConditionType.PUBLIC_PREFIXES_RESIDENT,
)
_GOOD_WHEN_FALSE = (ConditionType.STALLED,)


@dataclass(frozen=True, slots=True)
class PoolEvent:
    warning: bool
    reason: str
    message: str


def of_conditions(before: CacheAwarePoolStatus | None, after: CacheAwarePoolStatus) -> Iterator[PoolEvent]:
    """What became good or bad. That something is not known yet is no event, and neither is the start of a pool."""
    old = {condition.type: condition for condition in (before.conditions if before is not None else ())}
    for condition in after.conditions:
        if condition.type not in _TOLD or condition.status is ConditionStatus.UNKNOWN:
            continue
        previous = old.get(condition.type)
        bad = (condition.status is ConditionStatus.FALSE) != (condition.type in _GOOD_WHEN_FALSE)
        if previous is None or previous.status is ConditionStatus.UNKNOWN:
            # False at first only says that it has begun; Stalled is there only while it is true
            worth_telling = condition.type in (ConditionType.READY, ConditionType.STALLED) and (
                condition.status is ConditionStatus.TRUE
            )
        else:
            worth_telling = (previous.status, previous.reason) != (condition.status, condition.reason)
        if worth_telling:
            what = f"{condition.type} is {condition.status}"
            yield PoolEvent(bad, condition.reason, f"{what}: {condition.message}" if condition.message else what)


def of_moves(moves: Iterable[Move]) -> Iterator[PoolEvent]:
    for move in moves:
        told = f"{move.percent} % of the cache from {move.from_} to {move.to}: {move.reason}: {move.why}"
        yield PoolEvent(False, "QuotaMoved", told)


def build_event(pool: Object, event: PoolEvent, now: datetime) -> dict[str, Any]:
    metadata, stamp = pool["metadata"], now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": f"{POOL.group}/{POOL.version}",
            "kind": POOL.kind,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        "message": event.message[:_LONGEST],
        "source": {"component": COMPONENT},
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }
