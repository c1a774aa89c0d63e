"""Admission: for the whole request or not at all, decided before anything is evicted or moved."""

from __future__ import annotations

import pytest

from cacheaware_engine.blocks import Admitted, Ended, NeverFits, Waiting, WaitReason

from .scene import Scene


def test_a_request_is_admitted_with_all_its_blocks_and_one_to_grow_into() -> None:
    scene = Scene(10, gold={"nominal": 10})
    request = scene.wait("gold", "abc")
    scene.admitted(request)
    assert len(request.tables[0]) == 4


def test_no_request_gets_more_blocks_than_it_can_ever_need() -> None:
    scene = Scene(10, gold={"nominal": 10})
    request = scene.wait("gold", "abc", extra=0)
    scene.admitted(request)
    assert len(request.tables[0]) == 3


@pytest.mark.parametrize(
    ("gold", "bronze", "public", "most"),
    [
        pytest.param({"nominal": 4, "limit": 6}, {}, 0, 6, id="its limit"),
        pytest.param({}, {"nominal": 8, "lending": 3}, 0, 15, id="what others do not lend"),
        pytest.param({}, {"nominal": 8}, 4, 16, id="the public share"),
        pytest.param({"limit": 12}, {"nominal": 8, "lending": 3}, 4, 11, id="all of them"),
    ],
)
def test_a_request_that_could_never_fit_is_refused_on_arrival(
    gold: dict[str, int], bronze: dict[str, int], public: int, most: int
) -> None:
    scene = Scene(20, public=public, gold=gold, bronze=bronze)
    scene.wait("gold", "x" * (most - 1))
    with pytest.raises(NeverFits, match=rf"needs {most + 1} blocks of 1 tokens .* can get at most {most}:"):
        scene.wait("gold", "x" * most)
    assert len(scene.pool.waiting) == 1


def test_hits_do_not_make_a_request_smaller_for_that_check_but_public_blocks_do() -> None:
    scene = Scene(20, public=3, gold={"nominal": 5, "limit": 5})
    scene.pool.set_public({"hello": scene.keys("pqr")})
    scene.cache("gold", "abcd")
    with pytest.raises(NeverFits):
        scene.wait("gold", "abcde")
    scene.wait("gold", "pqrabcd")


def test_the_refusal_says_the_arithmetic() -> None:
    scene = Scene(20, public=2, gold={"nominal": 4, "limit": 6}, bronze={"nominal": 8, "lending": 3})
    with pytest.raises(NeverFits) as refusal:
        scene.wait("gold", "abcdef", n=2)
    assert str(refusal.value) == (
        "tier gold: the request needs 8 blocks of 1 tokens at once (what it has and one to grow into for each of 2 "
        "sequences), but can get at most 6: the tier's limit is 6, and of 20 blocks the other tiers and the public "
        "share leave it 13; shorten it or raise the limit"
    )


def test_a_waiter_that_no_longer_fits_ends_and_says_why() -> None:
    scene = Scene(10, gold={"nominal": 10})
    request = scene.wait("gold", "abcdef")
    scene.quotas(gold={"nominal": 4, "limit": 4})
    answer = scene.offer(request)
    assert isinstance(answer, Ended)
    assert (answer.reason, request.started) == ("length", False)
    assert "at most 4" in answer.why
    scene.release(request)


def test_a_resumed_request_that_no_longer_fits_ends_by_length() -> None:
    scene = Scene(10, gold={"nominal": 10, "priority": 100}, bronze={})
    request = scene.run("bronze", "abcdef", extra=0)
    scene.run("gold", "uvwxyz", extra=0)
    scene.quotas(gold={"nominal": 10}, bronze={"limit": 4})
    answer = scene.offer(request)
    assert isinstance(answer, Ended)
    assert (answer.reason, request.started) == ("length", True)


# -- within nominal ---------------------------------------------------------------------------------------------------


def test_a_request_within_its_nominal_preempts_borrowers() -> None:
    scene = Scene(10, gold={"nominal": 6}, bronze={"nominal": 4})
    borrower = scene.run("bronze", "qrstuvwx", extra=0)
    answer = scene.admitted(scene.wait("gold", "abcde"))
    assert answer.preempted == [borrower]
    assert scene.account("gold").held == 6


def test_a_request_within_its_nominal_evicts_what_others_cache_beyond_theirs() -> None:
    scene = Scene(10, gold={"nominal": 6, "effective": 1}, bronze={"nominal": 4, "effective": 9})
    scene.cache("bronze", "qrstuvwxy")
    scene.admitted(scene.wait("gold", "abcde"))
    assert (scene.used("bronze"), scene.account("bronze").reclaimed_total) == (4, 5)


def test_blocks_that_its_tier_holds_already_are_not_counted_again() -> None:
    scene = Scene(20, gold={"nominal": 7}, bronze={"nominal": 13})
    scene.run("gold", "abcd", extra=0)
    scene.run("bronze", "qrstuvwxyzABCDEF", extra=0)
    assert isinstance(scene.offer(scene.wait("gold", "abcdefg", extra=0)), Admitted)  # three more: 7 in all


