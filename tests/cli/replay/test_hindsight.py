"""What could have been had by who knows the future, compared with slow and obvious ways to find it out."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheaware.replay.hindsight import belady_hits, best_static, lru_hits
from cacheaware.replay.requests import Request
from cacheaware_api.defaults import RebalancingMode
from cacheaware_operator.rebalance_terms import Terms, TierTerms

BLOCK = 4


def request(number: int, path: str, tier: str = "gold") -> Request:
    """A prompt of a block for each letter; paths with a common beginning share it. One more token is computed."""
    keys = tuple(path[:end].encode() for end in range(1, len(path) + 1))
    return Request(f"r{number}", float(number), tier, "t", BLOCK * len(path) + 1, 1, keys)


def stream(*paths: str) -> list[Request]:
    return [request(number, path) for number, path in enumerate(paths)]


paths = st.lists(st.text("ab", min_size=1, max_size=4), max_size=7)


def hits_of_an_lru_cache(requests: list[Request], capacity: int) -> int:
    cache: OrderedDict[bytes, None] = OrderedDict()
    hits = 0
    for each in requests:
        hits += sum(1 for _ in itertools.takewhile(lambda key: key in cache, each.keys))
        for key in reversed(each.keys):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def most_hits(requests: list[Request], capacity: int) -> int:
    """By trying everything that may be kept after each request."""

    @cache
    def best(place: int, cached: frozenset[bytes]) -> int:
        if place == len(requests):
            return 0
        keys = requests[place].keys
        hits = sum(1 for _ in itertools.takewhile(lambda key: key in cached, keys))
        union = sorted(cached | set(keys))
        kept = min(capacity, len(union))
        return hits + max(best(place + 1, frozenset(some)) for some in itertools.combinations(union, kept))

    return best(0, frozenset())


class TestLru:
    @given(paths, st.integers(0, 12))
    def test_stack_distances_say_what_a_cache_of_every_size_hits(self, found: list[str], most: int) -> None:
        requests = stream(*found)
        assert lru_hits(requests, most, BLOCK) == [hits_of_an_lru_cache(requests, size) for size in range(most + 1)]


class TestBelady:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.text("ab", min_size=1, max_size=3), max_size=6), st.integers(1, 4))
    def test_nothing_that_can_be_kept_hits_more(self, found: list[str], capacity: int) -> None:
        requests = stream(*found)
        assert belady_hits(requests, capacity, BLOCK).get("gold", 0) == BLOCK * most_hits(requests, capacity)

    @given(paths, st.integers(1, 8))
    def test_is_never_below_lru(self, found: list[str], capacity: int) -> None:
        requests = stream(*found)
        assert sum(belady_hits(requests, capacity, BLOCK).values()) >= BLOCK * hits_of_an_lru_cache(requests, capacity)

    def test_tells_the_hits_of_each_tier(self) -> None:
        requests = [request(0, "ab", "gold"), request(1, "cd", "bronze"), request(2, "ab", "gold")]
        assert belady_hits(requests, 10, BLOCK) == {"gold": 2 * BLOCK, "bronze": 0}


def terms(*tiers: TierTerms) -> Terms:
    return Terms(RebalancingMode.AUTO, 30.0, 10, 1, tiers)


class TestBestStatic:
    # Gold goes round eight blocks, bronze round six; ten blocks of cache hold one of them.
    REQUESTS = [request(n, "abcdefgh"[n % 8], "gold") for n in range(400)] + [
        request(n, "ABCDEF"[n % 6], "bronze") for n in range(200)
    ]

    @pytest.mark.parametrize(
        ("gold", "bronze", "most_to"),
        [
            pytest.param((1, 0, 100), (1, 0, 100), "gold", id="to whom it brings most"),
            pytest.param((1, 0, 100), (9, 0, 100), "bronze", id="weights count"),
            pytest.param((1, 0, 70), (1, 0, 100), "bronze", id="limits hold"),
        ],
    )
    def test_gives_the_cache(self, gold: tuple[int, int, int], bronze: tuple[int, int, int], most_to: str) -> None:
        (gold_weight, gold_least, gold_most), (bronze_weight, bronze_least, bronze_most) = gold, bronze
        shares = best_static(
            self.REQUESTS,
            10,
            BLOCK,
            terms(
                TierTerms("gold", gold_weight, 50, gold_least, gold_most),
                TierTerms("bronze", bronze_weight, 50, bronze_least, bronze_most),
            ),
        )
        assert sum(shares.values()) == 100
        assert shares["gold"] >= 80 if most_to == "gold" else shares["bronze"] >= 60
