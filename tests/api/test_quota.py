from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheaware_api import durations, quota, wire
from cacheaware_api.testing import views

weights = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=3), st.integers(0, 1000), max_size=10)


@pytest.mark.parametrize(
    ("total", "shares", "budgets"),
    [
        pytest.param(997, {"a": 1, "b": 1, "c": 1000}, {"a": 2, "b": 2, "c": 993}, id="small shares keep a block"),
        pytest.param(
            997,
            {"z": 0, "a": 1, "b": 1, "c": 1000},
            {"z": 0, "a": 2, "b": 2, "c": 993},
            id="weight 0 gets nothing",
        ),
        pytest.param(10, {"a": 1, "b": 1, "c": 1}, {"a": 4, "b": 3, "c": 3}, id="a tie goes to the first named"),
        pytest.param(10, {"c": 1, "b": 1, "a": 1}, {"c": 4, "b": 3, "a": 3}, id="and not to the first in the alphabet"),
        pytest.param(3, {"a": 1, "b": 1, "c": 98}, {"a": 1, "b": 1, "c": 1}, id="just enough for one each"),
        pytest.param(2, {"a": 1, "b": 2, "c": 97}, {"a": 0, "b": 1, "c": 1}, id="too few: the largest first"),
        pytest.param(2, {"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "c": 0}, id="too few and equal: the first named"),
        pytest.param(0, {"a": 1}, {"a": 0}, id="nothing to give"),
        pytest.param(7, {"a": 0}, {"a": 0}, id="nobody to give to"),
        pytest.param(7, {}, {}, id="no shares"),
    ],
)
def test_budgets(total: int, shares: dict[str, int], budgets: dict[str, int]) -> None:
    assert quota.apportion(total, shares) == budgets
    assert list(quota.apportion(total, shares)) == list(shares)


def test_what_percentages_leave_of_100_belongs_to_nobody() -> None:
    assert quota.apportion(100, {"gold": 50, "bronze": 30}, unassigned=20) == {"gold": 50, "bronze": 30}
    assert quota.apportion(1, {"gold": 1}, unassigned=99) == {"gold": 1}


@given(st.integers(0, 5000), weights, st.integers(0, 1000))
def test_budgets_keep_to_the_total_and_to_the_shares(total: int, shares: dict[str, int], unassigned: int) -> None:
    budgets = quota.apportion(total, shares, unassigned)
    positive = [name for name, weight in shares.items() if weight]
    whole = sum(shares.values()) + unassigned
    assert sum(budgets.values()) <= total
    if positive and not unassigned:
        assert sum(budgets.values()) == total
    for name, weight in shares.items():
        assert budgets[name] == 0 if weight == 0 else budgets[name] >= (len(positive) <= total)
        if len(positive) <= total and weight:  # the first one aside, within one of the exact share
            exact = Fraction((total - len(positive)) * weight, whole)
            assert abs(budgets[name] - 1 - exact) < 1
    for one in shares:
        for other in shares:
            assert shares[one] <= shares[other] or budgets[one] >= budgets[other]


@given(st.integers(0, 5000), weights)
def test_the_largest_remainder_is_within_one_of_the_exact_share(total: int, shares: dict[str, int]) -> None:
    parts = quota.largest_remainder(total, shares)
    whole = sum(shares.values())
    assert sum(parts.values()) == (total if whole else 0)
    for name, weight in shares.items():
        assert whole == 0 or abs(parts[name] - Fraction(total * weight, whole)) < 1


@pytest.mark.parametrize(
    ("total", "shares", "unassigned", "message"),
    [
        (-1, {"a": 1}, 0, "cannot apportion -1"),
        (1, {"a": -1}, 0, "weight of a must not be negative"),
        (1, {"a": 1}, -1, "unassigned weight must not be negative"),
    ],
)
def test_negative_amounts_are_refused(total: int, shares: dict[str, int], unassigned: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quota.apportion(total, shares, unassigned)


def test_slots_are_apportioned_like_nominal_blocks_and_too_few_are_refused() -> None:
    assert quota.apportion_slots(32, {"gold": 50, "bronze": 30, "spot": 0}, unassigned=20) == {
        "gold": 16,
        "bronze": 10,
        "spot": 0,
    }
    with pytest.raises(
        ValueError, match=r"3 tiers have a nominal quota .* only 2 sequences at once: raise --max-num-seqs"
    ):
        quota.apportion_slots(2, {"a": 1, "b": 1, "c": 1})
    assert quota.apportion_slots(3, {"a": 1, "b": 1, "c": 98}) == {"a": 1, "b": 1, "c": 1}


# -- percent to blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nominal_percent", "borrowing", "limit"),
    [
        pytest.param(30, None, 997, id="absent: no limit"),
        pytest.param(30, 70, 997, id="reaching 100: no limit"),
        pytest.param(50, 100, 997, id="beyond 100: no limit"),
        pytest.param(30, 69, 299 + 687, id="rounded down"),
        pytest.param(30, 0, 299, id="0: none"),
    ],
)
def test_the_borrowing_limit_in_blocks(nominal_percent: int, borrowing: int | None, limit: int) -> None:
    assert quota.limit_blocks(997, 299, nominal_percent, borrowing) == limit


@pytest.mark.parametrize(
    ("lending", "blocks"),
    [
        pytest.param(None, 300, id="absent: all of it"),
        pytest.param(30, 300, id="as much as nominal: all of it, though 30 % of 997 is less"),
        pytest.param(29, 289, id="rounded down"),
        pytest.param(0, 0, id="0: none"),
    ],
)
def test_the_lending_limit_in_blocks(lending: int | None, blocks: int) -> None:
    assert quota.lending_blocks(997, 300, 30, lending) == blocks


def view_of(*tiers: wire.ViewTier, public_percent: int = 0) -> wire.View:
    return wire.View(
        revision=wire.Revision("uid", 1),
        model="model",
        tiers=tiers,
        sharing=wire.Sharing.TENANT,
        identity=wire.ViewIdentity(wire.IdentityType.OPEN),
        public_percent=public_percent,
    )


def tier(
    name: str, nominal: int, effective: int | None = None, *, priority: int = 0, retention: str | None = None
) -> wire.ViewTier:
    return wire.ViewTier(
        name=name,
        priority=priority,
        weight=1,
        quota=wire.ViewQuota(nominal_percent=nominal),
        sla=wire.ViewSLA(),
        effective_percent=nominal if effective is None else effective,
        retention=retention,
    )


def test_a_view_becomes_quotas() -> None:
    gold = wire.ViewTier(
        name="gold",
        priority=100,
        weight=4,
        quota=wire.ViewQuota(50, 25, 20),
        sla=wire.ViewSLA(time_per_output_token="100ms"),
        effective_percent=60,
        retention="10m",
    )
    quotas = quota.quotas_for(view_of(tier("bronze", 30, 20), gold, public_percent=10), 1000)
    assert quotas == wire.Quotas(
        revision=wire.Revision("uid", 1),
        tiers=(
            wire.TierQuota("bronze", 0, 1, nominal=300, effective=200, limit=1000, lending=300),
            wire.TierQuota(
                "gold",
                100,
                4,
                nominal=499,
                effective=599,
                limit=749,
                lending=200,
                retention_s=600.0,
                time_per_output_token_s=0.1,
            ),
        ),
        public=101,
    )


def test_a_tier_and_the_public_share_of_one_percent_are_not_rounded_to_nothing() -> None:
    quotas = quota.quotas_for(view_of(tier("big", 98), tier("tiny", 1), public_percent=1), 20)
    assert {each.name: each.nominal for each in quotas.tiers} == {"big": 18, "tiny": 1}
    assert quotas.public == 1


def test_when_blocks_are_fewer_than_shares_the_more_important_of_equals_has_one() -> None:
    quotas = quota.quotas_for(view_of(tier("a", 50, priority=1), tier("b", 50, priority=2)), 1)
    assert {each.name: each.nominal for each in quotas.tiers} == {"a": 0, "b": 1}


@given(views(), st.integers(0, 3000))
def test_quotas_fit_the_engine_and_agree_with_the_percentages(view: wire.View, capacity: int) -> None:
    quotas = quota.quotas_for(view, capacity)
    by_name = {each.name: each for each in quotas.tiers}
    assert sum(each.nominal for each in quotas.tiers) + quotas.public <= capacity
    assert sum(each.effective for each in quotas.tiers) + quotas.public <= capacity
    if sum(each.quota.nominal_percent for each in view.tiers) + view.public_percent == 100:
        assert sum(each.nominal for each in quotas.tiers) + quotas.public == capacity
    enough = capacity >= len(view.tiers) + 1
    for each in view.tiers:
        blocks = by_name[each.name]
        assert blocks.lending <= blocks.nominal <= blocks.limit <= capacity
        assert (blocks.nominal > 0) >= (enough and each.quota.nominal_percent > 0)
        assert (blocks.nominal > 0) <= (each.quota.nominal_percent > 0)
        assert blocks.retention_s == (None if each.retention is None else durations.seconds(each.retention))
    if all(each.effective_percent == each.quota.nominal_percent for each in view.tiers):
        assert all(each.effective == each.nominal for each in quotas.tiers)


@given(views(), st.integers(0, 3000), st.randoms(use_true_random=False))
def test_the_order_in_which_tiers_are_written_means_nothing(view: wire.View, capacity: int, random: object) -> None:
    shuffled = list(view.tiers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # the strategy's type says no more than object
    other = wire.from_json(wire.View, wire.to_json(view) | {"tiers": [wire.to_json(each) for each in shuffled]})
    key = lambda each: each.name  # noqa: E731  # used twice, and shorter than a function
    one, two = quota.quotas_for(view, capacity), quota.quotas_for(other, capacity)
    assert sorted(one.tiers, key=key) == sorted(two.tiers, key=key)
    assert one.public == two.public


@pytest.mark.parametrize(
    ("view", "path"),
    [
        pytest.param(view_of(tier("a", 60), tier("b", 50)), "tiers", id="nominal over 100"),
        pytest.param(view_of(tier("a", 50, 95), public_percent=10), "tiers", id="effective over 100"),
        pytest.param(view_of(tier("a", -5)), "tiers", id="negative"),
        pytest.param(view_of(tier("a", 5, retention="soon")), "tiers.a.retention", id="retention"),
    ],
)
def test_a_view_that_cannot_be_turned_into_quotas_names_the_field(view: wire.View, path: str) -> None:
    with pytest.raises(wire.WireError) as caught:
        quota.quotas_for(view, 100)
    assert caught.value.path == path


# -- words of the ledger ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "unassigned", "public_idle", "lent"),
    [
        pytest.param({"a": 10, "b": 2, "c": 0}, 0, 0, {"a": 0, "b": 1, "c": 2}, id="in proportion to what is idle"),
        pytest.param({"a": 10, "b": 2, "c": 0}, 1, 1, {"a": 0, "b": 0, "c": 1}, id="unassigned and public come first"),
        pytest.param({"a": 10, "b": 2, "c": 0}, 9, 0, {"a": 0, "b": 0, "c": 0}, id="nothing is left to lend"),
        pytest.param({"a": 7, "b": 0, "c": 0}, 0, 0, {"a": 0, "b": 0, "c": 0}, id="nobody borrows"),
        pytest.param({"a": 10, "b": 4, "c": 5, "gone": 9}, 0, 0, {"a": 0, "b": 0, "c": 0, "gone": 0}, id="never < 0"),
    ],
)
def test_lent_blocks(used: dict[str, int], unassigned: int, public_idle: int, lent: dict[str, int]) -> None:
    nominal = {"a": 7, "b": 4, "c": 4}
    assert quota.lent_blocks(used, nominal, unassigned=unassigned, public_idle=public_idle) == lent


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(0, 200), st.integers(0, 200))),
    st.integers(0, 100),
    st.integers(0, 50),
)
def test_what_is_lent_is_what_was_borrowed_from_tiers(
    accounts: dict[str, tuple[int, int]], unassigned: int, public_idle: int
) -> None:
    used = {name: blocks for name, (blocks, _) in accounts.items()}
    nominal = {name: blocks for name, (_, blocks) in accounts.items()}
    lent = quota.lent_blocks(used, nominal, unassigned=unassigned, public_idle=public_idle)
    borrowed = sum(quota.borrowed_blocks(used[name], nominal[name]) for name in used)
    idle = sum(max(0, nominal[name] - used[name]) for name in used)
    assert sum(lent.values()) == min(idle, max(0, borrowed - unassigned - public_idle))
    assert all(0 <= lent[name] <= max(0, nominal[name] - used[name]) for name in used)
