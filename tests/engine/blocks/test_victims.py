"""Who gives way, in order, when a request needs a block and none is free."""

from __future__ import annotations

import pytest

from cacheaware_engine.blocks import Ended, Grown, Waiting, Yielded

from .scene import Scene

# -- which cached block -----------------------------------------------------------------------------------------------


def test_lapsed_blocks_go_first_even_those_of_an_owner_within_its_quota() -> None:
    scene = Scene(9, gold={"nominal": 4, "retention": 5}, bronze={"nominal": 4, "effective": 1})
    scene.cache("bronze", "wxyz")  # three over its effective quota, and older
    scene.now = 1
    scene.cache("gold", "abcd")
    scene.now = 6
    scene.run("gold", "qr", extra=0)
    assert (scene.cached_of("wxyz"), scene.cached_of("abcd")) == (4, 3)


def test_then_blocks_of_the_owner_furthest_over_its_effective_quota() -> None:
    scene = Scene(10, gold={"nominal": 4}, silver={"nominal": 3, "effective": 2}, bronze={"nominal": 3, "effective": 1})
    scene.cache("silver", "qrs")
    scene.now = 1
    scene.cache("bronze", "wxyz")
    scene.run("gold", "abcd", extra=0)  # three were free
    assert (scene.cached_of("qrs"), scene.cached_of("wxyz")) == (3, 3)


def test_among_owners_equally_far_over_the_less_important_gives_way() -> None:
    scene = Scene(9, gold={"nominal": 3, "priority": 100}, silver={"nominal": 3, "priority": 50}, bronze={"nominal": 3})
    scene.cache("silver", "qrst")
    scene.now = 1
    scene.cache("bronze", "wxyz")
    scene.run("gold", "ab", extra=0)
    assert (scene.cached_of("qrst"), scene.cached_of("wxyz")) == (4, 3)


def test_the_asker_counts_the_block_it_asks_for_as_used() -> None:
    scene = Scene(9, gold={"nominal": 4, "priority": 100}, bronze={"nominal": 4})
    scene.cache("gold", "abcde")  # one over
    scene.now = 1
    scene.cache("bronze", "wxyz")
    scene.run("bronze", "q", extra=0)  # would be its fifth: one over too, and less important
    assert (scene.cached_of("abcde"), scene.cached_of("wxyz")) == (5, 3)


def test_then_what_others_cache_beyond_their_nominal_for_a_request_within_its_own() -> None:
    scene = Scene(8, gold={"nominal": 4, "effective": 2}, bronze={"nominal": 4, "effective": 6})
    scene.cache("bronze", "uvwxyz")
    scene.run("gold", "abcd", extra=0)
    assert scene.cached_of("uvwxyz") == 4
    assert scene.account("bronze").reclaimed_total == 2


def test_then_the_askers_own_cached_blocks() -> None:
    scene = Scene(8, gold={"nominal": 4, "effective": 4}, bronze={"nominal": 4, "effective": 4})
    scene.cache("bronze", "xyz")
    scene.cache("gold", "abcd")
    scene.run("gold", "qr", extra=0)
    assert (scene.cached_of("abcd"), scene.cached_of("xyz")) == (3, 3)


def test_then_for_growth_any_cached_block_the_least_recent_first() -> None:
    scene = Scene(9, gold={"nominal": 4}, silver={"nominal": 3}, bronze={"nominal": 2})
    scene.cache("silver", "uvw")
    scene.now = 1
    scene.cache("gold", "abcd")
    request = scene.run("bronze", "q")
    assert isinstance(scene.grow(request), Grown)
    assert (scene.cached_of("uvw"), scene.cached_of("abcd")) == (2, 4)


def test_for_an_admission_beyond_nominal_it_is_not_any_cached_block() -> None:
    scene = Scene(9, gold={"nominal": 4}, silver={"nominal": 3}, bronze={"nominal": 2})
    scene.cache("silver", "uvw")
    scene.cache("gold", "abcd")
    assert isinstance(scene.offer(scene.wait("bronze", "qrs", extra=0)), Waiting)


def test_the_least_recent_block_goes_first_and_a_use_by_any_tier_is_recent() -> None:
    scene = Scene(8, gold={"nominal": 8, "priority": 100}, bronze={})
    scene.cache("gold", "ab")
    scene.cache("gold", "wx")
    scene.now = 1
    scene.cache("bronze", "abq")
    scene.now = 2
    scene.run("gold", "01234", extra=0)  # bronze's q goes, being over its quota, and one of gold's own
    assert (scene.cached_of("abq"), scene.cached_of("wx")) == (2, 1)


