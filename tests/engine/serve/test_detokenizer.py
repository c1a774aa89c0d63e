"""Text as it comes adds up to the text of all tokens, in whole characters, and ends before a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheaware_engine.chat import Tokenizer
from cacheaware_engine.detokenizer import REPLACEMENT, StopStrings, TextStream
from cacheaware_engine.testing import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


def pieces(tokenizer: Tokenizer, tokens: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    stream = TextStream(tokenizer.decode, context)
    return [*(stream.push(token) for token in tokens), stream.flush()]


@given(text=st.text(max_size=60))
def test_pieces_of_any_text_add_up_and_hold_only_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    given_out = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(given_out) == text
    assert all(set(piece) <= set(text) for piece in given_out)


@given(tokens=st.lists(st.integers(0, 258), max_size=80), prompt=st.text(max_size=20))
def test_pieces_of_any_tokens_add_up_to_decoding_them_at_once(
    tokenizer: Tokenizer, tokens: list[int], prompt: str
) -> None:
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)
    context = tokenizer.encode(prompt)
    assert prompt + "".join(pieces(tokenizer, tokens, context)) == tokenizer.decode([*context, *tokens])


def test_a_character_of_four_bytes_comes_with_its_last_byte(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, tokenizer.encode("a🎉b")) == ["a", "", "", "", "🎉", "b", ""]


def test_bytes_that_never_form_a_character_do_not_hold_text_back_for_ever(tokenizer: Tokenizer) -> None:
    lone = tokenizer.encode("é")[:1]  # the first of two bytes, over and over
    given_out = pieces(tokenizer, lone * 40)
    assert "".join(given_out) == REPLACEMENT * 40
    assert all(len("".join(given_out[: count + 1])) >= count - 3 for count in range(40))


def test_the_work_a_token_does_not_grow_with_the_text(tokenizer: Tokenizer) -> None:
    lengths: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        lengths.append(len(tokens))
        return tokenizer.decode(tokens)

    stream = TextStream(decode)
    for token in tokenizer.encode("word " * 200):
        stream.push(token)
    assert max(lengths) < 20


@pytest.mark.parametrize(
    ("stops", "text", "kept"),
    [
        pytest.param(["END"], "one ENDED", "one ", id="inside a piece"),
        pytest.param(["b", "ab"], "xab", "x", id="the one that begins first"),
        pytest.param(["zz"], "abz", "abz", id="only its start at the end"),
        pytest.param(["aab"], "aaab", "a", id="a start that begins again"),
        pytest.param(["\n\n"], "a\nb\n\nc", "a\nb", id="newlines"),
        pytest.param([], "all of it", "all of it", id="none"),
    ],
)
def test_text_ends_before_the_first_stop_string(stops: list[str], text: str, kept: str) -> None:
    for pieces in (list(text), [text]):
        stop = StopStrings(stops)
        given_out = "".join(stop.push(piece) for piece in pieces)
        assert given_out + ("" if stop.matched else stop.flush()) == kept


@given(
    pieces=st.lists(st.text("ab", min_size=1, max_size=5), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_only_what_may_become_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    stop = StopStrings(stops)
    seen = given_out = ""
    for piece in pieces:
        seen += piece
        given_out += stop.push(piece)
        if stop.matched is not None:
            assert given_out == seen[: min(seen.find(wanted) for wanted in stops if wanted in seen)]
            return
        assert not any(wanted in seen for wanted in stops)
        held = seen[len(given_out) :]
        assert seen == given_out + held
        assert not held or any(wanted.startswith(held) for wanted in stops)
    assert given_out + stop.flush() == seen
