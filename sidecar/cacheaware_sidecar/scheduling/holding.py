"""Whether a request that could go now is held for company, until when, and why it was let go. Pure.

A request is held behind the one that computes its prefix right now (it then has only its own part to compute, and ends
no later), or, in an engine that is busy anyway, for others that share its prefix, where their company is worth more
than the waiting. Never longer than the tier's window in all, never beyond its slack, and never in front of an idle
engine.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Iterator

from cacheaware_sidecar.scheduling.requests import FlushReason, Waiting

LARGEST_GROUP = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Company:
    """What is known of those who may come: their rate, the engine seconds that each of them saves if this request still
    waits then, and the engine seconds that a second of waiting is worth to those who wait already.
    """

    rate: float
    saved: float
    worth: float
    members: int

    @property
    def pays(self) -> bool:
        """One step ahead is enough: arrivals have no memory, the price rises with each member and the gain does not."""
        return self.rate * self.saved > self.worth and self.members < LARGEST_GROUP


def saved_by_company(read_seconds: float, window: float, step_seconds: float) -> float:
    """Engine seconds that one more member saves by coming while this request still waits: their common prefix is read
    once a step (`read_seconds`) instead of twice, for the steps by which the two run together longer.

    It is no prefix computed twice: a member that comes later finds it cached, and one that comes while it is computed
    is held behind its leader.
    """
    return 0.0 if step_seconds <= 0 else window / step_seconds * read_seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    request: Waiting
    since: float
    until: float
    at_end: FlushReason  # WINDOW or SLACK, whichever ends first
    leader: str | None  # None: it waits for company
    group: str


def hold(
    request: Waiting, now: float, *, window: float, slack_until: float, leader: str | None, group: str
) -> Held | None:
    """None: the tier allows no holding, or there is no slack left."""
    cap, slack = now + window, min(slack_until, request.urgent_at)
    if min(cap, slack) <= now:
        return None
    at_end = FlushReason.WINDOW if cap <= slack else FlushReason.SLACK
    return Held(request, now, min(cap, slack), at_end, leader, group)


class Holds:
    """Those that are held. Everything is O(log held) for each request that it concerns."""

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}  # by request
        self._by_end: list[tuple[float, str]] = []
        self._behind: dict[str, dict[str, None]] = {}  # by leader, in order
        self._for_company: dict[str, None] = {}
        self._tiers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.held)

    def of_tier(self, tier: str) -> int:
        return self._tiers.get(tier, 0)

    @property
    def next_end(self) -> float | None:
        while self._by_end and self._is_stale(self._by_end[0]):
            heapq.heappop(self._by_end)
        return self._by_end[0][0] if self._by_end else None

    def add(self, held: Held) -> None:
        request_id = held.request.id
        self.held[request_id] = held
        heapq.heappush(self._by_end, (held.until, request_id))
        if held.leader is None:
            self._for_company[request_id] = None
        else:
            self._behind.setdefault(held.leader, {})[request_id] = None
        self._tiers[held.request.tier] = self.of_tier(held.request.tier) + 1

    def release(self, request_id: str) -> Held | None:
        held = self.held.pop(request_id, None)
        if held is None:
            return None
        self._for_company.pop(request_id, None)
        if held.leader is not None:
            behind = self._behind[held.leader]
            del behind[request_id]
            if not behind:
                del self._behind[held.leader]
        left = self._tiers[held.request.tier] - 1
        if left:
            self._tiers[held.request.tier] = left
        else:
            del self._tiers[held.request.tier]
        return held

    def release_behind(self, leader: str) -> list[Held]:
        return self._release_all(self._behind.get(leader, ()))

    def release_all(self) -> list[Held]:
        return self._release_all(self.held)

    def release_ended(self, now: float) -> list[Held]:
        ended = []
        while (end := self.next_end) is not None and end <= now:
            held = self.release(heapq.heappop(self._by_end)[1])
            assert held is not None, "an entry that is not stale is held"
            ended.append(held)
        return ended

    def for_company(self) -> Iterator[Held]:
        return (self.held[request_id] for request_id in tuple(self._for_company))

    def _release_all(self, ids: Iterable[str]) -> list[Held]:
        released = []
        for request_id in tuple(ids):
            held = self.release(request_id)
            assert held is not None
            released.append(held)
        return released

    def _is_stale(self, entry: tuple[float, str]) -> bool:
        held = self.held.get(entry[1])
        return held is None or held.until != entry[0]
