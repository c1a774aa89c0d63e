"""Quotas: which are accepted, and what happens where they fall below what is used."""

from __future__ import annotations

from typing import Any

import pytest

from cacheaware_api import wire
from cacheaware_engine.blocks import (
    Admitted,
    BlockPool,
    Ended,
    QuotaRefused,
    StaleRevision,
    UnknownTier,
    Waiting,
    WaitReason,
    Yielded,
)

from .scene import Scene, tier


def quotas(number: int, uid: str = "one", public: int = 0, **tiers: dict[str, Any]) -> wire.Quotas:
    return wire.Quotas(
        wire.Revision(uid, number), tuple(tier(name, 20, **fields) for name, fields in tiers.items()), public
    )


# -- revisions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uid", "number", "nominal", "accepted"),
    [
        pytest.param("one", 8, 6, True, id="newer"),
        pytest.param("one", 7, 5, True, id="equal with equal content"),
        pytest.param("one", 7, 6, False, id="equal with other content"),
        pytest.param("one", 6, 5, False, id="older"),
        pytest.param("two", 1, 6, True, id="of another pool object, which always wins"),
    ],
)
def test_the_newest_revision_wins(uid: str, number: int, nominal: int, accepted: bool) -> None:
    pool = BlockPool(20, 1, 8)
    pool.set_quotas(quotas(7, gold={"nominal": 5}))
    before = pool.ledger()
    if accepted:
        pool.set_quotas(quotas(number, uid, gold={"nominal": nominal}))
        assert pool.ledger().revision == wire.Revision(uid, number)
        assert pool.ledger().tiers["gold"].nominal == nominal
    else:
        with pytest.raises(StaleRevision, match=f"revision.number: {number}"):
            pool.set_quotas(quotas(number, uid, gold={"nominal": nominal}))
        assert pool.ledger() == before


def test_the_order_of_tiers_is_no_content() -> None:
    pool = BlockPool(20, 1, 8)
    pool.set_quotas(quotas(7, gold={"nominal": 5}, bronze={"nominal": 2}))
    before = pool.ledger()
    pool.set_quotas(quotas(7, bronze={"nominal": 2}, gold={"nominal": 5}))
    assert pool.ledger() == before


# -- sums -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        pytest.param(
            quotas(2, public=3, gold={"nominal": 10}, bronze={"nominal": 8}),
            r"tiers\[\]\.nominal: gold 10 \+ bronze 8 \+ public 3 = 21 blocks, but the cache has 20; lower them by 1",
            id="nominal",
        ),
        pytest.param(
            quotas(2, gold={"nominal": 10, "effective": 15}, bronze={"effective": 8}),
            r"tiers\[\]\.effective: gold 15 \+ bronze 8 \+ public 0 = 23 blocks",
            id="effective",
        ),
        pytest.param(quotas(2, public=21), "public 21 = 21 blocks, but the cache has 20", id="public"),
        pytest.param(
            quotas(2, a={"nominal": 1}, b={"nominal": 1}, c={"nominal": 1}, d={"nominal": 1}),
            "4 tiers have a nominal quota and the engine runs only 3 sequences at once: raise --max-num-seqs",
            id="more tiers with nominal than slots",
        ),
    ],
)
def test_quotas_that_do_not_fit_are_refused_with_the_arithmetic_and_nothing_changes(
    wanted: wire.Quotas, problem: str
) -> None:
    pool = BlockPool(20, 1, 3)
    pool.set_quotas(quotas(1, gold={"nominal": 5}))
    before = pool.ledger()
    with pytest.raises(QuotaRefused, match=problem):
        pool.set_quotas(wanted)
    assert pool.ledger() == before
    pool.check_integrity()


def test_the_public_share_has_a_name_that_no_tier_can_have() -> None:
    with pytest.raises(QuotaRefused, match="<public> is the public share itself"):
        BlockPool(20, 1, 3).set_quotas(wire.Quotas(wire.Revision("one", 1), (tier("<public>", 20),), 0))