def test_a_block_with_a_resident_child_stays_and_of_one_text_the_tail_goes_first() -> None:
    scene = Scene(6, gold={"nominal": 6})
    scene.cache("gold", "abcdef")
    for left in (5, 4, 3):
        scene.run("gold", "xyz"[left % 3], extra=0, salt=bytes([left]))
        assert scene.cached_of("abcdef") == left


def test_idle_public_blocks_give_way_to_growth_only() -> None:
    scene = Scene(7, public=3, gold={"nominal": 2}, bronze={"nominal": 2})
    scene.pool.set_public({"hello": scene.keys("pqr")})
    scene.cache("bronze", "pqr")
    request = scene.run("bronze", "uvw", salt=b"x")
    assert isinstance(scene.offer(scene.wait("gold", "abc", extra=0)), Waiting)
    assert scene.cached_of("pqr") == 3
    assert isinstance(scene.grow(request), Grown)
    assert scene.cached_of("pqr") == 2


# -- which running request --------------------------------------------------------------------------------------------


def test_reclaim_takes_the_tier_most_over_its_nominal() -> None:
    scene = Scene(12, gold={"nominal": 6}, silver={"nominal": 4}, bronze={"nominal": 2})
    silver = scene.run("silver", "qrstu", extra=0)  # one over
    bronze = scene.run("bronze", "tuvwxyz", extra=0)  # five over
    answer = scene.admitted(scene.wait("gold", "ab", extra=0))
    assert answer.preempted == [bronze]
    assert silver in scene.pool.running


def test_then_the_less_important_tier_then_the_youngest_request() -> None:
    scene = Scene(12, gold={"nominal": 8}, silver={"nominal": 2, "priority": 50}, bronze={"nominal": 2})
    silver = [scene.run("silver", text, extra=0) for text in ("abc", "def")]
    bronze = [scene.run("bronze", text, extra=0) for text in ("uvw", "xyz")]
    assert scene.admitted(scene.wait("gold", "0", extra=0)).preempted == [bronze[1]]
    assert silver[1] in scene.pool.running


@pytest.mark.parametrize(
    ("nominal", "preempted"),
    [
        pytest.param(2, "old", id="reclaimed twice makes a request the last to be preempted"),
        pytest.param(0, "young", id="a tier without nominal has no such protection"),
    ],
)
def test_a_request_that_was_reclaimed_twice(nominal: int, preempted: str) -> None:
    scene = Scene(12, gold={"nominal": 8}, bronze={"nominal": nominal})
    requests = {"old": scene.run("bronze", "abcd", extra=0), "young": scene.wait("bronze", "uvwxyz", extra=0)}
    for turn in range(2):
        scene.admitted(requests["young"])
        scene.release(scene.run("gold", "0123", extra=0, salt=bytes([turn])))
        assert requests["young"].reclaims == turn + 1
        scene.now += 1
        scene.quotas(gold={"nominal": 8, "effective": 0}, bronze={"nominal": nominal})  # what gold cached may go
    scene.admitted(requests["young"])
    assert scene.admitted(scene.wait("gold", "4567", extra=0)).preempted == [requests[preempted]]


def test_protection_is_not_immunity() -> None:
    scene = Scene(8, gold={"nominal": 6}, bronze={"nominal": 2})
    request = scene.wait("bronze", "abcd", extra=0)
    for turn in range(3):
        scene.admitted(request, idle=True)
        scene.release(scene.run("gold", "012345", extra=0, salt=bytes([turn])))
    assert request.reclaims == 3


def test_a_reclaim_frees_the_preemptors_room_once_and_it_keeps_it() -> None:
    """Two holders are over their nominal; each is evicted once, and the preemptor runs until it has finished."""
    scene = Scene(12, gold={"nominal": 10}, bronze={"nominal": 1}, iron={"nominal": 1})
    bronze, iron = scene.run("bronze", "abcdef", extra=0), scene.run("iron", "uvwxyz", extra=0)
    gold = scene.wait("gold", "0123456789", extra=0)
    assert sorted(request.id for request in scene.admitted(gold).preempted) == ["bronze-1", "iron-2"]
    for _ in range(5):
        assert isinstance(scene.offer(bronze), Waiting)
        assert isinstance(scene.offer(iron), Waiting)
        assert scene.pool.running == (gold,)
    scene.compute(gold)
    scene.release(gold)
    scene.admitted(bronze, idle=True)
    assert (bronze.reclaims, iron.reclaims) == (1, 1)


