"""The order of waiting requests: weighted shares, then deadlines, then priority. Pure; it is told the time.

Each tier has an account of the engine work it was given, divided by its weight, and each tenant one inside its tier.
The share that got least goes next; inside a tenant the request whose first token is due first goes next. So backlogged
tiers get work in the ratio of their weights, whatever they ask for, and a share that was away neither saves up work nor
owes any.

A request past half of its time to first token goes before all others, in the order of deadlines. What it takes is
charged like anything else, and a share may run at most `urgency_credit` ahead of the least served one: a tier whose
promises are too tight for its load would otherwise own the engine.

Picking is O(tiers + waiting tenants), pushing and removing O(log n) comparisons.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

from cacheaware_sidecar.block_budget import Demand

URGENCY_CREDIT = 8192.0  # tokens of engine work over weight: a few requests


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """What the order needs to know of a tier."""

    weight: int = 1
    priority: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for the engine. Times are seconds of the caller's clock."""

    id: str
    tier: str
    tenant: str
    arrived: float
    cost: float  # expected engine work: tokens to compute, prompt and output
    deadline: float | None = None  # when its first token is due; None: nothing was promised
    sequences: int = 1
    size: int = 0  # bytes that it holds while it waits
    demand: Demand | None = None  # of KV blocks, where admission goes by estimate

    @property
    def urgent_at(self) -> float:
        return math.inf if self.deadline is None else self.arrived + (self.deadline - self.arrived) / 2


_Entry = tuple[float, float, int, Waiting]  # deadline, arrival, number: unique before the request is compared


@dataclasses.dataclass(slots=True)
class _Tenant:
    served: float
    entries: list[_Entry] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class _Tier:
    terms: Terms
    served: float
    started: float = 0.0  # account of the least served waiting tenant, as of the last pick: where newcomers start
    waiting: int = 0
    tenants: dict[str, _Tenant] = dataclasses.field(default_factory=dict)

    def backlogged(self) -> Iterator[_Tenant]:
        return (tenant for tenant in self.tenants.values() if tenant.entries)