@pytest.mark.parametrize(
    ("nominal", "entitled"), [pytest.param(5, True, id="within"), pytest.param(4, False, id="beyond")]
)
def test_blocks_that_move_to_its_tier_count_even_if_others_hold_them_already(nominal: int, entitled: bool) -> None:
    scene = Scene(10, gold={"nominal": nominal, "priority": 100}, bronze={"nominal": 5})
    scene.run("bronze", "abc", extra=0)
    borrower = scene.run("bronze", "tuvwxyz", extra=0)
    answer = scene.offer(scene.wait("gold", "abcde", extra=0))  # three move, two are new
    if entitled:
        assert isinstance(answer, Admitted)
        assert answer.preempted == [borrower]
    else:
        assert answer == Waiting(WaitReason.ROOM)


def test_a_more_important_tier_preempts_nobody_for_what_is_beyond_its_nominal() -> None:
    scene = Scene(10, gold={"nominal": 2, "priority": 100}, bronze={"nominal": 8})
    bronze = scene.run("bronze", "stuvwxyz", extra=0)
    assert scene.offer(scene.wait("gold", "abc")) == Waiting(WaitReason.ROOM)
    assert bronze in scene.pool.running


# -- beyond nominal ---------------------------------------------------------------------------------------------------


def test_a_request_beyond_its_nominal_takes_free_blocks() -> None:
    scene = Scene(10, gold={"nominal": 6}, bronze={"nominal": 4})
    assert isinstance(scene.offer(scene.wait("bronze", "abcdefghi")), Admitted)


def test_a_request_beyond_its_nominal_takes_lapsed_blocks() -> None:
    scene = Scene(10, gold={"nominal": 6, "retention": 5}, bronze={"nominal": 4})
    scene.cache("gold", "uvwxyz")
    request = scene.wait("bronze", "abcdef")
    assert scene.offer(request) == Waiting(WaitReason.ROOM)
    scene.now = 5
    scene.admitted(request)
    assert scene.cached_of("uvwxyz") == 3


def test_a_request_beyond_its_nominal_takes_what_others_cache_beyond_their_effective_quota() -> None:
    scene = Scene(10, gold={"nominal": 6, "effective": 3}, bronze={"nominal": 4})
    scene.cache("gold", "uvwxyz")
    scene.admitted(scene.wait("bronze", "abcdef"))
    assert scene.cached_of("uvwxyz") == 3


def test_a_request_beyond_its_nominal_takes_its_own_tiers_cached_blocks() -> None:
    scene = Scene(10, gold={"nominal": 6}, bronze={"nominal": 4})
    scene.cache("gold", "uvwxyz")
    scene.cache("bronze", "qrst")
    assert scene.offer(scene.wait("bronze", "abcd")) == Waiting(WaitReason.ROOM)
    assert isinstance(scene.offer(scene.wait("bronze", "abcd", extra=0)), Admitted)
    assert scene.cached_of("uvwxyz") == 6


def test_what_a_tier_caches_within_its_effective_quota_is_safe_from_requests_beyond_nominal() -> None:
    scene = Scene(10, gold={"nominal": 6}, bronze={"nominal": 4})
    scene.cache("gold", "uvwxyz")
    for _ in range(20):
        request = scene.wait("bronze", "abcde")
        assert scene.offer(request) == Waiting(WaitReason.ROOM)
        scene.release(request)
    assert scene.cached_of("uvwxyz") == 6


def test_others_are_not_admitted_into_nominal_that_a_tier_does_not_lend() -> None:
    scene = Scene(10, gold={"nominal": 6, "lending": 2}, bronze={"nominal": 2})
    scene.run("bronze", "abcd", extra=0)
    assert scene.offer(scene.wait("bronze", "xyz", extra=0)) == Waiting(WaitReason.LENDING)
    assert scene.free == 6


def test_what_the_lender_holds_counts_as_used_of_what_it_keeps() -> None:
    scene = Scene(10, gold={"nominal": 6, "lending": 2}, bronze={"nominal": 2})
    scene.run("gold", "uvwx", extra=0)
    scene.run("bronze", "abcdef", extra=0)
    assert scene.free == 0


def test_growth_may_pass_what_a_tier_lends() -> None:
    scene = Scene(10, gold={"nominal": 6, "lending": 2}, bronze={"nominal": 2})
    request = scene.run("bronze", "abcde")
    assert type(scene.grow(request)).__name__ == "Grown"
    assert scene.used("bronze") == 7


def test_a_tier_at_its_limit_waits_for_its_own_requests() -> None:
    scene = Scene(20, gold={"nominal": 6, "limit": 8}, bronze={"nominal": 2})
    scene.run("gold", "abcde")
    assert scene.offer(scene.wait("gold", "xyz", extra=0)) == Waiting(WaitReason.LIMIT)
    assert isinstance(scene.offer(scene.wait("bronze", "xyz")), Admitted)