def test_a_tier_without_nominal_never_reclaims() -> None:
    scene = Scene(8, gold={"nominal": 4}, spot={"priority": 100})
    scene.run("gold", "abcdefgh", extra=0)
    assert isinstance(scene.offer(scene.wait("spot", "x", extra=0)), Waiting)


# -- growth -----------------------------------------------------------------------------------------------------------


def test_growth_within_nominal_reclaims() -> None:
    scene = Scene(8, gold={"nominal": 4}, bronze={"nominal": 4})
    gold = scene.run("gold", "a")
    bronze = scene.run("bronze", "uvwxyz", extra=0)
    assert isinstance(scene.grow(gold), Grown | Yielded)
    assert bronze in scene.pool.waiting
    assert bronze.reclaims == 1


def test_growth_at_nominal_does_not_reclaim() -> None:
    scene = Scene(9, gold={"nominal": 3}, bronze={"nominal": 4})
    bronze = scene.run("bronze", "uvwxyz", extra=0)
    gold = scene.run("gold", "ab")
    assert scene.used("gold") == 3
    assert scene.grow(gold) == Yielded([])
    assert bronze in scene.pool.running


def test_an_older_request_within_its_nominal_makes_a_younger_one_of_its_tier_yield_where_reclaim_finds_nobody() -> None:
    """Silver is over its nominal, but bronze's request holds what is too much; so gold's own younger one gives way."""
    scene = Scene(8, gold={"nominal": 4, "priority": 100}, silver={"nominal": 1}, bronze={"nominal": 3, "priority": -1})
    scene.cache("silver", "abc")
    scene.run("bronze", "abcxyz", extra=0)
    old = scene.wait("gold", "qr", extra=0)
    young = scene.run("gold", "st", extra=0)
    assert (scene.free, scene.used("silver")) == (0, 3)
    assert scene.admitted(old).preempted == [young]
    assert young.reclaims == 0


def test_growth_beyond_nominal_makes_the_youngest_borrower_yield_if_it_is_younger() -> None:
    scene = Scene(9, gold={"nominal": 1}, silver={"nominal": 2}, bronze={"nominal": 1})
    old = scene.run("gold", "ab")
    within = scene.run("silver", "uv", extra=0)
    young = scene.run("bronze", "wxyz", extra=0)
    answer = scene.grow(old)
    assert isinstance(answer, Grown)
    assert answer.preempted == [young]
    assert young.reclaims == 0  # a yield is no reclaim
    assert within in scene.pool.running


def test_the_youngest_yields_itself_and_keeps_its_full_blocks_cached() -> None:
    scene = Scene(8, gold={"nominal": 4}, bronze={"nominal": 2})
    scene.run("gold", "abcd", extra=0)
    young = scene.run("bronze", "xyz")
    assert scene.grow(young) == Yielded([])
    assert scene.pool.waiting == (young,)
    assert scene.cached_of("xyz") == 3
    assert scene.account("bronze").preempted_total == 1


def test_a_resumed_request_hits_what_it_had() -> None:
    scene = Scene(8, gold={"nominal": 4}, bronze={"nominal": 2})
    gold = scene.run("gold", "abcd", extra=0)
    young = scene.run("bronze", "xyz")
    scene.grow(young)
    scene.release(gold)
    young.keys, young.blocks = [scene.keys("xyz")], [4]
    assert scene.admitted(young, idle=True).hit_blocks == [3]


def test_one_that_gets_no_block_while_nothing_else_runs_ends_by_length() -> None:
    scene = Scene(4, gold={"nominal": 4})
    request = scene.run("gold", "abc")
    answer = scene.grow(request)
    assert isinstance(answer, Ended)
    assert answer.reason == "length"
    assert request in scene.pool.running  # the caller gives it back
    scene.release(request)


def test_no_sequence_grows_beyond_what_it_may_ever_need() -> None:
    scene = Scene(9, gold={"nominal": 9})
    request = scene.run("gold", "abc", extra=1)
    assert isinstance(scene.grow(request), Ended)
    assert len(request.tables[0]) == 4


