"""Integer arithmetic of quotas: percentages become blocks, blocks become words (borrowed, lent).

Nothing here knows which block is whose: it is arithmetic on counts, shared by the sidecar (a view becomes quotas of its
engine), the engine (slots, borrowed, lent) and the operator. Standard library only.

Where shares tie, the one named first wins; callers name the most important first, so a result never depends on the
order in which somebody wrote the tiers down.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from cacheaware_api import durations, wire

K = TypeVar("K", bound=Hashable)

_PUBLIC = ""  # beside the tiers' names, none of which is empty


# -- apportioning -----------------------------------------------------------------------------------------------------


def largest_remainder(total: int, weights: Mapping[K, int]) -> dict[K, int]:
    """Split `total` in proportion to `weights`; the parts sum to it exactly (to 0 where no weight is positive)."""
    _refuse_negative(total, weights)
    whole = sum(weights.values())
    if whole == 0:
        return dict.fromkeys(weights, 0)
    parts = {name: total * weight // whole for name, weight in weights.items()}
    remainders = {name: total * weight % whole for name, weight in weights.items()}
    left = total - sum(parts.values())
    for name in sorted(weights, key=lambda name: -remainders[name])[:left]:  # stable: ties go to the first named
        parts[name] += 1
    return parts


def apportion(total: int, weights: Mapping[K, int], unassigned: int = 0) -> dict[K, int]:
    """Budgets for shares: every positive one gets 1 if `total` allows, the rest goes by largest remainder.

    `unassigned` is the weight that belongs to nobody (what percentages leave of 100); it gets no first one, and it is
    not in the result: the budgets sum to `total` when it is 0. Where there is less than one for each, the largest
    shares come first.

    >>> apportion(997, {"a": 0, "b": 1, "c": 1, "d": 1000})
    {'a': 0, 'b': 2, 'c': 2, 'd': 993}
    """
    _refuse_negative(total, weights)
    if unassigned < 0:
        raise ValueError(f"the unassigned weight must not be negative, got {unassigned}")
    positive = sorted((name for name, weight in weights.items() if weight > 0), key=lambda name: -weights[name])
    first = set(positive[:total])
    nobody = object()
    rest = largest_remainder(total - len(first), {**weights, nobody: unassigned})
    return {name: rest[name] + (name in first) for name in weights}


def apportion_slots(slots: int, nominal: Mapping[K, int], unassigned: int = 0) -> dict[K, int]:
    """An engine's sequence slots, apportioned like nominal blocks; what they leave is lent to anyone.

    `nominal` is in blocks (or percent), `unassigned` what no tier owns in the same unit. Raises ValueError where a tier
    with a nominal quota would get no slot: it could then never be sure to run.
    """
    owners = sum(blocks > 0 for blocks in nominal.values())
    if owners > slots:
        raise ValueError(
            f"{owners} tiers have a nominal quota and the engine runs only {slots} sequences at once: "
            f"raise --max-num-seqs to at least {owners}, or give fewer tiers a nominal quota"
        )
    return apportion(slots, nominal, unassigned)


def _refuse_negative(total: int, weights: Mapping[K, int]) -> None:
    if total < 0:
        raise ValueError(f"cannot apportion {total}: it must not be negative")
    for name, weight in weights.items():
        if weight < 0:
            raise ValueError(f"the weight of {name} must not be negative, got {weight}")


# -- percent to blocks ------------------------------------------------------------------------------------------------


def limit_blocks(capacity: int, nominal: int, nominal_percent: int, borrowing_limit_percent: int | None) -> int:
    """Most blocks a tier may use: its nominal and what it may borrow. Absent, or reaching 100 percent: no limit."""
    if borrowing_limit_percent is None or nominal_percent + borrowing_limit_percent >= 100:
        return capacity
    return min(capacity, nominal + capacity * borrowing_limit_percent // 100)


def lending_blocks(capacity: int, nominal: int, nominal_percent: int, lending_limit_percent: int | None) -> int:
    """How much of a tier's nominal others may be admitted into while it is idle. Absent: all of it."""
    if lending_limit_percent is None or lending_limit_percent >= nominal_percent:
        return nominal
    return min(nominal, capacity * lending_limit_percent // 100)


def quotas_for(view: wire.View, capacity: int) -> wire.Quotas:
    """The quotas in blocks that `view` means for an engine of `capacity` blocks.

    Raises `wire.WireError` for a view whose percentages exceed 100 or that has a duration which is none.
    """
    by_importance = sorted(view.tiers, key=lambda tier: (-tier.priority, tier.name))
    nominal_percent = {tier.name: tier.quota.nominal_percent for tier in by_importance}
    effective_percent = {tier.name: tier.effective_percent for tier in by_importance}
    nominal = apportion(  # the public share is last in ties
        capacity,
        {**nominal_percent, _PUBLIC: view.public_percent},
        _unassigned(view, nominal_percent, "nominalPercent"),
    )
    public = nominal[_PUBLIC]
    unassigned = _unassigned(view, effective_percent, "effectivePercent")
    if effective_percent == nominal_percent:
        effective = {name: nominal[name] for name in nominal_percent}
    else:  # the public share never moves, so what the tiers share is what it leaves
        effective = apportion(capacity - public, effective_percent, unassigned)
    return wire.Quotas(
        revision=view.revision,
        tiers=tuple(
            wire.TierQuota(
                name=tier.name,
                priority=tier.priority,
                weight=tier.weight,
                nominal=nominal[tier.name],
                effective=effective[tier.name],
                limit=limit_blocks(
                    capacity, nominal[tier.name], tier.quota.nominal_percent, tier.quota.borrowing_limit_percent
                ),
                lending=lending_blocks(
                    capacity, nominal[tier.name], tier.quota.nominal_percent, tier.quota.lending_limit_percent
                ),
                retention_s=_seconds(tier.retention, f"tiers.{tier.name}.retention"),
                time_per_output_token_s=_seconds(
                    tier.sla.time_per_output_token, f"tiers.{tier.name}.sla.timePerOutputToken"
                ),
            )
            for tier in view.tiers
        ),
        public=public,
    )


def _unassigned(view: wire.View, percent: Mapping[str, int], field: str) -> int:
    for name, value in {**percent, "publicPercent": view.public_percent}.items():
        if value < 0:
            raise wire.WireError("tiers", f"the percentages of {name} must not be negative, got {value}")
    assigned = sum(percent.values()) + view.public_percent
    if assigned > 100:
        raise wire.WireError("tiers", f"{field} plus publicPercent is {assigned}, more than 100: lower one of them")
    return 100 - assigned


def _seconds(duration: str | None, path: str) -> float | None:
    if duration is None:
        return None
    try:
        return durations.seconds(duration)
    except durations.DurationError as error:
        raise wire.WireError(path, str(error)) from None


# -- words of the ledger ----------------------------------------------------------------------------------------------


def borrowed_blocks(used: int, nominal: int) -> int:
    """What a tier uses beyond its nominal."""
    return max(0, used - nominal)


def lent_blocks(used: Mapping[K, int], nominal: Mapping[K, int], *, unassigned: int, public_idle: int) -> dict[K, int]:
    """What each tier has lent: borrowed blocks that neither unassigned nor idle public blocks can explain.

    They are spread over the tiers that use less than their nominal, in proportion to what each leaves idle, and none
    lends more than that. `used` names every tier; one that is missing in `nominal` has none.
    """
    borrowed = sum(borrowed_blocks(blocks, nominal.get(name, 0)) for name, blocks in used.items())
    idle = {name: max(0, nominal.get(name, 0) - blocks) for name, blocks in used.items()}
    lent = max(0, borrowed - unassigned - public_idle)
    return largest_remainder(min(lent, sum(idle.values())), idle)