def test_a_limit_beyond_the_cache_is_the_cache() -> None:
    pool = BlockPool(10, 1, 8)
    pool.set_quotas(quotas(1, gold={"limit": 20}))
    assert pool.ledger().tiers["gold"].limit == 10


# -- less than is used ------------------------------------------------------------------------------------------------


def test_where_a_limit_falls_below_what_is_used_cached_blocks_go_at_once_least_recent_first() -> None:
    scene = Scene(20, gold={"nominal": 10})
    scene.cache("gold", "abcd")
    scene.now = 1
    scene.cache("gold", "wxyz")
    scene.quotas(gold={"nominal": 5, "limit": 5})
    assert (scene.used("gold"), scene.cached_of("wxyz"), scene.cached_of("abcd")) == (5, 4, 1)


def test_and_held_blocks_drain() -> None:
    scene = Scene(20, gold={"nominal": 10}, bronze={})
    request = scene.run("gold", "abcdefgh", extra=0)
    scene.cache("gold", "xy")
    scene.quotas(gold={"nominal": 5, "limit": 5}, bronze={})
    assert (scene.account("gold").held, scene.account("gold").cached) == (8, 0)
    scene.release(request)
    assert (scene.account("gold").held, scene.account("gold").cached) == (0, 5)
    assert scene.cached_of("abcdefgh") == 5


def test_a_request_above_a_fallen_limit_ends_or_yields_when_it_grows() -> None:
    scene = Scene(20, gold={"nominal": 10}, bronze={})
    old, young = scene.run("gold", "abcd"), scene.run("gold", "wxyz")
    scene.quotas(gold={"nominal": 3, "limit": 3}, bronze={})
    assert scene.grow(young) == Yielded([])
    assert isinstance(scene.grow(old), Ended)


def test_lending_and_retention_hold_for_blocks_that_are_there_already() -> None:
    scene = Scene(20, gold={"nominal": 10})
    scene.cache("gold", "abcd")
    scene.now = 10
    scene.quotas(gold={"nominal": 10, "retention": 11})
    assert scene.account("gold").lapsed == 0
    scene.quotas(gold={"nominal": 10, "retention": 10})
    assert scene.account("gold").lapsed == 4
    scene.quotas(gold={"nominal": 10})
    assert scene.account("gold").lapsed == 0


# -- tiers that are left out ------------------------------------------------------------------------------------------


def test_a_tier_that_is_left_out_is_emptied_and_then_forgotten() -> None:
    scene = Scene(20, gold={"nominal": 10}, bronze={"nominal": 5})
    running = scene.run("bronze", "abc", extra=0)
    scene.cache("bronze", "xyz")
    scene.quotas(gold={"nominal": 10})
    account = scene.account("bronze")
    assert (account.nominal, account.effective, account.limit, account.slots.nominal) == (0, 0, 0, 0)
    assert (account.held, account.cached) == (3, 0)
    scene.release(running)
    assert set(scene.pool.ledger().tiers) == {"gold"}
    assert scene.free == 20


def test_it_takes_no_new_requests_and_ends_those_that_wait() -> None:
    scene = Scene(20, gold={"nominal": 10}, bronze={"nominal": 5})
    running, waiting = scene.run("bronze", "abc"), scene.wait("bronze", "x")
    scene.quotas(gold={"nominal": 10})
    with pytest.raises(UnknownTier, match=r"the tiers are: gold$"):
        scene.wait("bronze", "z")
    assert isinstance(scene.offer(waiting), Ended)
    scene.release(waiting)
    assert isinstance(scene.grow(running), Ended)


def test_what_others_use_of_it_moves_to_them_at_their_next_hit() -> None:
    scene = Scene(20, gold={"nominal": 5}, bronze={"nominal": 5})
    scene.cache("bronze", "abc")
    gold = scene.run("gold", "abcd", extra=0)
    scene.quotas(gold={"nominal": 5})
    assert scene.owners("abcd") == ["bronze", "bronze", "bronze", "gold"]
    scene.run("gold", "abcde", extra=0)
    assert scene.owners("abcde") == ["gold"] * 5
    scene.release(gold)
    assert scene.cached_of("abcde") == 5


