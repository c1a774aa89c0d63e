"""The words of quota: held, cached, used, borrowed, lent, lapsed; and what the counters count."""

from __future__ import annotations

import pytest

from cacheaware_engine.blocks import BlockPool, NeverFits, Request, UnknownTier, Waiting

from .scene import Scene


def test_a_partial_block_is_charged_whole_while_held_and_freed_on_release() -> None:
    scene = Scene(10, gold={"nominal": 10})
    request = scene.run("gold", "abc")
    assert (scene.account("gold").held, scene.free) == (4, 6)  # three and one to grow into
    scene.release(request)
    assert (scene.account("gold").held, scene.account("gold").cached, scene.free) == (0, 3, 7)


def test_blocks_that_were_never_computed_are_not_cached() -> None:
    scene = Scene(10, gold={"nominal": 10})
    request = scene.wait("gold", "abc")
    scene.admitted(request)
    scene.release(request)
    assert scene.free == 10


def test_a_second_release_does_nothing() -> None:
    scene = Scene(10, gold={"nominal": 10})
    first, second = scene.run("gold", "abc"), scene.run("gold", "abc")
    scene.release(first, first)
    assert scene.account("gold").held == 4
    scene.release(second)
    assert scene.account("gold").held == 0


def test_requests_with_a_common_beginning_hold_its_blocks_once() -> None:
    scene = Scene(20, gold={"nominal": 20})
    scene.run("gold", "abcd")
    answer = scene.admitted(scene.wait("gold", "abxyz"))
    assert answer.hit_blocks == [2]
    assert scene.account("gold").held == 5 + 4


def test_equal_blocks_computed_at_the_same_time_become_one() -> None:
    scene = Scene(20, gold={"nominal": 20})
    first, second = scene.wait("gold", "abc"), scene.wait("gold", "abc")
    scene.admitted(first)
    scene.admitted(second)
    assert scene.account("gold").held == 8
    scene.compute(first)
    scene.compute(second)
    assert scene.account("gold").held == 3 + 1 + 1
    assert first.tables[0][:3] == second.tables[0][:3]


def test_the_sequences_of_a_request_hold_their_prompt_once_and_a_tail_each() -> None:
    scene = Scene(20, gold={"nominal": 20})
    request = scene.run("gold", "abc", n=3)
    assert scene.account("gold").held == 3 + 3
    assert [table[:3] for table in request.tables] == [request.tables[0][:3]] * 3
    assert len({table[3] for table in request.tables}) == 3


def test_a_sequence_that_ends_before_its_siblings_gives_back_its_own_tail() -> None:
    scene = Scene(20, gold={"nominal": 20})
    request = scene.run("gold", "abc", n=3)
    scene.pool.finish_sequence(request, 1)
    scene.pool.finish_sequence(request, 1)
    scene.pool.check_integrity()
    assert scene.account("gold").held == 3 + 2
    assert scene.account("gold").slots.running == 2
    scene.pool.finish_sequence(request, 0)
    scene.pool.finish_sequence(request, 2)
    assert scene.pool.running == ()
    assert scene.account("gold").held == 0


def test_used_and_free_sum_to_the_capacity_whatever_happens() -> None:
    scene = Scene(12, public=2, gold={"nominal": 5}, bronze={"nominal": 5})
    scene.pool.set_public({"hello": scene.keys("p")})
    for text in ("pabc", "pxyz", "pqrs"):
        scene.cache("bronze", text)
        ledger = scene.pool.ledger()
        used = sum(account.held + account.cached for account in ledger.tiers.values())
        assert used + ledger.public.held + ledger.public.cached + ledger.free == ledger.capacity


@pytest.mark.parametrize(
    ("gold_text", "borrowed", "lent"),
    [
        pytest.param("", 0, 0, id="nothing used"),
        pytest.param("abcd", 0, 0, id="within nominal"),
        pytest.param("abcdefgh", 3, 2, id="one block was nobody's, two are bronze's"),
    ],
)
def test_what_one_tier_uses_beyond_its_nominal_another_has_lent(gold_text: str, borrowed: int, lent: int) -> None:
    scene = Scene(10, gold={"nominal": 5}, bronze={"nominal": 4})
    if gold_text:
        scene.cache("gold", gold_text)
    assert (scene.account("gold").borrowed, scene.account("bronze").borrowed) == (borrowed, 0)
    assert (scene.account("gold").lent, scene.account("bronze").lent) == (0, lent)


