"""Who pays for a block: the tier that allocated it, until a hit moves it."""

from __future__ import annotations

from typing import Any

import pytest

from .scene import Scene

SILVER = {"nominal": 10, "priority": 50}


@pytest.mark.parametrize(
    ("hitter", "owner"),
    [
        pytest.param({"priority": 100}, "other", id="a more important tier takes the blocks over"),
        pytest.param({"priority": 50}, "silver", id="an equally important one does not"),
        pytest.param({"priority": 0}, "silver", id="a less important one does not"),
    ],
)
def test_a_hit_moves_a_protected_block_only_to_a_more_important_tier(hitter: dict[str, Any], owner: str) -> None:
    scene = Scene(30, silver=SILVER, other={"nominal": 10, **hitter})
    scene.cache("silver", "abc")
    scene.run("other", "abcd")
    assert scene.owners("abcd") == [owner] * 3 + ["other"]


def test_a_hit_on_a_held_block_moves_it_all_the_same() -> None:
    scene = Scene(30, silver=SILVER, gold={"nominal": 10, "priority": 100})
    scene.run("silver", "abc", extra=0)
    scene.run("gold", "abcd", extra=0)
    assert scene.owners("abcd") == ["gold"] * 4
    assert (scene.account("silver").held, scene.account("gold").held) == (0, 4)


def test_a_lapsed_block_moves_to_whoever_hits_it() -> None:
    scene = Scene(30, silver={**SILVER, "retention": 5}, bronze={"nominal": 10})
    scene.cache("silver", "abc")
    scene.now = 5
    scene.run("bronze", "abcd")
    assert scene.owners("abcd") == ["bronze"] * 4


def test_a_lapsed_block_moves_to_the_most_important_of_those_who_use_it() -> None:
    scene = Scene(
        40,
        silver={**SILVER, "retention": 5},
        bronze={"nominal": 10, "priority": 10},
        iron={"nominal": 10, "priority": 0},
    )
    scene.cache("silver", "abc")
    scene.now = 4
    scene.run("bronze", "abcd")  # not lapsed yet: silver still pays
    assert scene.owners("abc") == ["silver"] * 3
    scene.now = 5
    scene.run("iron", "abce")
    assert scene.owners("abc") == ["bronze"] * 3


def test_a_block_stays_where_the_tier_that_hits_it_has_no_room_under_its_limit() -> None:
    scene = Scene(30, silver=SILVER, gold={"nominal": 3, "limit": 5, "priority": 100})
    scene.cache("silver", "abcd")
    scene.cache("gold", "xyz")
    scene.run("gold", "abcde", extra=0)
    # Two blocks moved, then gold was at its limit; the last block of its own needed x, y or z to go.
    assert scene.owners("abcd") == ["gold", "gold", "silver", "silver"]
    assert scene.used("gold") == 5


def test_an_equal_block_that_is_computed_twice_counts_as_a_hit_for_who_pays() -> None:
    scene = Scene(30, silver=SILVER, gold={"nominal": 10, "priority": 100})
    silver, gold = scene.wait("silver", "abc"), scene.wait("gold", "abc")
    scene.admitted(silver)
    scene.admitted(gold)
    scene.compute(silver)
    scene.compute(gold)
    assert scene.owners("abc") == ["gold"] * 3
    assert scene.account("gold").hit_tokens_total == 0


def test_a_public_block_is_charged_to_the_public_share_whoever_allocates_it_and_never_moves() -> None:
    scene = Scene(30, public=3, silver=SILVER, gold={"nominal": 10, "priority": 100})
    scene.pool.set_public({"hello": scene.keys("pqr")})
    scene.cache("silver", "pqrs", salt=b"one")
    scene.run("gold", "pqrt", salt=b"two")
    assert scene.owners("pqr", b"two") == ["<public>"] * 3
    assert scene.pool.ledger().public.held == 3
    assert (scene.used("silver"), scene.used("gold")) == (1, 2)


def test_tenants_share_public_text_and_nothing_behind_it() -> None:
    scene = Scene(30, public=3, gold={"nominal": 20})
    scene.pool.set_public({"hello": scene.keys("pqr")})
    scene.cache("gold", "pqrabc", salt=b"one")
    assert scene.admitted(scene.wait("gold", "pqrabc", salt=b"two")).hit_blocks == [3]
    assert scene.admitted(scene.wait("gold", "pqrabc", salt=b"one")).hit_blocks == [5]
