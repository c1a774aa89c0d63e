"""What could have been had by who knows the future: the best static split, and the bound on hits. Pure.

Both look at the order of references and at nothing else: service takes no time, and nothing is held.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import accumulate

from cacheaware.replay.requests import Request
from cacheaware_operator.rebalance_terms import Terms
from cacheaware_operator.share_search import Bounds, best_shares

PERCENT = range(101)


def belady_hits(requests: Sequence[Request], capacity: int, block_size: int) -> Mapping[str, int]:
    """Tokens that each tier hits at most, with the cache of all: what is used again latest goes first.

    A block is used no later than those behind it, so what is kept is always a beginning. What is not worth keeping is
    not kept, not even while it runs: no policy hits more.
    """
    uses: dict[bytes, list[int]] = {}
    for number in range(len(requests) - 1, -1, -1):  # so that each list has the next use last
        for key in requests[number].keys:
            uses.setdefault(key, []).append(number)
    cached: dict[bytes, int] = {}  # and the request that will use it next
    latest: list[tuple[int, int, bytes]] = []  # largest next use first, then deepest; entries may be out of date
    hits = dict.fromkeys((request.tier for request in requests), 0)
    for request in requests:
        hit = 0
        for key in request.hittable(block_size):
            if key not in cached:
                break
            hit += 1
        hits[request.tier] += hit * block_size
        for depth, key in enumerate(request.keys):
            coming = uses[key]
            coming.pop()
            if coming:
                cached[key] = coming[-1]
                heapq.heappush(latest, (-coming[-1], -depth, key))
            else:
                cached.pop(key, None)
        while len(cached) > capacity:
            use, _, key = heapq.heappop(latest)
            if cached.get(key) == -use:
                del cached[key]
    return hits


def best_static(requests: Sequence[Request], capacity: int, block_size: int, terms: Terms) -> dict[str, int]:
    """The effective shares, never moved, with which weighted hits would have been most; within the tiers' bounds."""
    curves = {tier.name: [0.0] * len(PERCENT) for tier in terms.tiers}
    for tier in terms.tiers:
        hits = lru_hits([request for request in requests if request.tier == tier.name], capacity, block_size)
        curves[tier.name] = [tier.weight * hits[capacity * percent // 100] for percent in PERCENT]
    bounds = {tier.name: Bounds(tier.guaranteed, tier.limit) for tier in terms.tiers}
    return dict(best_shares(curves, bounds, terms.nominal))


def lru_hits(requests: Sequence[Request], most: int, block_size: int) -> list[int]:
    """Blocks that an LRU cache of 0, 1, … `most` blocks would hit (Mattson's stack distances). O(n log n).

    A prompt's head is used after its tail, so that the tail goes first.
    """
    total = sum(len(request.keys) for request in requests)
    alive = _Counter(total + 1)
    last: dict[bytes, int] = {}
    found = [0] * (most + 2)
    now = 0
    for request in requests:
        hittable = len(request.hittable(block_size))
        distances = []
        for depth, key in enumerate(request.keys):
            before = last.get(key)
            if before is None:
                break
            # Distinct blocks used since, and the block itself.
            if depth < hittable:
                distances.append(alive.total - alive.up_to(before) + 1)
        for distance in distances:
            found[min(distance, most + 1)] += 1
        for key in reversed(request.keys):
            before = last.get(key)
            if before is not None:
                alive.add(before, -1)
            now += 1
            last[key] = now
            alive.add(now, 1)
    return list(accumulate(found[: most + 1]))


class _Counter:
    """Counts at places 1 … size, and sums of their beginnings (Fenwick's tree)."""

    def __init__(self, size: int) -> None:
        self.total = 0
        self._sums = [0] * (size + 1)

    def add(self, place: int, count: int) -> None:
        self.total += count
        sums, size = self._sums, len(self._sums)
        while place < size:
            sums[place] += count
            place += place & -place

    def up_to(self, place: int) -> int:
        """The count at places 1 … `place`."""
        sums, result = self._sums, 0
        while place:
            result += sums[place]
            place &= place - 1
        return result