class FairQueue:
    def __init__(self, urgency_credit: float = URGENCY_CREDIT) -> None:
        self._credit = urgency_credit
        self._tiers: dict[str, _Tier] = {}
        self._entries: dict[str, _Entry] = {}
        self._started = 0.0
        self._number = 0
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    @property
    def bytes(self) -> int:
        """What the waiting requests hold."""
        return self._bytes

    def waiting(self, tier: str) -> int:
        known = self._tiers.get(tier)
        return 0 if known is None else known.waiting

    def oldest(self, tier: str) -> float | None:
        """When the longest waiting request of a tier arrived."""
        known = self._tiers.get(tier)
        if known is None or not known.waiting:
            return None
        return min(entry[1] for tenant in known.backlogged() for entry in tenant.entries)

    def set_terms(self, terms: Mapping[str, Terms]) -> None:
        """New weights and priorities. A tier that is gone keeps its old ones until its last request has left."""
        for name, tier in list(self._tiers.items()):
            if name in terms:
                tier.terms = terms[name]
            elif not tier.waiting:
                del self._tiers[name]
        for name in terms.keys() - self._tiers.keys():
            self._tiers[name] = _Tier(terms[name], self._started)

    def push(self, request: Waiting) -> None:
        if request.id in self._entries:
            raise ValueError(f"request {request.id} waits already")
        tier = self._tiers.setdefault(request.tier, _Tier(Terms(), self._started))
        tenant = tier.tenants.setdefault(request.tenant, _Tenant(tier.started))
        if not tier.waiting:
            tier.served = max(tier.served, self._started)
        if not tenant.entries:
            tenant.served = max(tenant.served, tier.started)
        self._number += 1
        due = math.inf if request.deadline is None else request.deadline
        entry = (due, request.arrived, self._number, request)
        bisect.insort(tenant.entries, entry)
        tier.waiting += 1
        self._entries[request.id] = entry
        self._bytes += request.size

    def remove(self, request_id: str) -> bool:
        """Take a request out; False if it does not wait here."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        request = entry[3]
        tier = self._tiers[request.tier]
        tenant = tier.tenants[request.tenant]
        del tenant.entries[bisect.bisect_left(tenant.entries, entry)]
        tier.waiting -= 1
        self._bytes -= request.size
        self._level(tier)
        return True

    def pop(
        self,
        now: float,
        eligible: Callable[[str], bool] = lambda tier: True,
        admits: Callable[[Waiting], bool] = lambda request: True,
    ) -> Waiting | None:
        """The next request among the tiers that are `eligible`; its cost is charged. None: none of those waits.

        A tier whose next request is not admitted is passed over: within a tier nobody overtakes.
        """
        tiers = {name: tier for name, tier in self._tiers.items() if tier.waiting and eligible(name)}
        while tiers:
            least = min(tier.served for tier in tiers.values())
            chosen = self._next(now, tiers, least)
            if admits(chosen):
                self._started = max(self._started, least)
                tier = tiers[chosen.tier]
                tier.started = max(tier.started, min(tenant.served for tenant in tier.backlogged()))
                self.charge(chosen.tier, chosen.tenant, chosen.cost)
                self.remove(chosen.id)
                return chosen
            del tiers[chosen.tier]
        return None

    def _next(self, now: float, tiers: Mapping[str, _Tier], least: float) -> Waiting:
        urgent = self._most_urgent(now, list(tiers.values()), least)
        if urgent is not None:
            return urgent
        _, tier = min(tiers.items(), key=lambda item: (item[1].served, -item[1].terms.priority, item[0]))
        tenant = min(tier.backlogged(), key=lambda tenant: (tenant.served, tenant.entries[0][:3]))
        return tenant.entries[0][3]

    def charge(self, tier: str, tenant: str, cost: float) -> None:
        """Add work to an account, or give some back (negative) where less was used than expected.

        Nothing is given back below the level that newcomers start at: they would be overtaken for no fault of theirs.
        """
        account = self._tiers.get(tier)
        if account is None:
            return  # the tier has left the view meanwhile
        account.served = _moved(account.served, cost / account.terms.weight, self._started)
        if tenant in account.tenants:
            share = account.tenants[tenant]
            share.served = _moved(share.served, cost, account.started)

    def _most_urgent(self, now: float, tiers: list[_Tier], least: float) -> Waiting | None:
        best: tuple[tuple[float, int, int], Waiting] | None = None
        for tier in tiers:
            if tier.served > least + self._credit:
                continue
            least_tenant = min(tenant.served for tenant in tier.backlogged())
            for tenant in tier.backlogged():
                due, _, number, request = tenant.entries[0]
                if request.urgent_at > now or tenant.served > least_tenant + self._credit:
                    continue
                rank = (due, -tier.terms.priority, number)
                if best is None or rank < best[0]:
                    best = (rank, request)
        return None if best is None else best[1]

    def _level(self, tier: _Tier) -> None:
        """Where nobody waits any more, nobody is owed: the next ones start level. Then forget tenants that are gone."""
        if not tier.waiting:
            tier.started = max(tier.started, *(tenant.served for tenant in tier.tenants.values()))
        if not self._entries:
            self._started = max(self._started, *(tier.served for tier in self._tiers.values()))
        # An idle tenant that owes nothing would start at `started` anyway. Swept now and then: O(1) amortised.
        if len(tier.tenants) < 64 or len(tier.tenants) < 2 * tier.waiting:
            return
        for name, tenant in list(tier.tenants.items()):
            if not tenant.entries and tenant.served <= tier.started:
                del tier.tenants[name]


def _moved(served: float, by: float, floor: float) -> float:
    return served + by if by >= 0 else max(served + by, min(served, floor))
