"""The order of waiting requests: weighted shares, then quick prompts and deadlines, then priority. Pure; told the time.

Each tier has an account of the engine work it was given, divided by its weight, and each tenant one inside its tier.
The share that got least goes next, so backlogged tiers get work in the ratio of their weights, whatever they ask for; a
share that was away neither saves up work nor owes any. How far a share is behind the least served one is its deficit.

Inside a tenant, the request whose first token is due first goes next. Of `run` picks, all but one may go instead to the
request that takes the least `effort`, among the `lookahead` first ones: what is cached is read while it is there.

A request past half of its time to first token is urgent until it is late. The one due first goes before the tenant
whose turn it is, unless that has one which is due earlier and not late; of its own a quick urgent one may go instead.
What it takes is charged like anything else, and a share may run at most `urgency_credit` ahead of the least served one:
a tier whose promises are too tight for its load would otherwise own the engine.

The bounds that follow are derived in docs/designs/0003-scheduling.md. Pushing, picking and removing take
O(log waiting) comparisons, and picking `lookahead` calls of `effort`.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping

from cacheaware_sidecar.scheduling.requests import Terms, Waiting

URGENCY_CREDIT = 8192.0  # tokens of engine work over weight, until it is known what a step of the engine is
RUN = 64
LOOKAHEAD = 8
_URGENT_LOOKED_AT = 16  # tenants of a tier that have something urgent, where the first ones are over their credit

Effort = Callable[[Waiting], int]

_Entry = tuple[float, float, int, float, Waiting]  # due, arrival, number, urgent at; numbers are unique
_due = operator.itemgetter(0)


@dataclasses.dataclass(slots=True)
class _Tenant:
    name: str
    served: float
    entries: list[_Entry] = dataclasses.field(default_factory=list)  # sorted
    version: int = 0  # of its place in the tier's heap; anything else there is out of date
    late: int = 0  # so many of its first requests are known to be late
    announced: int | None = None  # number of the first that is not, where that one stands in `becoming` or `urgent`
    since_first: int = 0  # picks since the one due first was picked


@dataclasses.dataclass(slots=True)
class _Tier:
    """`by_account` orders its waiting tenants by account. The first request of each tenant that is not late stands in
    `becoming`, by when it becomes urgent, and from then on in `urgent`, by when it is due. Entries that are out of date
    are dropped when they come up.
    """

    name: str
    terms: Terms
    served: float
    started: float = 0.0  # account of the least served waiting tenant, as of the last pick: where newcomers start
    waiting: int = 0
    tenants: dict[str, _Tenant] = dataclasses.field(default_factory=dict)
    by_account: list[tuple[float, float, int, int, _Tenant]] = dataclasses.field(default_factory=list)  # a heap
    becoming: list[tuple[float, int, _Tenant]] = dataclasses.field(default_factory=list)  # a heap
    urgent: list[tuple[float, int, _Tenant]] = dataclasses.field(default_factory=list)  # sorted

    def put_in(self, tenant: _Tenant, entry: _Entry) -> None:
        where = bisect.bisect_left(tenant.entries, entry)
        tenant.entries.insert(where, entry)
        self.waiting += 1
        if where < tenant.late:
            tenant.late += 1
        elif where == tenant.late:
            self.announce(tenant)
        if not where:
            self.place(tenant)

    def take_out(self, tenant: _Tenant, entry: _Entry) -> bool:
        """True: it was its tenant's first, so the tenant has to be placed anew."""
        where = bisect.bisect_left(tenant.entries, entry)
        del tenant.entries[where]
        self.waiting -= 1
        if where < tenant.late:
            tenant.late -= 1
        elif where == tenant.late:
            self.announce(tenant)
        return not where

    def place(self, tenant: _Tenant) -> None:
        """Its account or its first request has changed."""
        tenant.version += 1
        if not tenant.entries:
            return
        first = tenant.entries[0]
        heapq.heappush(self.by_account, (tenant.served, first[0], first[2], tenant.version, tenant))
        if len(self.by_account) > 4 * len(self.tenants) + 64:
            self.by_account = [item for item in self.by_account if item[4].version == item[3]]
            heapq.heapify(self.by_account)

    def least(self) -> _Tenant:
        """The least served tenant that waits; there is one."""
        heap = self.by_account
        while heap[0][4].version != heap[0][3]:
            heapq.heappop(heap)
        return heap[0][4]

    def announce(self, tenant: _Tenant) -> None:
        """Another one is its first request that is not late."""
        if tenant.late == len(tenant.entries):
            tenant.announced = None
            return
        _, _, number, urgent_at, _ = tenant.entries[tenant.late]
        if urgent_at == math.inf:
            tenant.announced = None
            return
        tenant.announced = number
        heapq.heappush(self.becoming, (urgent_at, number, tenant))
        most = 4 * len(self.tenants) + 64
        if len(self.becoming) > most:
            self.becoming[:] = _current(self.becoming)
            heapq.heapify(self.becoming)
        if len(self.urgent) > most:
            self.urgent[:] = _current(self.urgent)

    def in_time(self, tenant: _Tenant, now: float) -> int:
        """Where the first of its requests is that are not late; behind the last one, if all are."""
        entries = tenant.entries
        if tenant.late < len(entries) and entries[tenant.late][0] < now:
            tenant.late = bisect.bisect_left(entries, now, tenant.late, key=_due)
            self.announce(tenant)
        return tenant.late

    def most_urgent(self, now: float, most_served: float) -> _Tenant | None:
        """Of the tenants that were served no more than that, the one whose first request that is not late is urgent and
        due first.
        """
        becoming, urgent = self.becoming, self.urgent
        while urgent and urgent[0][0] < now:
            _, number, tenant = urgent.pop(0)
            if tenant.announced == number:
                self.in_time(tenant, now)
        while becoming and becoming[0][0] <= now:
            _, number, tenant = heapq.heappop(becoming)
            if tenant.announced == number:
                where = self.in_time(tenant, now)
                if tenant.announced == number:
                    bisect.insort(urgent, (tenant.entries[where][0], number, tenant))
        place = 0
        while place < len(urgent) and place < _URGENT_LOOKED_AT:
            _, number, tenant = urgent[place]
            if tenant.announced != number:
                del urgent[place]
            elif tenant.served <= most_served:
                return tenant
            else:
                place += 1
        return None

    def check_integrity(self) -> None:
        assert self.waiting == sum(len(tenant.entries) for tenant in self.tenants.values())
        assert self.urgent == sorted(self.urgent, key=lambda item: item[:2])
        placed = {id(item[4]) for item in self.by_account if item[4].version == item[3]}
        announced = {item[1] for item in (*self.becoming, *self.urgent) if item[2].announced == item[1]}
        for tenant in self.tenants.values():
            assert tenant.entries == sorted(tenant.entries, key=lambda entry: entry[:3])
            assert (id(tenant) in placed) or not tenant.entries
            assert 0 <= tenant.late <= len(tenant.entries)
            promised = [entry[2] for entry in tenant.entries[tenant.late :][:1] if entry[3] < math.inf]
            assert promised == ([] if tenant.announced is None else [tenant.announced])
            assert announced.issuperset(promised)


