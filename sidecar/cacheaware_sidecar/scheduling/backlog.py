"""How much work waits, and how much of it goes before a newcomer: what its wait is estimated from. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Ahead:
    """What probably goes first: requests, and the seconds that the engine needs to compute their prompts."""

    requests: float = 0.0
    seconds: float = 0.0


@dataclasses.dataclass(slots=True)
class _Tenant:
    requests: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(slots=True)
class _Tier:
    arrived: dict[str, float] = dataclasses.field(default_factory=dict)  # by request, in the order of arrival
    tenants: dict[str, _Tenant] = dataclasses.field(default_factory=dict)  # of which something waits
    seconds: float = 0.0


class Backlog:
    def __init__(self) -> None:
        self._requests: dict[str, tuple[str, str, float]] = {}
        self._tiers: dict[str, _Tier] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str, tier: str, tenant: str, arrived: float, seconds: float) -> None:
        of_tier = self._tiers.get(tier)
        if of_tier is None:
            of_tier = self._tiers[tier] = _Tier()
        of_tenant = of_tier.tenants.get(tenant)
        if of_tenant is None:
            of_tenant = of_tier.tenants[tenant] = _Tenant()
        self._requests[request_id] = (tier, tenant, seconds)
        of_tier.arrived[request_id] = arrived
        of_tier.seconds += seconds
        of_tenant.requests += 1
        of_tenant.seconds += seconds

    def remove(self, request_id: str) -> None:
        tier, tenant, seconds = self._requests.pop(request_id)
        of_tier = self._tiers[tier]
        of_tenant = of_tier.tenants[tenant]
        of_tier.seconds -= seconds
        of_tenant.seconds -= seconds
        of_tenant.requests -= 1
        del of_tier.arrived[request_id]
        if not of_tenant.requests:  # so rounding errors do not outlive the last one
            del of_tier.tenants[tenant]
        if not of_tier.arrived:
            del self._tiers[tier]

    def oldest(self, tier: str) -> float | None:
        """When the longest waiting request of a tier arrived."""
        of_tier = self._tiers.get(tier)
        return None if of_tier is None else next(iter(of_tier.arrived.values()))

    def ahead(self, tier: str, tenant: str, weights: Mapping[str, int]) -> Ahead:
        """Of its own tenant everything, as equal deadlines keep the order of arrival; of every other share as much as
        that share gets while its own is served, and never more than waits.
        """
        in_tier = self._tiers.get(tier, _Tier())
        own = in_tier.tenants.get(tenant, _Tenant())
        others = len(in_tier.tenants.keys() | {tenant})
        weight = {name: weights.get(name, 1) for name in self._tiers.keys() | {tier}}
        times = sum(weight.values()) / weight[tier]
        all_requests = sum(len(each.arrived) for each in self._tiers.values())
        all_seconds = sum(each.seconds for each in self._tiers.values())
        return Ahead(
            min(all_requests, min(len(in_tier.arrived), own.requests * others) * times),
            min(all_seconds, min(in_tier.seconds, own.seconds * others) * times),
        )
