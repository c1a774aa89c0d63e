"""What an operation costs, counted in calls rather than in time: it must not grow with the size of the cache."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from cacheaware_engine.blocks import Admitted, Waiting, WaitReason

from .scene import Scene


def calls(operation: Callable[[], object]) -> int:
    """How many functions, Python's and C's, `operation` calls."""
    count = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        operation()
    finally:
        sys.setprofile(before)
    return count


def full_cache(capacity: int, retention: float | None = None) -> Scene:
    """Gold's and bronze's halves are full of cached texts of eight blocks, each used at another time."""
    half = capacity // 2
    scene = Scene(
        capacity,
        gold={"nominal": half, "retention": retention},
        bronze={"nominal": half, "retention": retention},
    )
    for turn in range(half // 8):
        for tier in ("gold", "bronze"):
            scene.now += 1
            salt = tier.encode() + turn.to_bytes(4, "little")
            request = scene.wait(tier, "abcdefgh", extra=0, salt=salt)
            assert isinstance(scene.pool.admit(request), Admitted)
            for index, key in enumerate(scene.keys("abcdefgh", salt)):
                scene.pool.fill(request, 0, index, key)
            scene.pool.release(request)
    assert scene.free == 0
    return scene


def admission(scene: Scene, tier: str, text: str) -> int:
    request = scene.wait(tier, text, salt=b"new")
    return calls(lambda: scene.pool.admit(request))


def growth(scene: Scene) -> int:
    request = scene.wait("gold", "wxyz", salt=b"new")
    assert isinstance(scene.pool.admit(request), Admitted)
    return calls(lambda: scene.pool.grow(request, 0))


def waiter(scene: Scene) -> int:
    request = scene.wait("gold", "x" * (scene.pool.capacity // 2 + 2), salt=b"new")
    count = calls(lambda: scene.pool.admit(request))
    assert isinstance(scene.pool.admit(request), Waiting)
    return count


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda scene: admission(scene, "gold", "stuvwxyz"), id="an admission that evicts"),
        pytest.param(growth, id="growth that evicts"),
        pytest.param(lambda scene: calls(scene.pool.ledger), id="the ledger"),
    ],
)
def test_its_cost_does_not_depend_on_how_many_blocks_there_are(operation: Callable[[Scene], int]) -> None:
    small, large = operation(full_cache(128)), operation(full_cache(2048))
    assert large <= small * 1.5


def test_a_request_that_cannot_be_admitted_costs_its_own_blocks_and_no_others() -> None:
    """No victim is looked for in vain: twice the blocks of a request, at most about twice the calls."""
    costs = [waiter(full_cache(capacity)) / capacity for capacity in (128, 1024)]
    assert costs[1] <= costs[0] * 1.2


def test_where_there_is_no_slot_no_blocks_are_looked_up() -> None:
    """Behind a full engine a long queue is offered again and again."""

    def offered(text: str) -> int:
        scene = Scene(2048, slots=1, gold={"nominal": 2048})
        assert isinstance(scene.pool.admit(scene.wait("gold", "a")), Admitted)
        request = scene.wait("gold", text)
        assert scene.pool.admit(request) == Waiting(WaitReason.SLOTS)
        return calls(lambda: scene.pool.admit(request))

    assert offered("x" * 1000) <= offered("x" * 10) * 1.2


def test_each_block_of_an_admission_costs_a_bounded_number_of_calls() -> None:
    scene = full_cache(2048)
    few, many = admission(scene, "gold", "x" * 10), admission(scene, "bronze", "y" * 810)
    assert many <= few * 81 * 1.2


def test_a_lapse_costs_each_block_once() -> None:
    scene = full_cache(512, retention=10_000)
    scene.now += 20_000
    first, second = calls(scene.pool.ledger), calls(scene.pool.ledger)
    assert first <= 512 * 60
    assert second <= 200


def test_heaps_do_not_grow_with_the_number_of_hits() -> None:
    scene = Scene(32, gold={"nominal": 32, "retention": 10})
    for _ in range(2_000):
        scene.now += 0.001
        request = scene.wait("gold", "abcdefgh", extra=0)
        scene.pool.admit(request)
        for index, key in enumerate(scene.keys("abcdefgh")):
            scene.pool.fill(request, 0, index, key)
        scene.pool.release(request)
    account, residents = scene.pool._books.accounts[0], scene.pool._books.residents
    heaps = (account.leaves, account.idle, residents.expiries, residents.lapsed_leaves)
    assert all(heap.stale <= len(heap) + 32 for heap in heaps)