def test_a_waiter_has_changed_nothing() -> None:
    scene = Scene(10, gold={"nominal": 6, "retention": 5}, bronze={"nominal": 4, "limit": 6})
    scene.cache("gold", "abcdef")
    scene.cache("bronze", "uv")
    scene.now = 6
    request = scene.wait("gold", "abcxyz012")
    scene.run("bronze", "wxyz", extra=0)
    before = scene.pool.ledger()
    order = scene.pool._books.residents.lapsed_leaves.orders()
    for _ in range(3):
        assert isinstance(scene.offer(request), Waiting)
        assert scene.pool.ledger() == before
        assert scene.pool._books.residents.lapsed_leaves.orders() == order


def test_a_waiter_for_whom_the_granted_room_cannot_be_made_has_changed_nothing() -> None:
    """Bronze sits under gold's prefix: gold's request takes one block over, but r cannot be had back from bronze.

    Silver's two blocks are held by bronze's running request and not by silver's, so reclaim finds nobody to preempt.
    """
    scene = Scene(8, gold={"nominal": 3, "priority": 100}, silver={"nominal": 2, "priority": 50}, bronze={"nominal": 3})
    scene.cache("silver", "abcde")
    scene.run("bronze", "abcdexyz", extra=0)
    assert scene.owners("abcde") == ["silver"] * 5
    request = scene.wait("gold", "qr")
    before = scene.pool.ledger()
    assert scene.offer(request) == Waiting(WaitReason.ROOM)
    assert scene.pool.ledger() == before


def test_requests_that_were_preempted_for_nothing_run_on() -> None:
    """Preempting silver's request frees one block of the two that gold needs; the rest is held by bronze."""
    scene = Scene(8, gold={"nominal": 3, "priority": 100}, silver={"nominal": 1, "priority": 50}, bronze={"nominal": 4})
    scene.cache("silver", "abc")
    bronze = scene.run("bronze", "abcwxyz", extra=0)
    silver = scene.run("silver", "s", extra=0)
    tables = [list(silver.tables[0]), list(bronze.tables[0])]
    request = scene.wait("gold", "qr", extra=0)
    before = scene.pool.ledger()
    assert scene.offer(request) == Waiting(WaitReason.ROOM)
    assert scene.pool.ledger() == before
    assert [silver.tables[0], bronze.tables[0]] == tables
    assert scene.pool.running == (bronze, silver)
    assert silver.reclaims == 0


# -- order ------------------------------------------------------------------------------------------------------------


def test_a_request_beyond_its_nominal_does_not_overtake_an_older_one_of_its_tier() -> None:
    scene = Scene(10, gold={"nominal": 6}, bronze={"nominal": 2})
    scene.run("gold", "uvwxyz", extra=0)
    old, young = scene.wait("bronze", "abcdef"), scene.wait("bronze", "abc", extra=0)
    assert scene.offer(old) == Waiting(WaitReason.ROOM)
    assert scene.offer(young) == Waiting(WaitReason.OLDER)


def test_a_request_within_its_nominal_may_overtake() -> None:
    scene = Scene(10, gold={"nominal": 6}, bronze={"nominal": 2})
    scene.run("gold", "uvwxyz", extra=0)
    scene.wait("bronze", "abcdef")
    assert isinstance(scene.offer(scene.wait("bronze", "ab", extra=0)), Admitted)


def test_a_preempted_request_keeps_its_place_in_the_order() -> None:
    scene = Scene(10, gold={"nominal": 6}, bronze={"nominal": 4})
    old = scene.run("bronze", "qrstuvwx", extra=0)
    young = scene.wait("bronze", "abc")
    scene.admitted(scene.wait("gold", "abcde"))
    assert scene.pool.waiting == (old, young)


# -- an idle engine ---------------------------------------------------------------------------------------------------


def test_idle_cache_never_idles_the_engine() -> None:
    scene = Scene(10, gold={"nominal": 6}, bronze={"nominal": 4})
    scene.cache("gold", "uvwxyz")
    request = scene.wait("bronze", "abcdef")
    assert scene.offer(request) == Waiting(WaitReason.ROOM)
    scene.admitted(request, idle=True)
    assert scene.cached_of("uvwxyz") == 3


def test_lending_is_set_aside_in_an_idle_engine() -> None:
    scene = Scene(10, public=2, gold={"nominal": 4, "lending": 1}, bronze={"nominal": 4, "lending": 1})
    scene.pool.set_public({"hello": scene.keys("pq")})
    scene.cache("gold", "uvwx")
    scene.cache("bronze", "pqrs")
    request = scene.wait("bronze", "abcd")
    assert scene.offer(request) == Waiting(WaitReason.ROOM)
    scene.admitted(request, idle=True)


def test_it_means_nothing_while_something_runs() -> None:
    scene = Scene(10, gold={"nominal": 6}, bronze={"nominal": 4})
    scene.cache("gold", "uvwxyz")
    scene.run("bronze", "q", extra=0)
    assert scene.offer(scene.wait("bronze", "abcdef"), idle=True) == Waiting(WaitReason.ROOM)