def test_it_comes_back_with_its_blocks() -> None:
    scene = Scene(20, gold={"nominal": 10}, bronze={"nominal": 5})
    scene.run("bronze", "abc", extra=0)
    scene.quotas(gold={"nominal": 10})
    scene.quotas(gold={"nominal": 10}, bronze={"nominal": 5})
    assert (scene.account("bronze").held, scene.account("bronze").limit) == (3, 20)
    assert isinstance(scene.offer(scene.wait("bronze", "z")), Admitted)


def test_with_the_first_quotas_tiers_that_they_do_not_name_are_emptied() -> None:
    scene = Scene(20)
    scene.cache("gold", "abc")
    scene.cache("green", "xyz")
    scene.quotas(gold={"nominal": 10})
    assert set(scene.pool.ledger().tiers) == {"gold"}
    assert (scene.cached_of("abc"), scene.cached_of("xyz")) == (3, 0)


# -- slots ------------------------------------------------------------------------------------------------------------


def test_slots_are_apportioned_like_nominal() -> None:
    scene = Scene(20, slots=10, public=2, gold={"nominal": 10}, silver={"nominal": 1}, spot={})
    slots = {name: account.slots.nominal for name, account in scene.pool.ledger().tiers.items()}
    assert slots == {"gold": 5, "silver": 1, "spot": 0}
    assert scene.pool.ledger().max_sequences == 10


def test_free_slots_are_lent_to_anyone() -> None:
    scene = Scene(20, slots=4, gold={"nominal": 10}, spot={})
    for letter in "abcd":
        scene.run("spot", letter, extra=0)
    assert scene.account("spot").slots.running == 4


def test_a_tier_under_its_slots_gets_one_back() -> None:
    """Four slots full of best effort, and a critical request arrives: it starts at once."""
    scene = Scene(20, slots=4, gold={"nominal": 10}, spot={})
    spot = [scene.run("spot", letter, extra=0) for letter in "abcd"]
    answer = scene.admitted(scene.wait("gold", "x"))
    assert answer.preempted == [spot[3]]
    assert spot[3].reclaims == 1


def test_as_many_slots_come_back_as_the_request_has_sequences() -> None:
    scene = Scene(20, slots=4, gold={"nominal": 20}, spot={})
    spot = [scene.run("spot", letter, extra=0) for letter in "abcd"]
    assert scene.admitted(scene.wait("gold", "x", n=2)).preempted == [spot[3], spot[2]]


def test_a_tier_at_its_slots_waits_like_anyone_else() -> None:
    scene = Scene(20, slots=4, gold={"nominal": 10}, silver={"nominal": 10})
    for letter in "ab":
        scene.run("gold", letter, extra=0)
    silver = [scene.run("silver", letter, extra=0) for letter in "wx"]
    request = scene.wait("gold", "c", extra=0)
    assert scene.offer(request) == Waiting(WaitReason.SLOTS)
    scene.release(silver[0])
    scene.admitted(request)


def test_a_tier_at_its_slots_does_not_take_them_from_those_who_borrow_others() -> None:
    scene = Scene(20, slots=5, gold={"nominal": 8}, silver={"nominal": 8}, spot={})
    for letter in "ab":
        scene.run("gold", letter, extra=0)
    spot = [scene.run("spot", letter, extra=0) for letter in "xyz"]
    assert scene.offer(scene.wait("gold", "c", extra=0)) == Waiting(WaitReason.SLOTS)
    assert scene.pool.running[2:] == tuple(spot)


def test_a_request_beyond_its_nominal_blocks_preempts_nobody_for_a_slot() -> None:
    scene = Scene(20, slots=2, gold={"nominal": 2}, spot={})
    spot = [scene.run("spot", letter, extra=0) for letter in "ab"]
    assert scene.offer(scene.wait("gold", "xyz")) == Waiting(WaitReason.SLOTS)
    assert list(scene.pool.running) == spot
