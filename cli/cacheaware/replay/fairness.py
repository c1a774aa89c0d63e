"""How far a waiting tenant fell behind another in a run, beside the bound that is proved for it. Pure.

For two shares that wait all the time the scheduler promises S(u) - S(v) <= K + L(u) + L(v): S is the work that they
were given, L the most that a request of theirs costs, and K what urgency may add (docs/designs/0003-scheduling.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cacheaware.replay.measures import Served
from cacheaware_sidecar.scheduling.scheduler import OUTPUT_PRICE


@dataclass(frozen=True, slots=True)
class Lag:
    """Tokens of work, for the pair that came nearest to its bound (or furthest beyond it)."""

    behind: str
    ahead: str
    tokens: float
    bound: float

    @property
    def part(self) -> float:
        return self.tokens / self.bound


@dataclass(frozen=True, slots=True)
class _Sent:
    tenant: str
    arrived: float
    at: float
    cost: float


def largest_lag(served: Iterable[Served], credit: float) -> Lag | None:
    """Among the tenants of one tier; `credit` is K, 0 where nobody is ever urgent. None: nobody waited beside another.

    What the engine really did is counted. O(requests · tenants).
    """
    sent = sorted((_sent(each) for each in served if each.first_token_at is not None), key=lambda one: one.at)
    largest: dict[str, float] = {}
    for one in sent:
        largest[one.tenant] = max(one.cost, largest.get(one.tenant, 0.0))
    found: list[Lag] = []
    for tenant in largest:
        for start, end in _waiting([one for one in sent if one.tenant == tenant]):
            work = dict.fromkeys(largest, 0.0)
            for one in sent:
                if one.tenant == tenant and start < one.at <= end:
                    work[tenant] += one.cost
                elif one.tenant != tenant and start < one.at < end:  # what went with its last one came after it
                    work[one.tenant] += one.cost
                    bound = credit + largest[tenant] + largest[one.tenant]
                    found.append(Lag(tenant, one.tenant, work[one.tenant] - work[tenant], bound))
    return max(found, key=lambda lag: lag.part, default=None)


def _sent(served: Served) -> _Sent:
    request = served.request
    cost = request.prompt_tokens - served.cached_tokens + OUTPUT_PRICE * served.output_tokens
    return _Sent(request.tenant, request.at, served.sent_at, cost)


def _waiting(sent: Sequence[_Sent]) -> Iterator[tuple[float, float]]:
    """Stretches of time in which a tenant has something waiting."""
    start, end = None, 0.0
    for one in sorted(sent, key=lambda one: one.arrived):
        if start is None or one.arrived > end:
            if start is not None and end > start:
                yield start, end
            start, end = one.arrived, one.at
        end = max(end, one.at)
    if start is not None and end > start:
        yield start, end