def test_a_block_lapses_once_no_request_of_its_tier_held_it_for_the_retention() -> None:
    scene = Scene(10, gold={"nominal": 10, "retention": 5})
    request = scene.run("gold", "abc", extra=0)
    scene.now = 20
    assert scene.account("gold").lapsed == 0  # held: its retention does not run
    scene.release(request)
    scene.now = 24.9
    assert scene.account("gold").lapsed == 0
    scene.now = 25
    assert (scene.account("gold").lapsed, scene.account("gold").cached) == (3, 3)


def test_a_hit_by_its_tier_starts_the_retention_anew() -> None:
    scene = Scene(10, gold={"nominal": 10, "retention": 5})
    scene.cache("gold", "abc")
    scene.now = 4
    scene.cache("gold", "abx")
    scene.now = 6
    assert scene.account("gold").lapsed == 1  # only c, which nobody asked for again
    scene.now = 9
    assert scene.account("gold").lapsed == 4


def test_a_hit_by_another_tier_does_not_prolong_the_retention() -> None:
    scene = Scene(20, gold={"nominal": 10, "retention": 5, "priority": 100}, bronze={"nominal": 10})
    scene.cache("gold", "abc")
    scene.now = 3
    other = scene.run("bronze", "abcx", extra=0)
    scene.now = 6
    scene.release(other)
    assert scene.account("gold").lapsed == 3


def test_without_retention_a_block_never_lapses() -> None:
    scene = Scene(10, gold={"nominal": 10})
    scene.cache("gold", "abc")
    scene.now = 1e9
    assert scene.account("gold").lapsed == 0


def test_before_the_first_quotas_any_tier_is_known_and_all_share_one_lru() -> None:
    scene = Scene(6)
    for now, (tier, text) in enumerate([("gold", "abc"), ("bronze", "xyz"), ("gold", "abd"), ("green", "pq")]):
        scene.now = now
        scene.cache(tier, text)
    # The least recently used block goes first, whoever brought it: c and two of xyz made room for d and pq.
    assert [scene.cached_of(text) for text in ("abd", "xyz", "pq")] == [3, 1, 2]
    assert set(scene.pool.ledger().tiers) == {"gold", "bronze", "green"}


def test_a_tier_whose_only_request_was_refused_is_not_known_by_it() -> None:
    scene = Scene(6)
    with pytest.raises(NeverFits):
        scene.wait("gold", "abcdef")
    assert scene.pool.ledger().tiers == {}


def test_an_unknown_tier_is_refused_with_those_that_exist() -> None:
    scene = Scene(10, gold={}, bronze={})
    with pytest.raises(UnknownTier, match=r"unknown tier 'iron'; the tiers are: bronze, gold$"):
        scene.wait("iron", "abc")
    assert scene.pool.waiting == ()


def test_a_prompt_is_counted_once_however_often_it_was_deferred() -> None:
    scene = Scene(10, gold={"nominal": 10})
    scene.cache("gold", "abcd")
    blocker = scene.run("gold", "qrstuvwx", extra=0)
    before = scene.account("gold")
    request = scene.wait("gold", "abcxyz")
    for _ in range(5):
        assert isinstance(scene.offer(request), Waiting)
        assert scene.account("gold") == before
    scene.release(blocker)
    scene.admitted(request)
    after = scene.account("gold")
    assert after.query_tokens_total - before.query_tokens_total == 6
    assert after.hit_tokens_total - before.hit_tokens_total == 2  # c and d made room for the blocker


def test_a_prompt_of_three_sequences_is_counted_once() -> None:
    scene = Scene(20, gold={"nominal": 20})
    scene.cache("gold", "abc")
    assert scene.admitted(scene.wait("gold", "abcd", n=3)).hit_blocks == [3, 3, 3]
    account = scene.account("gold")
    assert (account.hit_tokens_total, account.query_tokens_total) == (3, 3 + 4)


def test_a_resumed_request_is_not_counted_again() -> None:
    scene = Scene(10, gold={"nominal": 10, "priority": 100}, bronze={})
    request = scene.run("bronze", "abcdefgh", extra=0)
    scene.run("gold", "uvwxyz", extra=0)
    assert request in scene.pool.waiting
    before = scene.account("bronze").query_tokens_total
    scene.release(*scene.pool.running)
    scene.admitted(request, idle=True)
    assert scene.account("bronze").query_tokens_total == before
    assert scene.account("bronze").preempted_total == 1


