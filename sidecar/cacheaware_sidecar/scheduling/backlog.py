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
class _Sum:
    requests: int = 0
    seconds: float = 0.0

    def add(self, requests: int, seconds: float) -> None:
        self.requests += requests
        self.seconds = self.seconds + seconds if self.requests else 0.0  # rounding errors do not outlive the last one


class Backlog:
    def __init__(self) -> None:
        self._requests: dict[str, tuple[str, str, float]] = {}
        self._arrived: dict[str, dict[str, float]] = {}  # by tier, in the order of arrival
        self._tenants: dict[str, dict[str, _Sum]] = {}
        self._tiers: dict[str, _Sum] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str, tier: str, tenant: str, arrived: float, seconds: float) -> None:
        self._requests[request_id] = (tier, tenant, seconds)
        tenants = self._tenants.get(tier)
        if tenants is None:
            tenants = self._tenants[tier] = {}
            self._arrived[tier], self._tiers[tier] = {}, _Sum()
        of_tenant = tenants.get(tenant)
        if of_tenant is None:
            of_tenant = tenants[tenant] = _Sum()
        self._arrived[tier][request_id] = arrived
        self._tiers[tier].add(1, seconds)
        of_tenant.add(1, seconds)

    def remove(self, request_id: str) -> None:
        tier, tenant, seconds = self._requests.pop(request_id)
        tenants = self._tenants[tier]
        self._tiers[tier].add(-1, -seconds)
        tenants[tenant].add(-1, -seconds)
        if not tenants[tenant].requests:
            del tenants[tenant]
        del self._arrived[tier][request_id]
        if not tenants:
            del self._tenants[tier], self._tiers[tier], self._arrived[tier]

    def oldest(self, tier: str) -> float | None:
        """When the longest waiting request of a tier arrived."""
        return next(iter(self._arrived[tier].values())) if tier in self._arrived else None

    def ahead(self, tier: str, tenant: str, weights: Mapping[str, int]) -> Ahead:
        """Of its own tenant everything, as equal deadlines keep the order of arrival; of every other share as much as
        that share gets while its own is served, and never more than waits.
        """
        tenants = self._tenants.get(tier, {})
        own = tenants.get(tenant, _Sum())
        others = len(tenants.keys() | {tenant})
        in_tier = self._tiers.get(tier, _Sum())
        weight = {name: weights.get(name, 1) for name in self._tiers.keys() | {tier}}
        times = sum(weight.values()) / weight[tier]
        all_requests = sum(one.requests for one in self._tiers.values())
        all_seconds = sum(one.seconds for one in self._tiers.values())
        return Ahead(
            min(all_requests, min(in_tier.requests, own.requests * others) * times),
            min(all_seconds, min(in_tier.seconds, own.seconds * others) * times),
        )
