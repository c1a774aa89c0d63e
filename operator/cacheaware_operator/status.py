"""From what is wanted and what was observed to the pool's status. Pure.

Its figures are made in `status_figures.py`, its conditions in `status_conditions.py`; here they become one status, and
what of it is worth writing now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from cacheaware_api import wire
from cacheaware_api.conditions import ConditionStatus, ConditionType, Reason
from cacheaware_api.status import CacheAwarePoolStatus, Condition, LastRebalance, TierStatus
from cacheaware_operator.fleet import Snapshot
from cacheaware_operator.plan import Wanted
from cacheaware_operator.status_conditions import Finding, findings
from cacheaware_operator.status_figures import replica_capacity, rounded, tier_status, weighted_mean

POOL_LABEL = "cacheaware.dev/pool"
_LONGEST_MESSAGE = 4096  # as the CRD has it


def pool_status(
    wanted: Wanted,
    revision: wire.Revision,
    effective_percent: Mapping[str, int],
    snapshot: Snapshot,
    previous: CacheAwarePoolStatus | None,
    now: datetime,
    *,
    rebalanced: LastRebalance | None = None,
    overrides: Sequence[Finding] = (),
) -> CacheAwarePoolStatus:
    """The status that the object carries. `revision` and `effective_percent` are those of the view that was handed out;
    `previous` keeps the times at which conditions changed. `rebalanced` is what has just moved; `overrides` are
    findings of somebody who looked closer, in place of those derived here.
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
        last_rebalance=rebalanced or (previous.last_rebalance if previous is not None else None),
        conditions=_conditions(
            _overridden(findings(wanted, revision, snapshot), overrides), wanted.generation, previous, now
        ),
    )


def blocked_status(
    generation: int,
    stalled: Finding,
    replicas: int,
    ready: int,
    previous: CacheAwarePoolStatus | None,
    now: datetime,
) -> CacheAwarePoolStatus:
    """The status of a pool that cannot be as it is wanted: what it was before still runs, and still has its figures."""
    said = {condition.type: condition for condition in (previous.conditions if previous is not None else ())}
    if 0 < replicas == ready:
        still = Finding(ConditionType.READY, ConditionStatus.TRUE, Reason.ALL_REPLICAS_READY, "as it was before")
    else:
        still = Finding(ConditionType.READY, ConditionStatus.FALSE, stalled.reason, stalled.message)
    found = [still, stalled]
    found += [
        Finding(ConditionType(each.type), each.status, each.reason, each.message)
        for each in said.values()
        if each.type not in (ConditionType.READY, ConditionType.RECONCILING, ConditionType.STALLED)
    ]
    return (previous or CacheAwarePoolStatus()).model_copy(
        update={
            "observed_generation": generation,
            "replicas": replicas,
            "ready_replicas": ready,
            "conditions": _conditions(found, generation, previous, now),
        }
    )


def written_status(
    written: CacheAwarePoolStatus | None, current: CacheAwarePoolStatus, *, figures_due: bool
) -> CacheAwarePoolStatus:
    """What to write now: figures once an interval, everything that was decided or that changed a condition at once.

    Equal to `written` when nothing is worth a write, so that watchers are not flooded by figures that tremble. What is
    written anyway has the newest figures in it.
    """
    if written is None or figures_due:
        return current
    without_news = current.model_copy(
        update={
            "hit_percent": written.hit_percent,
            "tiers": tuple(_keep_figures(tier, written.tiers) for tier in current.tiers),
            "conditions": tuple(_keep_message(condition, written.conditions) for condition in current.conditions),
        }
    )
    return written if without_news == written else current


def _overridden(found: list[Finding], overrides: Sequence[Finding]) -> list[Finding]:
    closer = {finding.type: finding for finding in overrides}
    return [closer.get(finding.type, finding) for finding in found]


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
            message=finding.message[:_LONGEST_MESSAGE],
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
    if old is None or all(getattr(old, name) is None for name in _FIGURES):
        return tier  # the first figures are written at once
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