def _current(items: list[tuple[float, int, _Tenant]]) -> list[tuple[float, int, _Tenant]]:
    """Those that are not out of date, each once."""
    return list({item[1]: item for item in items if item[2].announced == item[1]}.values())


class FairQueue:
    def __init__(
        self,
        *,
        urgency_credit: float = URGENCY_CREDIT,
        run: int = RUN,
        lookahead: int = LOOKAHEAD,
        effort: Effort | None = None,
    ) -> None:
        self.urgency_credit = urgency_credit
        self._run = run
        self._lookahead = lookahead
        self._effort = effort
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
            self._tiers[name] = _Tier(name, terms[name], self._started)

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
            tier = self._tiers[request.tier] = _Tier(request.tier, Terms(), self._started)
        tenant = tier.tenants.get(request.tenant)
        if tenant is None:
            tenant = tier.tenants[request.tenant] = _Tenant(request.tenant, tier.started)
        if not tier.waiting and not returns:
            tier.served = max(tier.served, self._started)
        if not tenant.entries and not returns:
            tenant.served = max(tenant.served, tier.started)
        self._number += 1
        entry = (request.due, request.arrived, self._number, request.urgent_at, request)
        self._entries[request.id] = entry
        tier.put_in(tenant, entry)

    def remove(self, request_id: str) -> bool:
        """Take a request out; False if it does not wait here."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        tier = self._tiers[entry[4].tier]
        tenant = tier.tenants[entry[4].tenant]
        if tier.take_out(tenant, entry):
            tier.place(tenant)
        self._level(tier)
        return True

    # -- picking -------------------------------------------------------------------------------------------------------

    def peek(self, now: float, closed: Collection[str] = ()) -> Waiting | None:
        """The next request among the tiers that are not `closed`; None: none of those waits."""
        first: _Tier | None = None
        urgent: list[_Tier] = []
        for tier in self._tiers.values():
            if not tier.waiting or tier.name in closed:
                continue
            if first is None or tier.served < first.served or (tier.served == first.served and _first(tier, first)):
                first = tier
            if tier.urgent or (tier.becoming and tier.becoming[0][0] <= now):
                urgent.append(tier)
        if first is None:
            return None
        turn = first.least()
        found = self._most_urgent(now, urgent, first.served) if urgent else None
        if found is None:
            return self._of_tenant(turn, 0)
        tier, tenant = found
        where = tier.in_time(tenant, now)
        if tenant is not turn:
            of_turn = first.in_time(turn, now)
            if of_turn < len(turn.entries) and turn.entries[of_turn][0] <= tenant.entries[where][0]:
                return self._of_tenant(turn, 0)
        return self._of_tenant(tenant, where, urgent_at=now)

    def take(self, request: Waiting, cost: float, closed: Collection[str] = ()) -> None:
        """`peek` named it, and it goes: its cost is charged."""
        tier = self._tiers[request.tier]
        tenant = tier.tenants[request.tenant]
        least = tier.served
        for other in self._tiers.values():
            if other.served < least and other.waiting and other.name not in closed:
                least = other.served
        self._started = max(self._started, least)
        tier.started = max(tier.started, tier.least().served)
        tier.served = _moved(tier.served, cost / tier.terms.weight, self._started)
        tenant.served = _moved(tenant.served, cost, tier.started)
        was_first = tier.take_out(tenant, self._entries.pop(request.id))
        tenant.since_first = 0 if was_first else tenant.since_first + 1
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

    def check_integrity(self) -> None:
        """Asserts that every request stands where it is looked for."""
        assert len(self._entries) == sum(tier.waiting for tier in self._tiers.values())
        for tier in self._tiers.values():
            tier.check_integrity()

    def _of_tenant(self, tenant: _Tenant, start: int, urgent_at: float = math.inf) -> Waiting:
        """Among those from `start` on that are urgent then; the one there is."""
        entries = tenant.entries
        if len(entries) == 1 or tenant.since_first >= self._run - 1:
            return entries[0][4]
        best = entries[start][4]
        if self._effort is None:
            return best
        least = self._effort(best)
        for entry in entries[start + 1 : start + self._lookahead]:
            if entry[3] > urgent_at:
                continue
            effort = self._effort(entry[4])
            if effort < least:
                best, least = entry[4], effort
        return best

    def _most_urgent(self, now: float, tiers: list[_Tier], least: float) -> tuple[_Tier, _Tenant] | None:
        best: tuple[_Tier, _Tenant] | None = None
        best_rank = (0.0, 0, 0)
        for tier in tiers:
            if tier.served > least + self.urgency_credit:
                continue
            tenant = tier.most_urgent(now, tier.least().served + self.urgency_credit)
            if tenant is not None:
                due, _, number, _, _ = tenant.entries[tenant.late]
                rank = (due, -tier.terms.priority, number)
                if best is None or rank < best_rank:
                    best, best_rank = (tier, tenant), rank
        return best

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


def _first(tier: _Tier, other: _Tier) -> bool:
    """Whether it is this one's turn, of two that were served alike."""
    return (-tier.terms.priority, tier.name) < (-other.terms.priority, other.name)
