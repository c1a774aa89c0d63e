"""The best split of the cache, and walking there: against trying everything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheaware_operator.rebalance_terms import Terms, TierTerms, fitted
from cacheaware_operator.share_search import (
    UNIT,
    Bounds,
    Worth,
    best_shares,
    best_step,
    step_towards,
    total_worth,
)
from cacheaware_operator.testing_rebalance import terms, tier

FULL = Bounds(0, 100)


def straight(rate: float, until: int) -> list[float]:
    return [rate * min(percent, until) for percent in range(101)]


def cliff(at: int, worth: float) -> list[float]:
    return [worth if percent >= at else 0.0 for percent in range(101)]


@st.composite
def concave(draw: st.DrawFn) -> list[float]:
    """Hit curves without cliffs, with whole units of `UNIT` percent."""
    gains = sorted(draw(st.lists(st.integers(0, 1000), min_size=50, max_size=50)), reverse=True)
    return [float(sum(gains[: percent // UNIT])) + gains[min(49, percent // UNIT)] * (percent % UNIT) / UNIT
            for percent in range(101)]  # fmt: skip


@st.composite
def rising(draw: st.DrawFn) -> list[float]:
    steps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.0, 1.0, 5.0, 50.0]), min_size=101, max_size=101))
    return list(itertools.accumulate(steps))


class TestBestShares:
    @given(concave(), concave(), concave())
    def test_is_the_optimum_where_every_unit_gains_less_than_the_last(
        self, a: list[float], b: list[float], c: list[float]
    ) -> None:
        worth = {"a": a, "b": b, "c": c}
        found = best_shares(worth, dict.fromkeys(worth, FULL), {"a": 50, "b": 30, "c": 20})
        every = (a[x] + b[y] + c[100 - x - y] for x in range(0, 101, UNIT) for y in range(0, 101 - x, UNIT))
        assert total_worth(worth, found) == pytest.approx(max(every))

    def test_sees_a_tier_that_gains_nothing_before_all_of_its_loop_fits(self) -> None:
        worth = {"loop": cliff(60, 100.0), "slope": straight(1.0, 100)}
        found = best_shares(worth, dict.fromkeys(worth, FULL), {"loop": 10, "slope": 90})
        assert found == {"loop": 60, "slope": 40}

    def test_leaves_what_gains_nobody_anything_where_it_is(self) -> None:
        worth = {"a": straight(1.0, 20), "b": straight(1.0, 10), "idle": [0.0] * 101}
        current = {"a": 20, "b": 30, "idle": 50}
        assert best_shares(worth, dict.fromkeys(worth, FULL), current) == current

    def test_of_tiers_that_gain_alike_the_one_that_has_it_keeps_it(self) -> None:
        worth = {"a": straight(1.0, 100), "b": straight(1.0, 100)}
        for current in ({"a": 70, "b": 30}, {"a": 30, "b": 70}):
            assert best_shares(worth, dict.fromkeys(worth, FULL), current) == current

    @given(
        st.lists(
            st.tuples(rising(), st.integers(0, 10), st.integers(0, 10), st.integers(0, 50)), min_size=1, max_size=5
        )
    )
    def test_keeps_to_the_bounds_and_to_the_total(self, tiers: list[tuple[list[float], int, int, int]]) -> None:
        worth = {str(n): table for n, (table, _, _, _) in enumerate(tiers)}
        current = {str(n): least + more for n, (_, least, more, _) in enumerate(tiers)}
        bounds = {str(n): Bounds(least, least + more + room) for n, (_, least, more, room) in enumerate(tiers)}
        found = best_shares(worth, bounds, current)
        assert sum(found.values()) == sum(current.values())
        assert all(bounds[name].least <= share <= bounds[name].most for name, share in found.items())


CURVES = st.lists(rising(), min_size=2, max_size=4)


def spread(count: int, total: int = 100) -> dict[str, int]:
    return {str(n): total // count + (total % count if n == 0 else 0) for n in range(count)}


class TestBestStep:
    @given(CURVES, st.integers(1, 100))
    def test_goes_towards_the_target_within_the_budget_and_only_up(self, tables: list[list[float]], most: int) -> None:
        worth: Worth = {str(n): table for n, table in enumerate(tables)}
        current = spread(len(tables))
        target = best_shares(worth, dict.fromkeys(worth, FULL), current)
        transfers = best_step(worth, current, target, most)
        assert sum(each.percent for each in transfers) <= most
        shares = dict(current)
        for each in transfers:
            assert each.percent > 0
            assert each.gain > 0
            shares[each.giver] -= each.percent
            shares[each.taker] += each.percent
        gained = total_worth(worth, shares) - total_worth(worth, current)
        assert gained == pytest.approx(sum(each.gain for each in transfers))
        for name in shares:
            assert min(current[name], target[name]) <= shares[name] <= max(current[name], target[name])

    def test_takes_the_most_valuable_first(self) -> None:
        worth = {"a": straight(5.0, 100), "b": straight(1.0, 100), "c": [0.0] * 101}
        (transfer,) = best_step(worth, {"a": 30, "b": 30, "c": 40}, {"a": 50, "b": 50, "c": 0}, 10)
        assert (transfer.giver, transfer.taker, transfer.percent, transfer.gain) == ("c", "a", 10, 50.0)

    def test_does_not_go_down_into_a_valley(self) -> None:
        worth = {"loop": cliff(60, 100.0), "slope": straight(1.0, 100)}
        current, target = {"loop": 10, "slope": 90}, {"loop": 60, "slope": 40}
        assert best_step(worth, current, target, 10) == []
        (transfer,) = best_step(worth, current, target, 100)
        assert (transfer.percent, transfer.gain) == (50, 50.0)


class TestStepTowards:
    @given(st.permutations([5, 10, 15, 30, 40]), st.permutations([5, 10, 15, 30, 40]), st.integers(1, 100))
    def test_arrives_in_as_many_steps_as_the_budget_needs(self, start: list[int], goal: list[int], budget: int) -> None:
        current, target = ({str(n): share for n, share in enumerate(shares)} for shares in (start, goal))
        distance = sum(max(0, target[name] - current[name]) for name in current)
        for _ in range(-(-distance // budget)):
            transfers = step_towards(current, target, budget)
            assert 0 < sum(each.percent for each in transfers) <= budget
            for each in transfers:
                current[each.giver] -= each.percent
                current[each.taker] += each.percent
        assert current == target


@st.composite
def any_terms(draw: st.DrawFn) -> Terms:
    tiers: list[TierTerms] = []
    left = 100
    for number in range(draw(st.integers(1, 5))):
        nominal = draw(st.integers(0, left))
        left -= nominal
        limit = draw(st.integers(nominal, 100))
        tiers.append(tier(f"t{number}", nominal, guaranteed=draw(st.integers(0, nominal)), limit=limit))
    return terms(*tiers)


class TestFitted:
    @given(any_terms(), st.dictionaries(st.sampled_from(["t0", "t1", "t2", "gone"]), st.integers(-50, 150)))
    def test_brings_any_shares_within_any_terms(self, wanted: Terms, shares: dict[str, int]) -> None:
        result = fitted(shares, wanted)
        assert sum(result.values()) == wanted.total
        assert all(each.guaranteed <= result[each.name] <= each.limit for each in wanted.tiers)
        assert fitted(result, wanted) == result

    def test_takes_where_it_is_furthest_from_nominal(self) -> None:
        wanted = terms(tier("a", 40), tier("b", 40))
        assert fitted({"a": 60, "b": 40}, wanted) == {"a": 40, "b": 40}
        assert fitted({"a": 60, "b": 20}, wanted) == {"a": 60, "b": 20}
