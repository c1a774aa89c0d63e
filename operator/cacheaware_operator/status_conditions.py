"""Which conditions a pool is in, why, and what to do about it. Pure.

What a sidecar reports of a condition counts before what is derived here: it sees what only its engine can tell. Of
several replicas the worst counts. `Reconciling` and `Stalled` are there only while they are True (kstatus).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cacheaware_api import wire
from cacheaware_api.conditions import ConditionStatus, ConditionType, Reason
from cacheaware_operator.fleet import PartState, ReplicaSnapshot, Snapshot
from cacheaware_operator.plan import Wanted
from cacheaware_operator.status_figures import weighted_mean

_TRUE, _FALSE, _UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN
CRASH_LOOP = 5  # exits in a row, without a minute of health between them
ENOUGH_REQUESTS = 20  # without a single hit, before that is called a fault


@dataclass(frozen=True, slots=True)
class Finding:
    type: ConditionType
    status: ConditionStatus
    reason: str
    message: str = ""


def findings(wanted: Wanted, revision: wire.Revision, snapshot: Snapshot) -> list[Finding]:
    """Every condition of the pool, in the order in which people should read them."""
    answered = [replica for replica in snapshot.replicas if replica.status is not None]
    found = [_ready(wanted, snapshot)]
    # One of the two: kstatus takes an object that is reconciling for one that may still become ready.
    abnormal = _stalled(snapshot) or _reconciling(wanted, revision, snapshot)
    found += [abnormal] if abnormal is not None else []
    derived = (
        _quota_enforced(answered),
        _identity_enforced(wanted, answered),
        _metrics_fresh(snapshot),
        _sla_met(wanted, answered),
        _prefix_caching_effective(answered),
        _public_prefixes_resident(wanted, answered),
    )
    return found + [_reported(each.type, answered) or each for each in derived]


def _reported(type_: ConditionType, answered: list[ReplicaSnapshot]) -> Finding | None:
    """What the sidecars themselves say, the worst first; None if none says anything."""
    said = [
        (replica.name, condition)
        for replica in answered
        if replica.status is not None
        for condition in replica.status.conditions
        if condition.type == type_
    ]
    for status in (_FALSE, _UNKNOWN, _TRUE):
        for name, condition in said:
            if condition.status == status:
                message = f"{name}: {condition.message}" if condition.message else ""
                return Finding(type_, status, condition.reason, message)
    return None


# -- Ready, Reconciling, Stalled --------------------------------------------------------------------------------------


def _ready(wanted: Wanted, snapshot: Snapshot) -> Finding:
    replicas = wanted.spec.replicas
    if replicas == 0:
        return Finding(ConditionType.READY, _TRUE, Reason.SCALED_TO_ZERO, "scaled to 0: set spec.replicas to serve")
    ready = sum(replica.ready for replica in snapshot.replicas)
    if ready >= replicas:
        return Finding(ConditionType.READY, _TRUE, Reason.ALL_REPLICAS_READY)
    whats_missing = "; ".join(_troubles(snapshot))
    message = f"{ready} of {replicas} replicas are ready" + (f"; {whats_missing}" if whats_missing else "")
    return Finding(ConditionType.READY, _FALSE, Reason.REPLICAS_NOT_READY, message)


def _troubles(snapshot: Snapshot) -> Iterator[str]:
    for replica in snapshot.replicas:
        if replica.ready:
            continue
        for part in replica.parts:
            if part.state is not PartState.READY:
                words = f" ({part.message})" if part.message else ""
                yield f"{replica.name}: the {part.name} is {part.state}{words}"


def _reconciling(wanted: Wanted, revision: wire.Revision, snapshot: Snapshot) -> Finding | None:
    parts = [(replica.name, part) for replica in snapshot.replicas for part in replica.parts]
    behind = [
        replica.name
        for replica in snapshot.replicas
        if not replica.ready or replica.status is None or replica.status.applied != revision
    ]

    def true(reason: Reason, message: str) -> Finding:
        return Finding(ConditionType.RECONCILING, _TRUE, reason, message)

    for name, part in parts:
        if part.state is PartState.RESTARTING:
            return true(Reason.RESTARTING, f"{name}: the {part.name} {part.message}")
    if snapshot.rollout is not None:
        return true(Reason.ROLLING_OUT, snapshot.rollout)
    if len(snapshot.replicas) != wanted.spec.replicas:
        return true(Reason.SCALING, f"{len(snapshot.replicas)} replicas, {wanted.spec.replicas} wanted")
    for name, part in parts:
        if part.state is PartState.STARTING:
            why = f": {part.message}" if part.message else ""
            return true(Reason.STARTING, f"{name}: the {part.name} starts{why}")
    if behind:
        return true(Reason.APPLYING_VIEW, f"revision {revision.number} is not in force yet on {', '.join(behind)}")
    return None


def _stalled(snapshot: Snapshot) -> Finding | None:
    for replica in snapshot.replicas:
        if part := replica.failed:
            look = f"; its output is in {part.log}" if part.log else ""
            message = f"{replica.name}: the {part.name} {part.message} and is not started again{look}"
            return Finding(ConditionType.STALLED, _TRUE, Reason.CRASH_LOOP, message)
        for part in replica.parts:
            if part.failures >= CRASH_LOOP:
                said = f"{replica.name}: the {part.name} ended {part.failures} times in a row; look at {part.log}"
                return Finding(ConditionType.STALLED, _TRUE, Reason.CRASH_LOOP, said)
        if replica.problem:
            return Finding(ConditionType.STALLED, _TRUE, Reason.NOT_SUPPORTED, f"{replica.name}: {replica.problem}")
        for condition in replica.status.conditions if replica.status is not None else ():
            if (condition.type, condition.reason) == (ConditionType.QUOTA_ENFORCED, Reason.QUOTA_REFUSED):
                said = f"{replica.name}: {condition.message}"
                return Finding(ConditionType.STALLED, _TRUE, Reason.QUOTA_REFUSED, said)
    return None


# -- what the tiers get -----------------------------------------------------------------------------------------------


def _not_known_yet(type_: ConditionType) -> Finding:
    return Finding(type_, _UNKNOWN, Reason.NOT_KNOWN_YET, "no replica has answered yet")


def _conditions(replica: ReplicaSnapshot) -> tuple[wire.Condition, ...]:
    return replica.status.conditions if replica.status is not None else ()


def _quota_enforced(answered: list[ReplicaSnapshot]) -> Finding:
    statuses = [replica.status for replica in answered if replica.status is not None]
    for replica in answered:
        for said in _conditions(replica):
            if said.reason == Reason.UNSUPPORTED_VERSION:
                message = f"{replica.name}: {said.message}"
                return Finding(ConditionType.QUOTA_ENFORCED, _FALSE, Reason.UNSUPPORTED_VERSION, message)
    if any(status.enforcement is wire.Enforcement.ESTIMATE_ONLY for status in statuses):
        return Finding(
            ConditionType.QUOTA_ENFORCED,
            _FALSE,
            Reason.ESTIMATE_ONLY,
            "the engine keeps no account of tiers; admission is bounded by estimate",
        )
    if not statuses or not all(status.applied is not None for status in statuses):
        return Finding(
            ConditionType.QUOTA_ENFORCED, _UNKNOWN, Reason.NOT_KNOWN_YET, "no engine has acknowledged the quotas yet"
        )
    return Finding(ConditionType.QUOTA_ENFORCED, _TRUE, Reason.ENFORCED_BY_ENGINE)


def _identity_enforced(wanted: Wanted, answered: list[ReplicaSnapshot]) -> Finding:
    kind = ConditionType.IDENTITY_ENFORCED
    if wanted.spec.identity.type is wire.IdentityType.OPEN:
        return Finding(
            kind, _FALSE, Reason.OPEN, "anyone who reaches the port may use every tier; identity.type: APIKeys asks"
        )
    if not answered:
        return _not_known_yet(kind)
    if wanted.spec.identity.type is wire.IdentityType.API_KEYS:
        return Finding(kind, _TRUE, Reason.API_KEYS)
    return Finding(kind, _TRUE, Reason.TRUSTED_HEADERS)


def _metrics_fresh(snapshot: Snapshot) -> Finding:
    silent = [replica.name for replica in snapshot.replicas if replica.status is None]
    if len(silent) == len(snapshot.replicas):
        return _not_known_yet(ConditionType.METRICS_FRESH)
    if silent:
        message = f"no figures from {', '.join(silent)}: look at the sidecar's log"
        return Finding(ConditionType.METRICS_FRESH, _FALSE, Reason.STALE, message)
    return Finding(ConditionType.METRICS_FRESH, _TRUE, Reason.FRESH)


def _sla_met(wanted: Wanted, answered: list[ReplicaSnapshot]) -> Finding:
    kind = ConditionType.SLA_MET
    promised = [tier for tier in wanted.spec.tiers if tier.sla.time_to_first_token or tier.sla.time_per_output_token]
    if not promised:
        return Finding(kind, _TRUE, Reason.NO_SLA, "no tier was promised a latency")
    missed, seen, requests = [], False, 0
    for tier in promised:
        figures = [each for replica in answered if replica.status and (each := replica.status.tiers.get(tier.name))]
        requests += sum(figure.requests for figure in figures)
        attained = weighted_mean(figures, lambda figure: figure.attainment_percent)
        if attained is None:
            continue
        seen = True
        if attained < tier.sla.attainment_percent:
            missed.append(f"{tier.name} {int(attained)} % of {tier.sla.attainment_percent} %")
    if missed:
        message = f"{', '.join(missed)}: give more quota or weight, or replicas"
        return Finding(kind, _FALSE, Reason.TIERS_MISSED, message)
    if not seen and requests:
        message = (
            f"{requests} requests in the last 5 minutes, and latencies are measured on streams only: ask to stream"
        )
        return Finding(kind, _UNKNOWN, Reason.NOT_MEASURED, message)
    if not seen:
        return Finding(kind, _UNKNOWN, Reason.NO_TRAFFIC, "no request of a tier with an SLA in the last 5 minutes")
    return Finding(kind, _TRUE, Reason.ALL_TIERS_MET)


# -- what the cache is worth ------------------------------------------------------------------------------------------


def _prefix_caching_effective(answered: list[ReplicaSnapshot]) -> Finding:
    kind = ConditionType.PREFIX_CACHING_EFFECTIVE
    figures = [each for replica in answered if replica.status for each in replica.status.tiers.values()]
    requests = sum(each.requests for each in figures)
    if any(each.hit_percent for each in figures):
        return Finding(kind, _TRUE, Reason.HITS_SEEN)
    if requests >= ENOUGH_REQUESTS:
        if told := _too_long_for_any_prompt(answered, figures):
            return Finding(kind, _FALSE, Reason.BLOCKS_TOO_LARGE, told)
        message = f"no hit in {requests} requests: put what prompts have in common at their start"
        return Finding(kind, _FALSE, Reason.NO_HITS, message)
    return Finding(kind, _UNKNOWN, Reason.NO_TRAFFIC, f"{requests} requests in the last 5 minutes, too few to tell")


def _too_long_for_any_prompt(answered: list[ReplicaSnapshot], figures: list[wire.TierFigures]) -> str | None:
    """Why nothing can be hit, if no prompt is longer than a block. One as long is not: its last token is computed."""
    blocks = [replica.status.ledger.block_size for replica in answered if replica.status and replica.status.ledger]
    prompts = [each.longest_prompt_tokens for each in figures if each.longest_prompt_tokens is not None]
    if not blocks or not prompts or max(prompts) > min(blocks):
        return None
    return (
        f"a block has {min(blocks)} tokens and the longest prompt {max(prompts)}, and only whole blocks are shared: "
        "lower engine.kvCache.blockSize where the model allows it"
    )


def _public_prefixes_resident(wanted: Wanted, answered: list[ReplicaSnapshot]) -> Finding:
    kind = ConditionType.PUBLIC_PREFIXES_RESIDENT
    names = [prefix.name for prefix in wanted.spec.public_prefixes]
    if not names:
        return Finding(kind, _TRUE, Reason.NO_PUBLIC_PREFIXES)
    ledgers = [
        (replica.name, replica.status.ledger) for replica in answered if replica.status and replica.status.ledger
    ]
    if not ledgers:
        return _not_known_yet(kind)
    missing = []
    for replica, ledger in ledgers:
        for name in names:
            prefix = ledger.public.prefixes.get(name)
            if prefix is None:
                missing.append(f"{name} is not known to {replica}")
            elif prefix.resident < prefix.blocks:
                missing.append(f"{prefix.resident} of {prefix.blocks} blocks of {name} on {replica}")
    if missing:
        return Finding(kind, _FALSE, Reason.NOT_RESIDENT, f"{'; '.join(missing)}: raise publicPercent if this stays")
    return Finding(kind, _TRUE, Reason.RESIDENT)
