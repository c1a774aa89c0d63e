"""Keys: equal for equal tokens behind equal beginnings among those who share a salt, on every process and machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheaware_engine.blocks import ROOT, block_keys, next_key, root_of

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=12)


def public_keys(tokens: list[int], block_size: int = 2) -> frozenset[bytes]:
    """What an engine declares public for a prefix: the keys of its full blocks, without a salt."""
    return frozenset(block_keys(tokens, block_size))


def test_a_block_has_a_key_only_when_it_is_full() -> None:
    assert len(block_keys([1, 2, 3, 4, 5], 2)) == 2
    assert block_keys([1], 2) == []


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_keys_are_equal_exactly_as_far_as_the_tokens_are(one: list[int], other: list[int], size: int) -> None:
    for index, (mine, theirs) in enumerate(zip(block_keys(one, size), block_keys(other, size), strict=False)):
        assert (mine == theirs) == (one[: (index + 1) * size] == other[: (index + 1) * size])


def test_the_same_block_behind_another_beginning_has_another_key() -> None:
    assert block_keys([1, 1, 7, 7], 2)[1] != block_keys([2, 2, 7, 7], 2)[1]


def test_another_salt_gives_other_keys_throughout() -> None:
    salted = [set(block_keys(range(8), 2, salt)) for salt in (b"", b"tenant a", b"tenant b")]
    assert len(set.union(*salted)) == 3 * 4


def test_a_salt_is_not_confused_with_tokens() -> None:
    word = (65).to_bytes(4, "little")
    assert next_key(ROOT, [65, 66], b"", ()) != next_key(ROOT, [66], word, ())
    assert next_key(ROOT, [66], word, ()) != next_key(ROOT, [], word + (66).to_bytes(4, "little"), ())


def test_public_text_is_shared_across_salts_and_nothing_else_is() -> None:
    public = public_keys([1, 2, 3, 4])
    mine = block_keys([1, 2, 3, 4, 5, 6, 7, 8], 2, b"tenant a", public)
    theirs = block_keys([1, 2, 3, 4, 5, 6, 7, 8], 2, b"tenant b", public)
    assert mine[:2] == theirs[:2] == block_keys([1, 2, 3, 4], 2)
    assert not set(mine[2:]) & set(theirs[2:])


def test_a_chain_that_left_public_text_never_returns_to_it() -> None:
    public = public_keys([1, 2, 3, 4])
    diverged = block_keys([9, 9, 3, 4], 2, b"tenant a", public)
    assert not set(diverged) & public
    assert diverged != block_keys([9, 9, 3, 4], 2, b"tenant b", public)


def test_half_a_public_block_is_private() -> None:
    public = public_keys([1, 2, 3, 4])
    assert block_keys([1, 2, 3, 9], 2, b"tenant a", public)[1] not in public


SCRIPT = "from cacheaware_engine.blocks import block_keys; print([k.hex() for k in block_keys(range(32), 16, b's')])"


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_keys_do_not_depend_on_the_process(seed: str) -> None:
    command = [sys.executable, "-c", SCRIPT]
    answer = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.strip() == str([key.hex() for key in block_keys(range(32), 16, b"s")])


def test_keys_stay_what_they_are() -> None:
    """Replicas of two releases meet during a rollout; a change here makes their predictions miss."""
    assert block_keys(range(16), 16, b"salt")[0].hex() == "478c3d4cd01a457271e77be9c48a4210"


@pytest.mark.parametrize("token", [pytest.param(-1, id="negative"), pytest.param(2**32, id="beyond 32 bits")])
def test_a_token_that_is_no_token_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        block_keys([token], 1)


def test_blocks_stored_in_another_form_have_other_keys() -> None:
    tokens, public = range(8), frozenset(block_keys(range(4), 2, root=root_of("int8")))
    forms = [set(block_keys(tokens, 2, b"tenant", public, root_of(form))) for form in ("float32", "int8", "bfloat16")]
    assert len(set.union(*forms)) == 12
    assert public < forms[1], "public text is public in the form that it was made public in"