def test_two_salts_share_no_block_and_no_hit() -> None:
    scene = Scene(20, gold={"nominal": 20})
    scene.cache("gold", "abcd", salt=b"tenant a")
    assert scene.admitted(scene.wait("gold", "abcd", salt=b"tenant b")).hit_blocks == [0]
    assert scene.account("gold").hit_tokens_total == 0
    assert scene.admitted(scene.wait("gold", "abcd", salt=b"tenant a")).hit_blocks == [3]


def test_at_least_one_token_of_a_prompt_is_left_to_compute() -> None:
    scene = Scene(20, gold={"nominal": 20})
    scene.cache("gold", "abcd")
    assert scene.admitted(scene.wait("gold", "abcd")).hit_blocks == [3]


def test_the_sequence_number_grows_with_every_change_and_only_then() -> None:
    scene = Scene(10, gold={"nominal": 4}, bronze={"nominal": 6, "lending": 0})
    seen = [scene.pool.ledger().sequence]
    request = scene.wait("gold", "abc")
    seen.append(scene.pool.ledger().sequence)
    scene.admitted(request)
    seen.append(scene.pool.ledger().sequence)
    scene.compute(request)
    seen.append(scene.pool.ledger().sequence)
    scene.release(request)
    seen.append(scene.pool.ledger().sequence)
    assert seen == sorted(set(seen))
    assert scene.pool.ledger().sequence == seen[-1]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param({"keys": []}, "keys and blocks are needed for each of 1", id="keys missing"),
        pytest.param({"blocks": [0]}, r"blocks\[0\] is 0", id="no blocks"),
        pytest.param({"max_blocks": 2}, "max_blocks 2", id="more than it may ever need"),
        pytest.param({"prompt_blocks": 4}, r"blocks\[0\] is 3", id="a prompt longer than the sequence"),
        pytest.param({"blocks": [1], "prompt_blocks": 1}, "2 keys for 1 blocks", id="more keys than blocks"),
    ],
)
def test_a_request_that_contradicts_itself_is_a_fault_of_the_caller(change: dict[str, object], problem: str) -> None:
    scene = Scene(10, gold={"nominal": 10})
    request = scene.request("gold", "abc")
    for name, value in change.items():
        setattr(request, name, value)
    with pytest.raises(ValueError, match=problem):
        scene.pool.submit(request)
    assert scene.pool.waiting == ()


def test_filling_out_of_order_or_twice_differently_is_a_fault_of_the_caller() -> None:
    scene = Scene(10, gold={"nominal": 10})
    request = scene.wait("gold", "abc")
    with pytest.raises(ValueError, match="does not run"):
        scene.pool.fill(request, 0, 0, b"key")
    scene.admitted(request)
    keys = scene.keys("abc")
    with pytest.raises(ValueError, match="block 1 of request gold-1 cannot be filled before block 0"):
        scene.pool.fill(request, 0, 1, keys[1])
    scene.pool.fill(request, 0, 0, keys[0])
    with pytest.raises(ValueError, match="filled with another key"):
        scene.pool.fill(request, 0, 0, keys[1])
    with pytest.raises(ValueError, match="does not follow from its parent's"):
        scene.pool.fill(request, 0, 1, keys[0])
    scene.pool.check_integrity()


@pytest.mark.parametrize("name", ["capacity", "block_size", "max_sequences"])
def test_a_pool_of_nothing_is_refused(name: str) -> None:
    sizes = {"capacity": 4, "block_size": 4, "max_sequences": 4, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        BlockPool(sizes["capacity"], sizes["block_size"], sizes["max_sequences"])


def test_more_sequences_than_the_engine_runs_are_refused() -> None:
    scene = Scene(100, slots=4, gold={"nominal": 100})
    with pytest.raises(NeverFits, match="n = 5 sequences, but the engine runs at most 4 at once"):
        scene.wait("gold", "abc", n=5)


def test_a_request_is_submitted_once() -> None:
    scene = Scene(10, gold={"nominal": 10})
    request: Request = scene.wait("gold", "abc")
    with pytest.raises(ValueError, match="was submitted before"):
        scene.pool.submit(request)
    scene.admitted(request)
    with pytest.raises(ValueError, match="is running, not waiting"):
        scene.pool.admit(request)
