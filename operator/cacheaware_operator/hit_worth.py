"""What hits are worth: a tier's weight, times what computing a block costs it, times how badly it needs them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cacheaware_operator.readings import Readings
from cacheaware_operator.rebalance_terms import Terms
from cacheaware_operator.reuse_memory import Memory
from cacheaware_operator.share_search import Worth, total_worth

SLA_RATE = 0.1  # how fast a missed promise makes a tier's hits worth more
LEAST_URGENCY, MOST_URGENCY = 0.5, 4.0


@dataclass(frozen=True, slots=True)
class HitWorth:
    worth: Worth  # by tier, of the hits with 0, 1, … 100 percent of the cache
    parts: Mapping[str, float]  # each tier's part of all weighted references
    everything: float  # the worth of hitting every reference

    def percent(self, gain: float) -> float:
        return 100 * gain / self.everything

    def gain_percent(self, current: Mapping[str, int], target: Mapping[str, int]) -> float:
        return self.percent(total_worth(self.worth, target) - total_worth(self.worth, current))


def hit_worth(memory: Memory, urgency: Mapping[str, float], terms: Terms) -> HitWorth:
    """To be asked only once some tier has references."""
    # A tier whose cost is not known costs what the others do on average.
    cost = {tier.name: pace for tier in terms.tiers if (pace := memory.prefill_seconds_per_block(tier.name))}
    typical = sum(cost.values()) / len(cost) if cost else 1.0
    factor = {
        tier.name: tier.weight * urgency.get(tier.name, 1.0) * cost.get(tier.name, typical) for tier in terms.tiers
    }
    whole = {name: memory.references(name) * factor[name] for name in factor}
    everything = sum(whole.values())
    return HitWorth(
        {name: [hits * factor[name] for hits in memory.hits(name)] for name in factor},
        {name: each / everything for name, each in whole.items()},
        everything,
    )


def urgency(before: Mapping[str, float], readings: Readings, terms: Terms) -> dict[str, float]:
    """What each tier's weight is multiplied by: more and more while it misses its promise, less while it keeps it
    easily, within bounds; 1 where nothing was promised (RobinHood's feedback).
    """
    result = {}
    for tier in terms.tiers:
        factor, p95 = before.get(tier.name, 1.0), _first_token_p95(tier.name, readings)
        if not tier.time_to_first_token:
            factor = 1.0
        elif p95 is not None:
            factor *= 1 + SLA_RATE * (p95 / tier.time_to_first_token - 1)
        result[tier.name] = min(MOST_URGENCY, max(LEAST_URGENCY, factor))
    return result


def _first_token_p95(tier: str, readings: Readings) -> float | None:
    """Over replicas, each by its requests: one that struggles alone is not helped by quota."""
    seen = [
        (figures.requests, figures.time_to_first_token_p95)
        for reading in readings.replicas
        if (figures := reading.tiers.get(tier)) is not None and figures.time_to_first_token_p95 is not None
    ]
    requests = sum(count for count, _ in seen)
    return sum(count * p95 for count, p95 in seen) / requests if requests else None
