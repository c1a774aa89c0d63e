"""The order of waiting requests: weighted shares, then warm prompts and deadlines, then priority. Pure; told the time.

Each tier has an account of the engine work it was given, divided by its weight, and each tenant one inside its tier.
The share that got least goes next, so backlogged tiers get work in the ratio of their weights, whatever they ask for; a
share that was away neither saves up work nor owes any. How far a share is behind the least served one is its deficit.

Inside a tenant, the request whose first token is due first goes next. Of `run` picks, all but one may go instead to the
request of which most is cached (`warmth`), among the `lookahead` first ones: the prefix is read while it is there.

A request past half of its time to first token is urgent until it is late. The one due first goes before the tenant
whose turn it is, unless that has one which is due earlier and not late; of its own a warm urgent one may go instead.
What it takes is charged like anything else, and a share may run at most `urgency_credit` ahead of the least served one:
a tier whose promises are too tight for its load would otherwise own the engine.

The bounds that follow are derived in docs/designs/0003-scheduling.md. Pushing, picking and removing take
O(log waiting) comparisons, and picking `lookahead` calls of `warmth`.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping

from cacheaware_sidecar.scheduling.requests import Terms, Waiting

URGENCY_CREDIT = 8192.0  # tokens of engine work over weight: a few requests
RUN = 32
LOOKAHEAD = 32
_URGENT_LOOKED_AT = (
    16  # tenants of a tier whose urgent requests are looked at, when the first ones are over their credit
)

Warmth = Callable[[Waiting], float]

_Entry = tuple[float, float, int, Waiting]  # due, arrival, number: unique before the request is compared
_due = operator.itemgetter(0)


@dataclasses.dataclass(slots=True)
class _Tenant:
    name: str
    served: float
    entries: list[_Entry] = dataclasses.field(default_factory=list)  # sorted
    version: int = 0  # of its place in the tier's heaps; anything else there is out of date
    announced: int | None = None  # the number of its first request, as of the last time that one changed
    since_first: int = 0  # picks since the one due first was picked

    def due_next(self, now: float) -> float:
        """When the first of its requests is due that are not late."""
        where = bisect.bisect_left(self.entries, now, key=_due)
        return self.entries[where][0] if where < len(self.entries) else math.inf

    def urgent(self, now: float) -> int | None:
        """Where its first urgent request is that is not late."""
        where = bisect.bisect_left(self.entries, now, key=_due)
        return where if where < len(self.entries) and self.entries[where][3].urgent_at <= now else None


@dataclasses.dataclass(slots=True)
class _Tier:
    """`by_account` orders its waiting tenants by account, `becoming` by when their first request becomes urgent, and
    `urgent` those whose request is by when it is due. Entries that are out of date are dropped when they come up.
    """

    terms: Terms
    served: float
    started: float = 0.0  # account of the least served waiting tenant, as of the last pick: where newcomers start
    waiting: int = 0
    tenants: dict[str, _Tenant] = dataclasses.field(default_factory=dict)
    by_account: list[tuple[float, float, int, int, _Tenant]] = dataclasses.field(default_factory=list)
    becoming: list[tuple[float, int, _Tenant]] = dataclasses.field(default_factory=list)
    urgent: list[tuple[float, int, _Tenant]] = dataclasses.field(default_factory=list)

    def place(self, tenant: _Tenant) -> None:
        """Its account or its first request has changed."""
        tenant.version += 1
        if not tenant.entries:
            return
        due, _, number, request = tenant.entries[0]
        heapq.heappush(self.by_account, (tenant.served, due, number, tenant.version, tenant))
        if tenant.announced != number:
            tenant.announced = number
            heapq.heappush(self.becoming, (request.urgent_at, number, tenant))
        most = 4 * len(self.tenants) + 64
        if len(self.by_account) > most:
            self.by_account = [item for item in self.by_account if item[4].version == item[3]]
            heapq.heapify(self.by_account)
        if len(self.becoming) > most:
            self.becoming = list({item[2].name: item for item in self.becoming if _is_first(item)}.values())
            heapq.heapify(self.becoming)

    def least(self) -> _Tenant:
        """The least served tenant that waits; there is one."""
        while self.by_account[0][4].version != self.by_account[0][3]:
            heapq.heappop(self.by_account)
        return self.by_account[0][4]

    def most_urgent(self, now: float, most_served: float) -> tuple[_Entry, _Tenant] | None:
        """Of the tenants that were served no more than that, the urgent request that is due first and not late yet."""
        while self.becoming and self.becoming[0][0] <= now:
            item = heapq.heappop(self.becoming)
            if _is_first(item):
                _, number, tenant = item
                heapq.heappush(self.urgent, (tenant.entries[0][0], number, tenant))
        passed_over: list[tuple[float, int, _Tenant]] = []
        found: tuple[_Entry, _Tenant] | None = None
        while self.urgent and len(passed_over) < _URGENT_LOOKED_AT:
            if found is not None and self.urgent[0][0] >= found[0][0]:
                break  # nothing behind is due earlier
            item = heapq.heappop(self.urgent)
            if not _is_first(item):
                continue
            passed_over.append(item)
            tenant = item[2]
            if tenant.served <= most_served and (where := tenant.urgent(now)) is not None:
                entry = tenant.entries[where]
                if found is None or entry < found[0]:
                    found = entry, tenant
        for item in passed_over:
            heapq.heappush(self.urgent, item)
        return found


def _is_first(item: tuple[float, int, _Tenant]) -> bool:
    """Whether the entry still stands for the first request of its tenant."""
    entries = item[2].entries
    return bool(entries) and entries[0][2] == item[1]


class FairQueue:
    def __init__(
        self,
        *,
        urgency_credit: float = URGENCY_CREDIT,
        run: int = RUN,
        lookahead: int = LOOKAHEAD,
        warmth: Warmth | None = None,
    ) -> None:
        self._credit = urgency_credit
        self._run = run
        self._lookahead = lookahead
        self._warmth = warmth
        self._tiers: dict[str, _Tier] = {}
        self._entries: dict[str, _Entry] = {}
        self._started = 0.0
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def waiting(self, tier: str) -> int:
        known = self._tiers.get(tier)
        return 0 if known is None else known.waiting

    def backlogged(self) -> Iterator[str]:
        """The tiers of which somebody waits."""
        return (name for name, tier in self._tiers.items() if tier.waiting)

    def set_terms(self, terms: Mapping[str, Terms]) -> None:
        """New weights and priorities. A tier that is gone keeps its old ones until its last request has left."""
        for name, tier in list(self._tiers.items()):
            if name in terms:
                tier.terms = terms[name]
            elif not tier.waiting:
                del self._tiers[name]
        for name in terms.keys() - self._tiers.keys():
            self._tiers[name] = _Tier(terms[name], self._started)

    def terms_of(self, tier: str) -> Terms:
        known = self._tiers.get(tier)
        return Terms() if known is None else known.terms

    # -- coming and leaving --------------------------------------------------------------------------------------------

    def push(self, request: Waiting, *, returns: bool = False) -> None:
        """A request that `returns` was set aside: its share is not new, and keeps the account that it had."""
        if request.id in self._entries:
            raise ValueError(f"request {request.id} waits already")
        tier = self._tiers.get(request.tier)
        if tier is None:
            tier = self._tiers[request.tier] = _Tier(Terms(), self._started)
        tenant = tier.tenants.get(request.tenant)
        if tenant is None:
            tenant = tier.tenants[request.tenant] = _Tenant(request.tenant, tier.started)
        if not tier.waiting and not returns:
            tier.served = max(tier.served, self._started)
        if not tenant.entries and not returns:
            tenant.served = max(tenant.served, tier.started)
        self._number += 1
        entry = (request.due, request.arrived, self._number, request)
        bisect.insort(tenant.entries, entry)
        tier.waiting += 1
        self._entries[request.id] = entry
        if tenant.entries[0] is entry:
            tier.place(tenant)

    def remove(self, request_id: str) -> bool:
        """Take a request out; False if it does not wait here."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        tier = self._tiers[entry[3].tier]
        tenant = tier.tenants[entry[3].tenant]
        if self._take_out(tier, tenant, entry):
            tier.place(tenant)
        self._level(tier)
        return True

    # -- picking -------------------------------------------------------------------------------------------------------

    def peek(self, now: float, closed: Collection[str] = ()) -> Waiting | None:
        """The next request among the tiers that are not `closed`; None: none of those waits."""
        first: _Tier | None = None
        first_rank = (0.0, 0, "")
        urgent: list[_Tier] = []
        for name, tier in self._tiers.items():
            if not tier.waiting or name in closed:
                continue
            rank = (tier.served, -tier.terms.priority, name)
            if first is None or rank < first_rank:
                first, first_rank = tier, rank
            if tier.urgent or (tier.becoming and tier.becoming[0][0] <= now):
                urgent.append(tier)
        if first is None:
            return None
        turn = first.least()
        found = self._most_urgent(now, urgent, first.served) if urgent else None
        if found is None or (found[1] is not turn and turn.due_next(now) <= found[0][0]):
            return self._of_tenant(turn)
        return self._of_tenant(found[1], urgent_at=now)

    def take(self, request: Waiting, cost: float, closed: Collection[str] = ()) -> None:
        """`peek` named it, and it goes: its cost is charged."""
        tier = self._tiers[request.tier]
        tenant = tier.tenants[request.tenant]
        least = min([t.served for name, t in self._tiers.items() if t.waiting and name not in closed])
        self._started = max(self._started, least)
        tier.started = max(tier.started, tier.least().served)
        tenant.since_first = 0 if tenant.entries[0][3] is request else tenant.since_first + 1
        tier.served = _moved(tier.served, cost / tier.terms.weight, self._started)
        tenant.served = _moved(tenant.served, cost, tier.started)
        self._take_out(tier, tenant, self._entries.pop(request.id))
        tier.place(tenant)
        self._level(tier)

    def charge(self, tier: str, tenant: str, cost: float) -> None:
        """Add work to an account, or give some back (negative) where less was used than expected.

        Nothing is given back below the level that newcomers start at: they would be overtaken for no fault of theirs.
        """
        account = self._tiers.get(tier)
        if account is None:
            return  # the tier has left the view meanwhile
        account.served = _moved(account.served, cost / account.terms.weight, self._started)
        share = account.tenants.get(tenant)
        if share is not None:
            share.served = _moved(share.served, cost, account.started)
            account.place(share)

    def _take_out(self, tier: _Tier, tenant: _Tenant, entry: _Entry) -> bool:
        """True: it was its tenant's first, so the tenant has to be placed anew."""
        where = bisect.bisect_left(tenant.entries, entry)
        del tenant.entries[where]
        tier.waiting -= 1
        return where == 0

    def _of_tenant(self, tenant: _Tenant, urgent_at: float | None = None) -> Waiting:
        """`urgent_at`: among those that are urgent and not late then, and there is one."""
        first = tenant.entries[0][3]
        if len(tenant.entries) == 1 or tenant.since_first >= self._run - 1:
            return first
        start = 0 if urgent_at is None else tenant.urgent(urgent_at) or 0
        best = tenant.entries[start][3]
        if self._warmth is None:
            return best
        warmest = self._warmth(best)
        for _, _, _, request in tenant.entries[start + 1 : start + self._lookahead]:
            if urgent_at is not None and request.urgent_at > urgent_at:
                continue
            warmth = self._warmth(request)
            if warmth > warmest:
                best, warmest = request, warmth
        return best

    def _most_urgent(self, now: float, tiers: list[_Tier], least: float) -> tuple[_Entry, _Tenant] | None:
        best: tuple[tuple[float, int, int], tuple[_Entry, _Tenant]] | None = None
        for tier in tiers:
            if tier.served > least + self._credit:
                continue
            found = tier.most_urgent(now, tier.least().served + self._credit)
            if found is not None:
                due, _, number, _ = found[0]
                rank = (due, -tier.terms.priority, number)
                if best is None or rank < best[0]:
                    best = (rank, found)
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
