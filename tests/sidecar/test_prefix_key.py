"""What two requests share is their equal start, in the order a chat template writes it, under one salt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheaware_sidecar.prefix_key import (
    CHUNK_BYTES,
    KEY_ALGORITHM,
    MAX_CHUNKS,
    PrefixKey,
    conversation_of,
    prefix_key,
)
from cacheaware_sidecar.token_lengths import TokenLengths

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = "You are a patient assistant who answers in whole sentences and never guesses. " * 4


def chat(*contents: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content} for content in contents], **more}


def key(body: dict[str, Any], salt: str = "salt", path: str = CHAT) -> PrefixKey:
    found = prefix_key(path, body, salt)
    assert found is not None
    return found


def shared(one: PrefixKey, two: PrefixKey) -> int:
    """Equal leading chunks."""
    count = 0
    for a, b in zip(one.chunks, two.chunks, strict=False):
        if a != b:
            break
        count += 1
    return count


class TestWhatIsShared:
    def test_a_conversation_that_goes_on_keeps_its_start(self) -> None:
        first, second = key(chat(LONG)), key(chat(LONG, "And then?"))
        assert shared(first, second) == len(first.chunks) == len(LONG) // CHUNK_BYTES

    def test_chunks_are_chained_so_a_middle_is_no_start(self) -> None:
        one, two = key(chat("A" * 64 + LONG)), key(chat("B" * 64 + LONG))
        assert not set(one.chunks) & set(two.chunks), "equal text behind another start"

    def test_the_role_counts(self) -> None:
        system = {"model": "m", "messages": [{"role": "system", "content": LONG}]}
        assert shared(key(chat(LONG)), key(system)) == 0

    def test_text_parts_are_the_text_they_hold(self) -> None:
        assert key(chat([{"type": "text", "text": LONG}])) == key(chat(LONG))

    @pytest.mark.parametrize("field", ["model", "chat_template", "chat_template_kwargs", "documents"])
    def test_what_changes_the_whole_prompt_changes_the_whole_key(self, field: str) -> None:
        assert shared(key(chat(LONG)), key(chat(LONG, **{field: "other"}))) == 0

    @pytest.mark.parametrize("field", ["temperature", "max_tokens", "stream", "user", "metadata"])
    def test_what_does_not_change_the_prompt_does_not_change_the_key(self, field: str) -> None:
        assert key(chat(LONG)) == key(chat(LONG, **{field: 1}))

    def test_token_ids_are_ids_and_a_chunk_is_sixteen_of_them(self) -> None:
        ids = list(range(40))
        found = key({"prompt": ids}, path=TEXT)
        assert (len(found.chunks), found.of_ids) == (2, True)
        assert shared(found, key({"prompt": [*ids[:20], 7, 7]}, path=TEXT)) == 1
        assert key({"prompt": [ids]}, path=TEXT) == found

    @settings(deadline=None)  # other processes share the cores
    @given(st.text(max_size=400), st.text(max_size=400), st.text(max_size=400))
    def test_texts_share_exactly_the_chunks_of_their_common_start(self, start: str, one: str, two: str) -> None:
        a, b = (start + one).encode(), (start + two).encode()
        common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        keys = (key({"prompt": a.decode()}, path=TEXT), key({"prompt": b.decode()}, path=TEXT))
        assert shared(*keys) == common // CHUNK_BYTES

    def test_a_huge_prompt_is_keyed_by_its_start(self) -> None:
        found = key(chat("x" * (MAX_CHUNKS + 100) * CHUNK_BYTES))
        assert len(found.chunks) == MAX_CHUNKS
        assert found.length > MAX_CHUNKS * CHUNK_BYTES


class TestTools:
    """Templates put tool definitions first, so they are the start of the prefix."""

    ONE = ({"type": "function", "function": {"name": "search", "description": LONG}},)
    TWO = ({"type": "function", "function": {"name": "fetch", "description": LONG}},)

    def test_the_same_messages_with_other_tools_share_nothing(self) -> None:
        assert shared(key(chat(LONG, tools=list(self.ONE))), key(chat(LONG, tools=list(self.TWO)))) == 0

    def test_the_same_tools_are_shared_under_other_messages(self) -> None:
        one, two = key(chat("Hello " * 30, tools=list(self.ONE))), key(chat("Bye " * 40, tools=list(self.ONE)))
        assert shared(one, two) >= len(LONG) // CHUNK_BYTES

    def test_no_tools_and_an_empty_list_are_the_same(self) -> None:
        assert key(chat(LONG, tools=[])) == key(chat(LONG)) == key(chat(LONG, tools=None))


class TestSalt:
    def test_two_salts_share_nothing(self) -> None:
        assert shared(key(chat(LONG), "A"), key(chat(LONG), "B")) == 0

    def test_a_conversation_of_one_scope_is_none_of_another(self) -> None:
        names = {
            conversation_of({field: name}, salt)
            for field in ("prompt_cache_key", "conversation_id", "session_id")
            for name in ("a", "b")
            for salt in ("A", "B")
        }
        assert len(names) == 4
        assert None not in names

    @pytest.mark.parametrize("body", [{}, {"session_id": 7}, {"session_id": ""}, {"prompt_cache_key": None}])
    def test_no_name_is_no_conversation(self, body: dict[str, Any]) -> None:
        assert conversation_of(body, "A") is None


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
OTHER_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


class TestShapes:
    @pytest.mark.parametrize(
        "content",
        [
            pytest.param("text", id="string"),
            pytest.param([], id="empty list"),
            pytest.param(None, id="null"),
            pytest.param([{"type": "text", "text": "Hi"}, IMAGE], id="image"),
            pytest.param([AUDIO], id="audio"),
            pytest.param(["plain", "strings"], id="strings in a list"),
            pytest.param([{"type": "hologram", "depth": 3}], id="unknown part"),
            pytest.param([{"type": "text"}], id="text part without text"),
            pytest.param([7, None, [[]]], id="parts of any kind"),
            pytest.param("\ud800", id="half a surrogate pair"),
        ],
    )
    def test_every_content_that_clients_send_has_a_key(self, content: Any) -> None:
        assert prefix_key(CHAT, chat(content), "salt") is not None

    @pytest.mark.parametrize(
        "message",
        [
            pytest.param({"role": "tool", "tool_call_id": "call_1", "content": "42"}, id="tool result"),
            pytest.param({"role": "assistant", "content": None, "tool_calls": [{"id": "call_1"}]}, id="tool call"),
            pytest.param({"role": "assistant"}, id="no content"),
        ],
    )
    def test_every_message_that_clients_send_has_a_key(self, message: dict[str, Any]) -> None:
        assert prefix_key(CHAT, {"messages": [message]}, "salt") is not None

    def test_two_different_images_are_two_prefixes(self) -> None:
        one, two = key(chat([IMAGE], LONG)), key(chat([OTHER_IMAGE], LONG))
        assert shared(one, two) == 0
        assert key(chat([IMAGE], LONG)) == one

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            pytest.param(CHAT, {}, id="no messages"),
            pytest.param(CHAT, {"messages": "Hi"}, id="messages that are a string"),
            pytest.param(CHAT, {"messages": ["Hi"]}, id="messages of strings"),
            pytest.param(CHAT, {"messages": [{"content": "Hi"}]}, id="no role"),
            pytest.param(CHAT, {"messages": [{"role": "user", "content": 7}]}, id="a number as content"),
            pytest.param(TEXT, {}, id="no prompt"),
            pytest.param(TEXT, {"prompt": ["one", "two"]}, id="two prompts"),
            pytest.param(TEXT, {"prompt": [-1]}, id="a negative id"),
            pytest.param(TEXT, {"prompt": [2**40]}, id="a huge id"),
            pytest.param(TEXT, {"prompt": [True, False]}, id="booleans"),
            pytest.param(TEXT, {"prompt": {"text": "Hi"}}, id="an object"),
            pytest.param("/v1/other", {"prompt": "Hi"}, id="another path"),
        ],
    )
    def test_an_unknown_shape_has_no_key_and_no_error(self, path: str, body: dict[str, Any]) -> None:
        assert prefix_key(path, body, "salt") is None


def test_two_processes_with_other_hash_seeds_make_equal_keys() -> None:
    program = (
        "import json, sys; from cacheaware_sidecar.prefix_key import prefix_key, KEY_ALGORITHM;"
        "key = prefix_key('/v1/chat/completions', json.loads(sys.argv[1]), 'salt');"
        "print(KEY_ALGORITHM, [chunk.hex() for chunk in key.chunks])"
    )
    body = json.dumps(chat(LONG, tools=list(TestTools.ONE)))
    said = [
        subprocess.run(
            [sys.executable, "-c", program, body],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert said[0].startswith(KEY_ALGORITHM)


class TestTokenLengths:
    def test_token_ids_are_counted(self) -> None:
        ids = key({"prompt": list(range(64))}, path=TEXT)
        assert TokenLengths().tokens(ids) == 64
        assert TokenLengths().chunk_tokens(ids) == 16

    def test_the_length_of_a_token_is_learned_from_the_engine(self) -> None:
        lengths = TokenLengths()
        text = key(chat(LONG))
        before = lengths.chunk_tokens(text)
        for _ in range(200):
            lengths.learn(text, prompt_tokens=text.length // 2)
        assert lengths.tokens(text) == pytest.approx(text.length / 2, rel=0.05)
        assert lengths.chunk_tokens(text) == pytest.approx(before * 2, rel=0.05)

    def test_a_few_prompts_are_enough(self) -> None:
        lengths = TokenLengths()
        text = key(chat(LONG))
        for _ in range(10):
            lengths.learn(text, prompt_tokens=text.length // 2)
        assert lengths.tokens(text) == pytest.approx(text.length / 2, rel=0.25)

    def test_one_absurd_count_does_not_spoil_the_estimate(self) -> None:
        lengths = TokenLengths()
        text = key(chat(LONG))
        lengths.learn(text, prompt_tokens=1)
        assert lengths.tokens(text) > text.length / 8
