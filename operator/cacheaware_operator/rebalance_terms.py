"""What a spec allows the rebalancer: bounds of every tier's share, and how calm it must be. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cacheaware_api import durations
from cacheaware_api.defaults import RebalancingMode
from cacheaware_api.v1alpha1 import CacheAwarePoolSpec, Tier


@dataclass(frozen=True, slots=True)
class TierTerms:
    """Whole percent of every replica's cache. `guaranteed` is what is not lent of nominal; `limit` what may be used."""

    name: str
    weight: int
    nominal: int
    guaranteed: int
    limit: int
    time_to_first_token: float | None = None  # seconds promised

    def __post_init__(self) -> None:
        if not 0 <= self.guaranteed <= self.nominal <= self.limit <= 100:
            bounds = f"guaranteed {self.guaranteed} ≤ nominal {self.nominal} ≤ limit {self.limit}"
            raise ValueError(f"tier {self.name}: {bounds} ≤ 100 must hold")


@dataclass(frozen=True, slots=True)
class Terms:
    mode: RebalancingMode
    interval: float  # seconds
    max_step_percent: int
    min_gain_percent: int
    tiers: tuple[TierTerms, ...]

    @property
    def nominal(self) -> dict[str, int]:
        return {tier.name: tier.nominal for tier in self.tiers}

    @property
    def total(self) -> int:
        """What the tiers have to share. The public share never moves, and what nobody was given stays with nobody."""
        return sum(tier.nominal for tier in self.tiers)


def terms_of(spec: CacheAwarePoolSpec) -> Terms:
    section = spec.effective_rebalancing
    return Terms(
        mode=section.mode,
        interval=durations.seconds(section.interval),
        max_step_percent=section.max_step_percent,
        min_gain_percent=section.min_gain_percent,
        # By importance: where two tiers are equal, the more important one is served first.
        tiers=tuple(
            _tier_terms(tier, 100 - spec.public_percent)
            for tier in sorted(spec.tiers, key=lambda tier: (-tier.priority, tier.name))
        ),
    )


def _tier_terms(tier: Tier, most: int) -> TierTerms:
    quota = tier.quota
    lending, borrowing = quota.lending_limit_percent, quota.borrowing_limit_percent
    promised = tier.sla.time_to_first_token
    return TierTerms(
        name=tier.name,
        weight=tier.weight,
        nominal=quota.nominal_percent,
        guaranteed=0 if lending is None else max(0, quota.nominal_percent - lending),
        limit=most if borrowing is None else min(most, quota.nominal_percent + borrowing),
        time_to_first_token=None if promised is None else durations.seconds(promised),
    )


def fitted(shares: Mapping[str, int], terms: Terms) -> dict[str, int]:
    """Shares brought within the terms: every tier within its bounds, all of them exactly what there is to share.

    What is too much or too little is taken where shares are furthest from nominal, so that they end up closer to it.
    """
    result = {
        tier.name: min(tier.limit, max(tier.guaranteed, shares.get(tier.name, tier.nominal))) for tier in terms.tiers
    }
    while missing := terms.total - sum(result.values()):
        step = 1 if missing > 0 else -1
        # Nominal is within the bounds and sums to the total, so somebody is on the wrong side of it.
        furthest = max(terms.tiers, key=lambda tier: step * (tier.nominal - result[tier.name]))
        result[furthest.name] += step
    return result
