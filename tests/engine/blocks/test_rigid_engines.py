"""For engines that cannot move a running sequence, nor preempt in the middle of a step."""

from __future__ import annotations

import pytest

from cacheaware_engine.blocks import Admitted, Request, Stage, Waiting, WaitReason

from .scene import Scene


def compute(scene: Scene, request: Request, text: str) -> None:
    """As an engine whose running sequences stay where they are."""
    for index, key in enumerate(scene.keys(text)):
        scene.pool.fill(request, 0, index, key, movable=False)
        scene.pool.check_integrity()


def two_that_compute_the_same(scene: Scene, text: str) -> tuple[Request, Request]:
    first, second = (scene.wait("gold", text) for _ in range(2))
    for request in (first, second):
        scene.admitted(request)
    own = list(second.tables[0])
    for request in (first, second):
        compute(scene, request, text)
    assert second.copies == [own[: len(text)]]
    return first, second


def test_a_sequence_that_cannot_be_moved_pays_for_its_copy_and_holds_the_equal_block_too() -> None:
    scene = Scene(20, gold={"nominal": 20})
    first, second = two_that_compute_the_same(scene, "abc")
    assert second.tables[0][:3] == first.tables[0][:3]
    assert scene.account("gold").held == 8  # two times three and one to grow into: nothing is saved
    scene.release(first)
    assert scene.account("gold").held == 7
    scene.release(second)
    assert (scene.account("gold").held, scene.account("gold").cached) == (0, 3)


def test_what_follows_behind_a_copy_can_be_hit_by_others() -> None:
    scene = Scene(20, gold={"nominal": 20})
    first, second = two_that_compute_the_same(scene, "ab")
    scene.write(second, "c")
    scene.release(first, second)
    assert scene.cached_of("abc") == 3


def test_copies_are_given_back_when_their_request_is_preempted() -> None:
    scene = Scene(20, gold={"nominal": 20})
    _, second = two_that_compute_the_same(scene, "abc")
    scene.pool.preempt(second)
    scene.pool.check_integrity()
    assert (second.stage, second.copies) == (Stage.WAITING, [[]])
    assert scene.account("gold").held == 4


def test_a_preemption_that_is_taken_back_leaves_the_copies_where_they_were() -> None:
    scene = Scene(20, gold={"nominal": 20})
    _, second = two_that_compute_the_same(scene, "abc")
    before, copies = scene.pool.ledger(), [list(each) for each in second.copies]
    books = scene.pool._books
    books.residents.begin()
    books.preempt(second)
    books.residents.roll_back()
    scene.pool.check_integrity()
    assert second.copies == copies
    assert scene.pool.ledger() == before


def test_without_preemption_an_entitled_request_waits_for_it_and_changes_nothing() -> None:
    scene = Scene(10, gold={"nominal": 5}, bronze={})
    running = scene.run("bronze", "abcdefgh", extra=1)
    waiting = scene.wait("gold", "xyz", extra=1)
    before = scene.pool.ledger()
    assert scene.pool.admit(waiting, preempt=False) == Waiting(WaitReason.PREEMPTION)
    assert scene.pool.ledger() == before
    scene.pool.check_integrity()
    assert scene.pool.under_nominal == [waiting]
    answer = scene.offer(waiting)
    assert isinstance(answer, Admitted)
    assert answer.preempted == [running]


def test_holders_that_let_go_one_after_the_other_do_not_keep_the_entitled_out() -> None:
    """What the first one frees another borrower may take meanwhile; it is taken back once, with the rest."""
    scene = Scene(12, gold={"nominal": 10}, bronze={"nominal": 1}, iron={"nominal": 1})
    first, iron = scene.run("bronze", "abcdef", extra=0), scene.run("iron", "uvwxyz", extra=0)
    gold = scene.wait("gold", "0123456789", extra=0)
    assert scene.pool.admit(gold, preempt=False) == Waiting(WaitReason.PREEMPTION)
    scene.release(first)
    assert scene.pool.admit(gold, preempt=False) == Waiting(WaitReason.PREEMPTION)
    bronze = scene.run("bronze", "ghijkl", extra=0)
    answer = scene.offer(gold)
    assert isinstance(answer, Admitted)
    assert set(answer.preempted) == {iron, bronze}
    scene.compute(gold)
    for _ in range(5):
        assert isinstance(scene.offer(bronze), Waiting)
        assert isinstance(scene.offer(iron), Waiting)
    scene.release(gold)
    for holder in (iron, bronze):
        scene.admitted(holder, idle=True)
        scene.release(holder)
    assert (iron.reclaims, bronze.reclaims) == (1, 1)


def test_without_preemption_a_slot_is_not_taken_back() -> None:
    scene = Scene(20, slots=2, gold={"nominal": 10}, bronze={"nominal": 5})
    for text in ("ab", "cd"):
        scene.run("bronze", text)
    assert scene.pool.free_slots == 0
    waiting = scene.wait("gold", "xy")
    assert scene.pool.admit(waiting, preempt=False) == Waiting(WaitReason.PREEMPTION)
    assert isinstance(scene.offer(waiting), Admitted)


def test_only_a_running_request_can_have_lost_its_blocks() -> None:
    scene = Scene(10, gold={"nominal": 10})
    with pytest.raises(ValueError, match="not running"):
        scene.pool.preempt(scene.wait("gold", "ab"))


def test_an_engine_that_forgot_its_cache_starts_from_nothing_but_what_is_held() -> None:
    scene = Scene(20, gold={"nominal": 10}, bronze={})
    scene.cache("gold", "abc")
    scene.cache("bronze", "def")
    running = scene.run("gold", "gh")
    scene.pool.evict_cached()
    scene.pool.check_integrity()
    assert (scene.cached_of("abc"), scene.cached_of("def"), scene.cached_of("gh")) == (0, 0, 2)
    scene.release(running)
