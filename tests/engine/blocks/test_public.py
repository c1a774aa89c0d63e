"""The public share: prefixes that everyone may share, kept beside all tiers."""

from __future__ import annotations

import pytest

from cacheaware_engine.blocks import PUBLIC, NeverFits, QuotaRefused, Request

from .scene import Scene


def prewarm(scene: Scene, text: str) -> Request:
    """As an engine does: all full blocks of the prefix, and none to grow into."""
    request = scene.wait(PUBLIC, text, extra=0)
    scene.admitted(request)
    scene.compute(request)
    scene.release(request)
    return request


def test_prefixes_that_do_not_fit_the_share_are_refused_with_the_blocks_needed_and_allowed() -> None:
    scene = Scene(20, public=4, gold={"nominal": 10})
    scene.pool.set_public({"hello": scene.keys("abc")})
    with pytest.raises(QuotaRefused, match="they need 6 blocks and the public share is 4"):
        scene.pool.set_public({"hello": scene.keys("abc"), "bye": scene.keys("xyz")})
    assert len(scene.pool.public_keys) == 3


def test_what_prefixes_have_in_common_is_needed_once() -> None:
    scene = Scene(20, public=4, gold={"nominal": 10})
    scene.pool.set_public({"hello": scene.keys("abc"), "hi": scene.keys("abx")})
    assert len(scene.pool.public_keys) == 4


def test_without_quotas_there_is_no_share() -> None:
    scene = Scene(20)
    with pytest.raises(QuotaRefused, match="the public share is 0"):
        scene.pool.set_public({"hello": scene.keys("abc")})


def test_the_ledger_says_how_much_of_each_prefix_is_resident() -> None:
    scene = Scene(20, public=4, gold={"nominal": 10})
    scene.pool.set_public({"hello": scene.keys("abc"), "hi": scene.keys("abx")})
    scene.cache("gold", "abq", salt=b"tenant")
    prefixes = scene.pool.ledger().public.prefixes
    assert {name: (prefix.blocks, prefix.resident) for name, prefix in prefixes.items()} == {
        "hello": (3, 2),
        "hi": (3, 2),
    }


def test_prewarming_is_a_request_that_uses_the_share_and_nothing_else() -> None:
    scene = Scene(20, public=3, gold={"nominal": 10})
    scene.pool.set_public({"hello": scene.keys("abc")})
    prewarm(scene, "abc")
    assert (scene.pool.ledger().public.cached, scene.used("gold"), scene.free) == (3, 0, 17)
    with pytest.raises(NeverFits, match="the tier's limit is 3"):
        scene.wait(PUBLIC, "abcd", extra=0)


def test_prewarming_reclaims_what_tiers_borrowed() -> None:
    scene = Scene(12, public=3, gold={"nominal": 9, "lending": 9})
    old, young = scene.run("gold", "abcdef"), scene.run("gold", "uvw")
    scene.grow(old)
    assert scene.free == 0
    scene.pool.set_public({"hello": scene.keys("xyz")})
    prewarm(scene, "xyz")
    assert scene.pool.ledger().public.cached == 3
    assert scene.pool.waiting == (young,)


def test_a_tiers_flood_never_pushes_the_prefix_out() -> None:
    scene = Scene(12, public=3, gold={"nominal": 9})
    scene.pool.set_public({"hello": scene.keys("abc")})
    prewarm(scene, "abc")
    for turn in range(50):
        scene.now += 1
        scene.cache("gold", "uvwxyz", salt=bytes([turn]))
    assert scene.pool.ledger().public.cached == 3


def test_blocks_of_a_replaced_prefix_go_at_once_with_what_is_behind_them() -> None:
    scene = Scene(20, public=3, gold={"nominal": 10})
    scene.pool.set_public({"hello": scene.keys("abc")})
    scene.cache("gold", "abcde", salt=b"tenant")
    scene.pool.set_public({"hello": scene.keys("xyz")})
    scene.pool.check_integrity()
    assert (scene.free, scene.used("gold")) == (20, 0)


def test_or_when_nobody_holds_them_any_more() -> None:
    scene = Scene(20, public=3, gold={"nominal": 10})
    scene.pool.set_public({"hello": scene.keys("abc")})
    request = scene.run("gold", "abcde", extra=0)
    scene.pool.set_public({"hello": scene.keys("xyz")})
    scene.pool.check_integrity()
    assert scene.pool.ledger().public.held == 3
    scene.release(request)
    assert (scene.pool.ledger().public.cached, scene.free) == (0, 20)


def test_while_they_are_held_a_new_prefix_that_finds_no_room_is_charged_to_the_tier_that_brings_it() -> None:
    scene = Scene(20, public=3, gold={"nominal": 10})
    scene.pool.set_public({"hello": scene.keys("abc")})
    request = scene.run("gold", "abcde", extra=0)
    scene.pool.set_public({"hello": scene.keys("xyz")})
    scene.cache("gold", "xyz")
    assert scene.owners("xyz") == ["gold"] * 3
    scene.release(request)
    scene.cache("gold", "xyzw")  # and moves to the share with the next hit
    assert scene.owners("xyzw") == ["<public>"] * 3 + ["gold"]


def test_private_blocks_become_public_when_their_prefix_does() -> None:
    scene = Scene(20, public=3, gold={"nominal": 10})
    scene.cache("gold", "abcde")
    scene.pool.set_public({"hello": scene.keys("abc")})
    assert scene.owners("abcde") == ["<public>"] * 3 + ["gold"] * 2
    scene.pool.check_integrity()


def test_a_share_that_shrinks_keeps_what_fits_the_most_recent_and_the_heads() -> None:
    scene = Scene(20, public=6, gold={"nominal": 10})
    scene.pool.set_public({"hello": scene.keys("abc"), "bye": scene.keys("xyz")})
    prewarm(scene, "abc")
    scene.now = 1
    prewarm(scene, "xyz")
    scene.quotas(public=4, gold={"nominal": 10})
    prefixes = scene.pool.ledger().public.prefixes
    assert (prefixes["hello"].resident, prefixes["bye"].resident) == (1, 3)
    scene.pool.check_integrity()


def test_inside_a_share_that_is_too_small_the_least_recent_give_way() -> None:
    scene = Scene(20, public=6, gold={"nominal": 10})
    scene.pool.set_public({"hello": scene.keys("abc"), "bye": scene.keys("xyz")})
    scene.quotas(public=3, gold={"nominal": 10})
    scene.cache("gold", "abc")
    scene.now = 1
    scene.cache("gold", "xyz")
    prefixes = scene.pool.ledger().public.prefixes
    assert (prefixes["hello"].resident, prefixes["bye"].resident) == (0, 3)
    assert scene.used("gold") == 0
