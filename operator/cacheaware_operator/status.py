"""From what is wanted and what was observed to the pool's status. Pure.

Its figures are made in `status_figures.py`, its conditions in `status_conditions.py`; here they become one status, and
what of it is worth writing now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from cacheaware_api import wire
from cacheaware_api.status import CacheAwarePoolStatus, Condition, TierStatus
from cacheaware_operator.fleet import Snapshot
from cacheaware_operator.plan import Wanted
from cacheaware_operator.status_conditions import Finding, findings
from cacheaware_operator.status_figures import replica_capacity, rounded, tier_status, weighted_mean

POOL_LABEL = "cacheaware.dev/pool"


def pool_status(
    wanted: Wanted,
    revision: wire.Revision,
    effective_percent: Mapping[str, int],
    snapshot: Snapshot,
    previous: CacheAwarePoolStatus | None,
    now: datetime,
) -> CacheAwarePoolStatus:
    """The status that the object carries. `revision` and `effective_percent` are those of the view that was handed out;
    `previous` keeps the times at which conditions changed.
    """
    answers = [replica.status for replica in snapshot.replicas if replica.ready and replica.status is not None]
    figures = [each for answer in answers for each in answer.tiers.values()]
    return CacheAwarePoolStatus(
        observed_generation=wanted.generation,
        replicas=len(snapshot.replicas),
        ready_replicas=sum(replica.ready for replica in snapshot.replicas),
        selector=f"{POOL_LABEL}={wanted.name}",
        capacity=replica_capacity(answers),
        revision=revision.number,
        tier_count=len(wanted.spec.tiers),
        hit_percent=rounded(weighted_mean(figures, lambda figure: figure.hit_percent)),
        tiers=tuple(
            tier_status(tier.name, tier.quota.nominal_percent, effective_percent[tier.name], answers)
            for tier in wanted.spec.tiers
        ),
        last_rebalance=previous.last_rebalance if previous is not None else None,
        conditions=_conditions(findings(wanted, revision, snapshot), wanted.generation, previous, now),
    )


def written_status(
    written: CacheAwarePoolStatus | None, current: CacheAwarePoolStatus, *, figures_due: bool
) -> CacheAwarePoolStatus:
    """What to write now: figures once an interval, everything that was decided or that changed a condition at once.

    Equal to `written` when nothing is worth a write, so that watchers are not flooded by figures that tremble.
    """
    if written is None or figures_due:
        return current
    return current.model_copy(
        update={
            "hit_percent": written.hit_percent,
            "tiers": tuple(_keep_figures(tier, written.tiers) for tier in current.tiers),
            "conditions": tuple(_keep_message(condition, written.conditions) for condition in current.conditions),
        }
    )


def _conditions(
    found: list[Finding], generation: int, previous: CacheAwarePoolStatus | None, now: datetime
) -> tuple[Condition, ...]:
    before = {condition.type: condition for condition in (previous.conditions if previous is not None else ())}
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return tuple(
        Condition(
            type=finding.type,
            status=finding.status,
            reason=finding.reason,
            message=finding.message,
            observed_generation=generation,
            last_transition_time=old.last_transition_time
            if (old := before.get(finding.type)) is not None and old.status == finding.status
            else stamp,
        )
        for finding in found
    )


_FIGURES = (
    "held_blocks",
    "cached_blocks",
    "borrowed_blocks",
    "lent_blocks",
    "hit_percent",
    "time_to_first_token_p95",
    "attainment_percent",
)


def _keep_figures(tier: TierStatus, written: Iterable[TierStatus]) -> TierStatus:
    old = next((each for each in written if each.name == tier.name), None)
    if old is None:
        return tier
    return tier.model_copy(update={name: getattr(old, name) for name in _FIGURES})


def _keep_message(condition: Condition, written: Iterable[Condition]) -> Condition:
    """A condition whose status and reason stand keeps its words: they may hold figures."""
    old = next((each for each in written if each.type == condition.type), None)
    if old is None:
        return condition
    same = (old.status, old.reason, old.observed_generation) == (
        condition.status,
        condition.reason,
        condition.observed_generation,
    )
    return old if same else condition
