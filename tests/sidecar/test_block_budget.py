"""Blocks that are held by estimate: who may have how many, counted exactly and given back once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cacheaware_api import quota, wire
from cacheaware_sidecar.block_budget import BlockBudget, Cache, Demand, Fit
from cacheaware_sidecar.testing_sidecar import tier, view

CHUNK = 16  # tokens, a block too


def cache(capacity: int = 100, **shares: Any) -> Cache:
    """`gold` may hold 50 and lends 20 of them; `bronze` may hold 30 and borrow 10."""
    tiers = [
        tier("gold", 100, 4, quota={"nominalPercent": 50, "lendingLimitPercent": 20}, effectivePercent=50),
        tier("bronze", 0, 1, quota={"nominalPercent": 30, "borrowingLimitPercent": 10}, effectivePercent=30),
        tier("spot", -1, 1, quota={"nominalPercent": 0}, effectivePercent=0),
    ]
    return Cache(capacity, CHUNK, quota.quotas_for(view(tiers=tiers, **shares), capacity))


def blocks(number: int, *, chunks: tuple[bytes, ...] = (), output: int = CHUNK) -> Demand:
    """So many blocks in all, one of output among them."""
    return Demand((number - 1) * CHUNK, output, chunks=chunks, chunk_tokens=CHUNK)


def budget(**held: int) -> BlockBudget:
    made = BlockBudget()
    made.set_cache(cache())
    for name, number in held.items():
        made.hold(f"{name} holds", name, blocks(number))
    return made


class TestWhoFits:
    @pytest.mark.parametrize(
        ("held", "name", "need", "fit"),
        [
            pytest.param({}, "gold", 50, Fit.ENTITLED, id="all of nominal"),
            pytest.param({"gold": 20}, "gold", 30, Fit.ENTITLED, id="the rest of nominal"),
            pytest.param({"spot": 70}, "gold", 50, Fit.ENTITLED, id="nominal that others have borrowed"),
            pytest.param({"gold": 50}, "gold", 10, Fit.BORROWS, id="what bronze lends"),
            pytest.param({"gold": 50, "bronze": 30}, "gold", 20, Fit.BORROWS, id="what is nobody's"),
            pytest.param({"gold": 50, "bronze": 30}, "gold", 21, Fit.NO_ROOM, id="more than is free"),
            pytest.param({"bronze": 30}, "bronze", 10, Fit.BORROWS, id="up to the limit"),
            pytest.param({"bronze": 30}, "bronze", 11, Fit.AT_LIMIT, id="beyond the limit"),
            pytest.param({"bronze": 1}, "spot", 69, Fit.BORROWS, id="spot takes what others lend"),
            pytest.param({"gold": 31}, "spot", 69, Fit.BORROWS, id="a held block is lent no more: 31 + 69 fit"),
            pytest.param({"gold": 32}, "spot", 69, Fit.NO_ROOM, id="a held block is lent no more: 32 + 69 do not"),
        ],
    )
    def test_by_nominal_limit_and_what_others_lend(self, held: dict[str, int], name: str, need: int, fit: Fit) -> None:
        assert budget(**held).fit(name, blocks(need)) is fit

    def test_what_gold_does_not_lend_stays_out_of_reach(self) -> None:
        made = budget(bronze=1)
        assert cache().most("spot") == 70
        made.hold("spot runs", "spot", blocks(69))
        assert made.fit("spot", blocks(2)) is Fit.NO_ROOM

    def test_where_nothing_runs_it_goes_whatever_others_lend(self) -> None:
        made = BlockBudget()
        made.set_cache(cache())
        assert made.fit("spot", blocks(100)) is Fit.BORROWS  # its output is cut to what could ever fit

    def test_what_seems_too_large_goes_when_its_tier_has_nothing_else(self) -> None:
        made = budget(gold=10)
        assert made.fit("bronze", blocks(500)) is Fit.BORROWS
        made.hold("bronze holds", "bronze", blocks(1))
        assert made.fit("bronze", blocks(500)) is Fit.AT_LIMIT

    def test_before_the_cache_is_known_nothing_is_bounded(self) -> None:
        made = BlockBudget()
        assert made.fit("spot", blocks(10**6)) is Fit.ENTITLED
        made.hold("one", "spot", blocks(10))
        assert made.held() == {}
        assert made.release("one") is False

    def test_what_the_engine_holds_beyond_the_estimates_is_not_lent(self) -> None:
        made = budget(gold=50)
        assert made.fit("gold", blocks(20)) is Fit.BORROWS
        made.measured(held=100)
        assert made.fit("gold", blocks(2)) is Fit.NO_ROOM
        made.measured(held=40)  # fewer: the estimates were generous, and stay
        assert made.fit("gold", blocks(20)) is Fit.BORROWS

    def test_a_tier_that_left_has_nothing_and_drains(self) -> None:
        made = budget(spot=20)
        changed = view(tiers=[tier("gold", nominal=50)])
        made.set_cache(Cache(100, CHUNK, quota.quotas_for(changed, 100)))
        assert made.held() == {"spot": 20}
        assert made.fit("spot", blocks(1)) is Fit.AT_LIMIT
        made.release("spot holds")
        assert made.held() == {}

    def test_caution_makes_answers_longer(self) -> None:
        made = budget()
        made.caution = 2.0
        made.hold("one", "gold", Demand(prompt=16, output=160))
        assert made.held() == {"gold": 1 + 20}


class TestShared:
    def test_a_start_that_two_requests_share_counts_once(self) -> None:
        made = budget()
        start = (b"a", b"b", b"c")
        made.hold("one", "gold", blocks(5, chunks=start))
        made.hold("two", "gold", blocks(5, chunks=start))
        assert made.held() == {"gold": 5 + 2}

    def test_it_is_the_bringers_until_the_last_one_leaves(self) -> None:
        made = budget()
        made.hold("one", "gold", blocks(4, chunks=(b"a", b"b", b"c")))
        made.hold("two", "bronze", blocks(4, chunks=(b"a", b"b", b"x")))
        assert made.held() == {"gold": 4, "bronze": 2}
        made.release("one")
        assert made.held() == {"gold": 2, "bronze": 2}
        made.release("two")
        assert made.held() == {}

    def test_a_hit_makes_room(self) -> None:
        start = tuple(bytes([number]) for number in range(9))
        made = budget(bronze=20)
        made.hold("leader", "bronze", blocks(10, chunks=start))
        assert made.fit("bronze", blocks(10, chunks=start)) is Fit.BORROWS
        assert made.fit("bronze", blocks(20)) is Fit.AT_LIMIT


class TestRounds:
    def test_once_one_finds_no_room_no_later_one_borrows(self) -> None:
        made = budget(gold=50, bronze=30)
        admits = made.admission()
        assert admits("spot", blocks(5))
        assert not admits("spot", blocks(30))
        assert not admits("gold", blocks(5))  # it would, in a round of its own
        assert made.admission()("gold", blocks(5))

    def test_one_at_its_limit_keeps_nobody_from_borrowing(self) -> None:
        made = budget(gold=50, bronze=30)
        admits = made.admission()
        assert not admits("bronze", blocks(20))
        assert admits("gold", blocks(5))

    def test_the_entitled_go_in_any_case(self) -> None:
        made = budget(spot=70, bronze=30)
        admits = made.admission()
        assert not admits("spot", blocks(5))
        assert admits("gold", blocks(50))


TIERS = ("gold", "bronze", "spot")
DEMANDS = st.builds(
    Demand,
    prompt=st.integers(0, 700),
    output=st.integers(1, 200),
    sequences=st.integers(1, 3),
    chunks=st.lists(st.sampled_from([bytes([n]) for n in range(12)]), unique=True, max_size=8).map(tuple),
    chunk_tokens=st.integers(1, 40),
)


class Accounts(RuleBasedStateMachine):
    """Requests come in any order, the cache changes under them, and every account stays exact."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = BlockBudget()
        self.cache = cache()
        self.budget.set_cache(self.cache)
        self.inside: dict[str, str] = {}
        self.number = 0

    @rule(name=st.sampled_from(TIERS), demand=DEMANDS)
    def admit(self, name: str, demand: Demand) -> None:
        before, others = self.budget.held_by(name), self.budget.held()
        fit = self.budget.fit(name, demand)
        if fit in (Fit.NO_ROOM, Fit.AT_LIMIT):
            return
        self.number += 1
        self.budget.hold(str(self.number), name, demand)
        self.inside[str(self.number)] = name
        mine, now = self.cache.tier(name), self.budget.held_by(name)
        if now - before > self.cache.most(name):
            return  # it seemed larger than it can be
        assert now <= mine.limit
        if fit is Fit.BORROWS and others:
            assert sum(self.budget.held().values()) <= self.cache.capacity
        if fit is Fit.ENTITLED:
            assert now <= mine.nominal

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), times=st.integers(1, 3))
    def release(self, data: st.DataObject, times: int) -> None:
        request = data.draw(st.sampled_from(sorted(self.inside)))
        self.inside.pop(request)
        assert [self.budget.release(request) for _ in range(times)] == [True] + [False] * (times - 1)

    @rule(capacity=st.integers(60, 200))
    def resize(self, capacity: int) -> None:
        self.cache = cache(capacity)
        self.budget.set_cache(self.cache)

    @rule(number=st.integers(0, 200))
    def measure(self, number: int) -> None:
        self.budget.measured(number)

    @invariant()
    def exact(self) -> None:
        self.budget.check_integrity()
        if not self.inside:
            assert self.budget.held() == {}

    @invariant()
    def whoever_could_ever_fit_goes_when_nothing_runs(self) -> None:
        if not self.inside:
            for name in TIERS:
                demand = blocks(self.cache.most(name))
                assert self.budget.fit(name, demand) in (Fit.ENTITLED, Fit.BORROWS)


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_request_is_held_once() -> None:
    made = budget()
    made.hold("one", "gold", blocks(1))
    with pytest.raises(ValueError, match="holds blocks already"):
        made.hold("one", "gold", blocks(1))


def test_another_size_of_blocks_begins_anew() -> None:
    made = budget(gold=10)
    made.set_cache(Cache(50, 32, wire.Quotas(wire.Revision("u", 1), (), 0)))
    assert made.held() == {}
    assert made.release("gold holds") is False
    made.check_integrity()