# -- at the limit -----------------------------------------------------------------------------------------------------


def test_at_its_limit_a_tier_gives_up_its_own_cached_blocks_while_others_have_free_ones() -> None:
    scene = Scene(20, gold={"nominal": 4, "limit": 6}, bronze={"nominal": 10})
    scene.cache("gold", "abcd")
    scene.run("gold", "wxyz", extra=0)
    assert scene.used("gold") == 6
    assert scene.cached_of("abcd") == 2


def test_at_its_limit_what_others_cache_behind_its_blocks_goes_with_them() -> None:
    scene = Scene(20, gold={"nominal": 3, "limit": 3}, bronze={"nominal": 10, "priority": -1})
    scene.cache("gold", "abc")
    scene.cache("bronze", "abcde")
    scene.run("gold", "xyz", extra=0)
    assert scene.used("gold") == 3
    assert (scene.cached_of("abcde"), scene.used("bronze")) == (0, 0)


def test_at_its_limit_the_blocks_that_the_request_hits_stay() -> None:
    scene = Scene(20, gold={"nominal": 5, "limit": 5})
    scene.cache("gold", "abc")
    scene.cache("gold", "xy")
    assert scene.admitted(scene.wait("gold", "abcd", extra=8)).hit_blocks == [3]
    assert scene.cached_of("xy") == 0


def test_at_its_limit_growth_makes_a_younger_request_of_its_tier_yield() -> None:
    scene = Scene(20, gold={"nominal": 4, "limit": 6}, bronze={"nominal": 10})
    old, young = scene.run("gold", "ab"), scene.run("gold", "xy")
    other = scene.run("bronze", "q")
    answer = scene.grow(old)
    assert isinstance(answer, Grown)
    assert answer.preempted == [young]
    assert other in scene.pool.running


def test_at_its_limit_the_youngest_of_its_tier_yields_itself() -> None:
    scene = Scene(20, gold={"nominal": 4, "limit": 6}, bronze={"nominal": 10})
    scene.run("gold", "ab")
    young = scene.run("gold", "xy")
    assert scene.grow(young) == Yielded([])


def test_at_its_limit_a_request_alone_in_its_tier_ends_by_length() -> None:
    scene = Scene(20, gold={"nominal": 4, "limit": 4}, bronze={"nominal": 10})
    request = scene.run("gold", "abc")
    scene.run("bronze", "xyz")
    answer = scene.grow(request)
    assert isinstance(answer, Ended)
    assert answer.why == "tier gold is at its limit of 4 blocks"


@pytest.mark.parametrize("sequence", [0, 1])
def test_each_sequence_of_a_request_grows_by_itself(sequence: int) -> None:
    scene = Scene(20, gold={"nominal": 20})
    request = scene.run("gold", "abc", n=2)
    scene.grow(request, sequence)
    assert [len(table) for table in request.tables] == [4 + (sequence == 0), 4 + (sequence == 1)]


def test_the_sequences_of_a_request_are_preempted_together() -> None:
    scene = Scene(10, gold={"nominal": 6}, bronze={"nominal": 4})
    request = scene.run("bronze", "uvwx", n=3, extra=4)
    assert scene.admitted(scene.wait("gold", "abcd", extra=0)).preempted == [request]
    assert request.tables == [[], [], []]
    assert scene.account("bronze").slots.running == 0
    assert scene.account("bronze").preempted_total == 1


# -- where prefixes are shared across tiers ---------------------------------------------------------------------------


def test_an_owner_all_of_whose_cached_blocks_lead_to_others_gives_its_least_recent_one_with_what_is_below() -> None:
    scene = Scene(10, gold={"nominal": 5, "priority": 100}, bronze={"nominal": 5})
    for letters in ("abcw", "defx"):
        scene.cache("bronze", letters)
        scene.cache("gold", letters[:3] + "-")  # hits three of them: gold's now, above what bronze keeps
        scene.now += 1
    assert scene.used("gold") > 5
    asks = scene.wait("gold", "pqr", extra=0)
    scene.admitted(asks)  # within its nominal, so it does not wait, though blocks of bronze are below all that it has
    assert scene.cached_of("defx") == 4
    assert scene.cached_of("abcw") < 3
