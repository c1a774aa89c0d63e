"""`/v1/responses`: what the engine is asked for, what is refused by its name, and the events of a stream."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheaware_api import wire
from cacheaware_sidecar.engine_connection import Broken
from cacheaware_sidecar.errors import BadRequest, Reason
from cacheaware_sidecar.responses_answer import ResponseTranslation
from cacheaware_sidecar.responses_request import CHAT_FIELDS, PATH, REFUSED, response_request
from cacheaware_sidecar.sse import EventParser
from cacheaware_sidecar.testing import Behaviour, StubEngine
from cacheaware_sidecar.testing_sidecar import Running, eventually, running_sidecar, view_json

LOGPROBS = "message.output_text.logprobs"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}


def chat_of(**fields: Any) -> dict[str, Any]:
    """The chat that a request becomes."""
    return response_request(json.dumps({"model": "m", "input": "Hi", **fields}).encode()).asked.body


def refusal_of(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        chat_of(**fields)
    return caught.value


def translation(**repeated: Any) -> ResponseTranslation:
    return ResponseTranslation("7", 1000.5, "m", repeated, lambda: 1002.5)


def chunk(delta: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": more.pop("finish", None), **more.pop("choice", {})}
    return {"model": "tiny", "choices": [choice], **more}


def said(translated: ResponseTranslation, *chunks: Any) -> list[dict[str, Any]]:
    """The events that the client gets for chunks of the engine's."""
    sent = b"".join(
        b"data: " + (each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n\n" for each in chunks
    )
    return events_in(b"".join(translated.event(event) for event in EventParser().feed(sent)))


def events_in(stream: bytes) -> list[dict[str, Any]]:
    """What a client reads; each event is named in both of its lines."""
    found = []
    for event in EventParser().feed(stream):
        name, _, _ = event.raw.removeprefix(b"event: ").partition(b"\n")
        found.append(json.loads(event.data or b"null"))
        assert found[-1]["type"] == name.decode()
    return found


class TestInput:
    @pytest.mark.parametrize(
        ("given", "messages"),
        [
            pytest.param("Hi", [{"role": "user", "content": "Hi"}], id="a text"),
            pytest.param(
                [{"role": "developer", "content": "Be brief."}, {"type": "message", "role": "user", "content": "Hi"}],
                [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
                id="messages",
            ),
            pytest.param(
                [{"role": "assistant", "content": [{"type": "output_text", "text": "Hi", "annotations": []}]}],
                [{"role": "assistant", "content": "Hi"}],
                id="an answer sent back is the text that it was",
            ),
            pytest.param(
                [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]}],
                [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
                id="several parts stay apart",
            ),
            pytest.param(
                [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
                [{"role": "assistant", "content": "No."}],
                id="a refusal is a text",
            ),
            pytest.param(
                [
                    {"role": "assistant", "content": "Let me look."},
                    {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
                    {"type": "function_call", "call_id": "2", "name": "weather", "arguments": "[]"},
                    {"type": "function_call_output", "call_id": "1", "output": "rain"},
                ],
                [
                    {
                        "role": "assistant",
                        "content": "Let me look.",
                        "tool_calls": [
                            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
                            {"id": "2", "type": "function", "function": {"name": "weather", "arguments": "[]"}},
                        ],
                    },
                    {"role": "tool", "tool_call_id": "1", "content": "rain"},
                ],
                id="calls of one turn are in one message",
            ),
            pytest.param(
                [{"type": "function_call", "call_id": "1", "name": "f", "arguments": ""}],
                [
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}],
                    }
                ],
                id="a call without a text",
            ),
        ],
    )
    def test_becomes_the_messages_of_a_chat(self, given: Any, messages: list[Any]) -> None:
        assert chat_of(input=given)["messages"] == messages

    def test_instructions_come_first(self) -> None:
        assert chat_of(instructions="Be brief.")["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ]

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            pytest.param({"input": None}, "input", id="none"),
            pytest.param({"input": []}, "input", id="an empty list"),
            pytest.param({"input": 7}, "input", id="a number"),
            pytest.param({"input": ["Hi"]}, "input[0]", id="a bare text in a list"),
            pytest.param({"input": [{"role": "tool", "content": ""}]}, "input[0].role", id="another role"),
            pytest.param({"input": [{"role": [], "content": ""}]}, "input[0].role", id="a role that is no text"),
            pytest.param({"input": [{"role": "user"}]}, "input[0].content", id="no content"),
            pytest.param({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]", id="a bare part"),
            pytest.param(
                {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
                "input[0].content[0].type",
                id="an image",
            ),
            pytest.param(
                {"input": [{"role": "user", "content": [{"type": ["input_text"], "text": "x"}]}]},
                "input[0].content[0].type",
                id="a type that is no text",
            ),
            pytest.param(
                {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
                "input[0].content[0].text",
                id="a text part without a text",
            ),
            pytest.param({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", id="a kept item"),
            pytest.param({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments", id="half a call"),
            pytest.param(
                {"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output", id="no output"
            ),
            pytest.param({"instructions": ["x"]}, "instructions", id="instructions that are no text"),
        ],
    )
    def test_what_has_no_place_in_a_chat_is_refused_where_it_stands(self, fields: Any, param: str) -> None:
        assert refusal_of(**fields).param == param


class TestFields:
    def test_what_both_know_passes(self) -> None:
        chat = chat_of(temperature=0.5, top_p=0.9, stream=True, service_tier="gold", prompt_cache_key="k", seed=7)
        assert chat == {
            "model": "m",
            "messages": [{"role": "user", "content": "Hi"}],
            "temperature": 0.5,
            "top_p": 0.9,
            "stream": True,
            "service_tier": "gold",
            "prompt_cache_key": "k",
            "seed": 7,  # that engines know, whatever the path
        }

    def test_what_is_only_for_the_answer_stays_here(self) -> None:
        chat = chat_of(metadata={"a": "b"}, store=False, background=False, truncation="disabled", include=[])
        assert chat == {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}

    @pytest.mark.parametrize(
        ("fields", "asked"),
        [
            pytest.param({"max_output_tokens": 5}, {"max_completion_tokens": 5}, id="a limit"),
            pytest.param(
                {"include": [LOGPROBS], "top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}, id="logprobs"
            ),
            pytest.param({"text": {"format": {"type": "text"}}}, {}, id="text"),
            pytest.param(
                {"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}, id="JSON"
            ),
            pytest.param(
                {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}, "strict": True}}},
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "a", "schema": {}, "strict": True},
                    }
                },
                id="JSON by a schema",
            ),
            pytest.param(
                {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}},
                {
                    "tools": [
                        {
                            "type": "function",
                            "function": {"name": "weather", "parameters": {"type": "object"}, "strict": True},
                        }
                    ],
                    "tool_choice": {"type": "function", "function": {"name": "weather"}},
                },
                id="functions",
            ),
            pytest.param({"tools": [], "tool_choice": "auto"}, {}, id="no functions"),
            pytest.param({"reasoning": {"effort": None}}, {}, id="no reasoning"),
        ],
    )
    def test_what_a_chat_calls_otherwise_is_called_so(self, fields: Any, asked: Any) -> None:
        chat = chat_of(**fields)
        assert {name: value for name, value in chat.items() if name not in ("model", "messages")} == asked

    @pytest.mark.parametrize("field", [*REFUSED, *CHAT_FIELDS])
    def test_what_needs_state_or_belongs_to_a_chat_is_refused_by_its_name(self, field: str) -> None:
        refusal = refusal_of(**{field: True})
        assert (refusal.param, refusal.code) == (field, "unsupported_parameter")
        assert chat_of(**{field: None})["messages"]

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            pytest.param({"max_output_tokens": 0}, "max_output_tokens", id="no tokens"),
            pytest.param({"max_output_tokens": "5"}, "max_output_tokens", id="tokens that are no number"),
            pytest.param({"temperature": 3}, "temperature", id="temperature"),
            pytest.param({"top_p": 0}, "top_p", id="top_p"),
            pytest.param({"stream": 1}, "stream", id="stream"),
            pytest.param({"stream_options": 1}, "stream_options", id="stream options"),
            pytest.param({"truncation": "auto"}, "truncation", id="an input that is to be cut"),
            pytest.param({"reasoning": {"effort": "high"}}, "reasoning.effort", id="reasoning"),
            pytest.param({"reasoning": "high"}, "reasoning", id="reasoning that is no object"),
            pytest.param({"text": {"verbosity": "low"}}, "text.verbosity", id="verbosity"),
            pytest.param({"text": "x"}, "text", id="text that is no object"),
            pytest.param({"text": {"format": {"type": "xml"}}}, "text.format.type", id="another format"),
            pytest.param({"include": ["file_search_call.results"]}, "include[0]", id="what no tool here makes"),
            pytest.param({"include": [{}]}, "include[0]", id="an object to include"),
            pytest.param({"include": LOGPROBS}, "include", id="a text to include"),
            pytest.param({"top_logprobs": 3}, "top_logprobs", id="logprobs that are not included"),
            pytest.param({"include": [LOGPROBS], "top_logprobs": 99}, "top_logprobs", id="too many logprobs"),
            pytest.param({"tools": [{"type": "web_search"}]}, "tools[0].type", id="a tool that would run here"),
            pytest.param({"tools": [{"type": "function"}]}, "tools[0].name", id="a function without a name"),
            pytest.param({"tools": ["f"]}, "tools[0]", id="a tool that is no object"),
            pytest.param({"tools": {}}, "tools", id="tools that are no list"),
            pytest.param({"tool_choice": "required"}, "tool_choice", id="a tool of none"),
            pytest.param({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice", id="another choice"),
            pytest.param({"parallel_tool_calls": "yes"}, "parallel_tool_calls", id="parallel calls"),
            pytest.param({"metadata": {"a": 1}}, "metadata", id="metadata"),
            pytest.param({"metadata": {str(n): "" for n in range(17)}}, "metadata", id="too much metadata"),
            pytest.param({"store": "no"}, "store", id="a store that is neither"),
        ],
    )
    def test_a_wrong_value_is_refused_by_its_name(self, fields: Any, param: str) -> None:
        assert refusal_of(**fields).param == param

    def test_what_could_be_read_and_not_be_written_into_the_answer_is_refused(self) -> None:
        taken, refused = 0, set()
        for depth in range(1, 2000, 7):  # some of them are beyond what can be read at all
            data = b'{"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": %s}]}'
            try:
                wanted = response_request(data % (b"[" * depth + b"]" * depth))
            except BadRequest as refusal:
                refused.add(refusal.message)
                continue
            taken += 1
            translated = ResponseTranslation("7", 0.0, "m", wanted.repeated, lambda: 0.0)
            assert translated.event(EventParser().feed(b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n')[0])
        assert taken > 20
        assert refused == {"the body is nested too deeply"}


class TestWhole:
    def answer(self, message: Any = None, finish: str = "stop", **more: Any) -> dict[str, Any]:
        body = {
            "model": "tiny",
            "choices": [{"index": 0, "message": message or {"content": "Paris."}, "finish_reason": finish, **more}],
            "usage": {
                "prompt_tokens": 9,
                "completion_tokens": 3,
                "total_tokens": 12,
                "prompt_tokens_details": {"cached_tokens": 4},
            },
        }
        return dict(json.loads(translation(store=False, metadata={"a": "b"}).whole(json.dumps(body).encode())))

    def test_it_tells_the_text_the_usage_and_what_was_asked(self) -> None:
        response = self.answer()
        part = {"type": "output_text", "annotations": [], "logprobs": [], "text": "Paris."}
        assert response["output"] == [
            {"id": "msg_7", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        ]
        assert response["usage"] == {
            "input_tokens": 9,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 12,
        }
        told = {name: response[name] for name in ("id", "object", "status", "model", "created_at", "completed_at")}
        assert told == {
            "id": "resp_7",
            "object": "response",
            "status": "completed",
            "model": "tiny",
            "created_at": 1000,
            "completed_at": 1002,
        }
        assert (response["store"], response["metadata"], response["error"]) == (False, {"a": "b"}, None)

    def test_an_answer_that_was_cut_is_incomplete(self) -> None:
        response = self.answer(finish="length")
        assert response["status"] == response["output"][0]["status"] == "incomplete"
        assert (response["incomplete_details"], response["completed_at"]) == ({"reason": "max_output_tokens"}, None)

    def test_calls_are_items_of_their_own(self) -> None:
        call = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"in": "Paris"}'}}
        response = self.answer({"content": None, "tool_calls": [call]}, "tool_calls")
        assert response["status"] == "completed"
        assert response["output"] == [
            {
                "id": "fc_7_0",
                "type": "function_call",
                "status": "completed",
                "call_id": "call-1",
                "name": "weather",
                "arguments": '{"in": "Paris"}',
            }
        ]

    def test_logprobs_are_with_the_text(self) -> None:
        told = [{"token": "P", "logprob": -1.0, "bytes": [80], "top_logprobs": []}]
        assert self.answer(logprobs={"content": told})["output"][0]["content"][0]["logprobs"] == told

    @pytest.mark.parametrize("body", [b"[not json", b"7", b"{}", b'{"choices": []}', b'{"choices": [{"text": "x"}]}'])
    def test_what_is_no_chat_completion_is_the_engines_fault(self, body: bytes) -> None:
        with pytest.raises(Broken):
            translation().whole(body)


OPENING = ["response.created", "response.in_progress"]
TEXT = ["response.output_item.added", "response.content_part.added"]
TEXT_DONE = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}


class TestEvents:
    def test_they_come_in_the_order_that_clients_insist_on(self) -> None:
        chunks = [chunk({"role": "assistant", "content": ""}), chunk({"content": "Par"}), chunk({"content": "is"})]
        events = said(translation(store=False), *chunks, chunk(finish="stop"), USAGE, b"[DONE]")
        deltas = ["response.output_text.delta"] * 2
        assert [event["type"] for event in events] == [*OPENING, *TEXT, *deltas, *TEXT_DONE, "response.completed"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        first, last = events[0]["response"], events[-1]["response"]
        assert (first["id"], first["status"], first["output"], first["usage"]) == ("resp_7", "in_progress", [], None)
        assert (last["id"], last["status"], last["store"]) == ("resp_7", "completed", False)
        assert last["output"][0]["content"][0]["text"] == "Paris"
        assert last["usage"]["total_tokens"] == 11

    def test_an_answer_that_was_cut_ends_so(self) -> None:
        *_, last = said(translation(), chunk({"content": "Par"}), chunk(finish="length"), b"[DONE]")
        assert last["type"] == "response.incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}

    def test_an_answer_of_nothing_still_has_a_text(self) -> None:
        events = said(translation(), chunk({"role": "assistant", "content": ""}), chunk(finish="stop"), b"[DONE]")
        assert [event["type"] for event in events] == [*OPENING, *TEXT, *TEXT_DONE, "response.completed"]

    def test_calls_grow_beside_the_text(self) -> None:
        def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
            return chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments, **more}, "id": "c"}]})

        events = said(
            translation(),
            chunk({"content": "Well"}),
            call(0, "", name="f"),
            call(0, '{"a"'),
            call(1, "[]", name="g"),
            call(0, ": 1}"),
            chunk(finish="tool_calls"),
            b"[DONE]",
        )
        delta, done = "response.function_call_arguments.delta", "response.function_call_arguments.done"
        added, item_done = "response.output_item.added", "response.output_item.done"
        assert [(event["type"], event["output_index"]) for event in events if "output_index" in event] == [
            *[(added, 0), ("response.content_part.added", 0), ("response.output_text.delta", 0)],
            *[(added, 1), (delta, 1), (added, 2), (delta, 2), (delta, 1)],
            *[(kind, 0) for kind in TEXT_DONE],
            *[(done, 1), (item_done, 1), (done, 2), (item_done, 2)],
        ]
        message, first, second = events[-1]["response"]["output"]
        assert message["content"][0]["text"] == "Well"
        assert (first["name"], first["arguments"], second["name"]) == ("f", '{"a": 1}', "g")

    def test_halves_of_a_character_are_whole_again(self) -> None:
        halves = [chunk({"content": half}) for half in "\ud83d\ude42"]
        *_, last = said(translation(), *halves, chunk(finish="stop"), b"[DONE]")
        assert last["response"]["output"][0]["content"][0]["text"] == "\U0001f642"

    def test_a_comment_passes_and_an_event_without_data_does_not(self) -> None:
        comment, empty = EventParser().feed(b": still here\n\nid: 7\n\n")
        assert (translation().event(comment), translation().event(empty)) == (b": still here\n\n", b"")

    def test_an_error_of_the_engine_ends_it(self) -> None:
        told = translation()
        events = said(told, chunk({"content": "Par"}), {"error": {"message": "out of memory"}})
        assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]
        failed = events[-2]["response"]
        assert (failed["status"], failed["error"]["message"]) == ("failed", "out of memory")
        assert failed["output"][0]["content"][0]["text"] == "Par"
        assert events[-1]["error"]["message"] == events[-1]["message"] == "out of memory"
        assert said(told, b"[DONE]") == []

    def test_one_at_the_very_start_still_tells_which_response_it_is(self) -> None:
        events = said(translation(), {"object": "error", "message": "no"})
        assert [event["type"] for event in events] == [*OPENING, "response.failed", "error"]

    @pytest.mark.parametrize(
        "chunks", [[b"not json"], [b"7"], [b"[DONE]"], [{"choices": []}, b"[DONE]"]], ids=["text", "7", "end", "empty"]
    )
    def test_what_is_no_chat_stream_is_the_engines_fault(self, chunks: list[Any]) -> None:
        with pytest.raises(Broken):
            said(translation(), *chunks)


NAMES = st.sampled_from(
    [
        *("choices", "delta", "message", "content", "tool_calls", "function", "arguments", "name", "index", "id"),
        *("finish_reason", "logprobs", "usage", "prompt_tokens", "completion_tokens_details", "model", "error"),
    ]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, min_size=1, max_size=2) | st.dictionaries(NAMES, inner, min_size=1, max_size=4),
    max_leaves=12,
)


@st.composite
def answers(draw: st.DrawFn, field: str) -> dict[str, Any]:
    """Something like a chat completion, in which anything may be anything else."""
    choice = {field: draw(st.dictionaries(NAMES, ANYTHING)), **draw(st.dictionaries(NAMES, ANYTHING, max_size=3))}
    return {"choices": [choice], **draw(st.dictionaries(NAMES, ANYTHING, max_size=2))}


@settings(deadline=None, max_examples=50)  # other processes share the cores
@given(answers("message"), st.lists(answers("delta"), max_size=3))
def test_whatever_an_engine_says_is_translated_or_called_broken(whole: Any, chunks: list[Any]) -> None:
    with contextlib.suppress(Broken):
        assert json.loads(translation().whole(json.dumps(whole).encode()))["object"] == "response"
    translated = translation()
    with contextlib.suppress(Broken):
        said(translated, *chunks, b"[DONE]")
    assert events_in(translated.broken("it broke", Reason.ENGINE_BROKE))[-1]["type"] == "error"


async def post(sidecar: Running, **fields: Any) -> tuple[int, bytes]:
    body = {"model": "stub-model", "input": "Hi", **fields}
    async with sidecar.client.post(sidecar.url + PATH, json=body) as answer:
        return answer.status, await answer.read()


class TestOnTheWay:
    async def test_the_engine_gets_a_chat_with_tier_priority_and_salt(
        self, sidecar: Running, engine: StubEngine
    ) -> None:
        status, _ = await post(sidecar, service_tier="gold", extra="passes", cache_salt="mine")
        asked = engine.requests[0].json
        assert (status, engine.requests[0].path) == (200, "/v1/chat/completions")
        assert asked["messages"] == [{"role": "user", "content": "Hi"}]
        assert (asked["priority"], asked["vllm_xargs"]["cacheaware_tier"], asked["extra"]) == (-100, "gold", "passes")
        assert asked["cache_salt"] != "mine"
        assert not asked.keys() & {"input", "service_tier", "stream"}

    async def test_it_shares_a_group_and_a_salt_with_the_same_chat(self, sidecar: Running, engine: StubEngine) -> None:
        prompt = "The quick brown fox jumps over the lazy dog. " * 20
        await post(sidecar, input=prompt)
        chat = {"model": "stub-model", "messages": [{"role": "user", "content": prompt}]}
        async with sidecar.client.post(sidecar.url + "/v1/chat/completions", json=chat) as answer:
            assert answer.status == 200
        _, told = await sidecar.control("GET", "/pool/explain?n=2")
        chat_after, _ = (wire.from_json(wire.Decision, one) for one in told["decisions"])
        assert chat_after.predicted_hit_tokens is not None
        assert chat_after.predicted_hit_tokens > 50
        assert engine.requests[0].json["cache_salt"] == engine.requests[1].json["cache_salt"]

    @pytest.mark.parametrize("streams", [True, False])
    async def test_it_is_metered_as_a_chat_is(self, sidecar: Running, streams: bool) -> None:
        status, body = await post(sidecar, stream=streams)
        assert status == 200
        response = events_in(body)[-1]["response"] if streams else json.loads(body)
        assert response["output"][0]["content"][0]["text"] == "The capital of France is Paris."
        assert (response["usage"]["output_tokens"], response["store"]) == (7, False)
        _, page = await sidecar.control("GET", "/metrics")
        assert 'cacheaware_output_tokens_total{tier="bronze"} 7.0' in page
        assert 'cacheaware_cached_tokens_total{tier="bronze"} 64.0' in page
        assert 'cacheaware_requests_total{outcome="answered",tier="bronze"} 1.0' in page

    async def test_identity_and_tiers_hold_here_too(self, engine: StubEngine, folder: Path) -> None:
        wanted = view_json(identity={"type": "APIKeys"}, sharing="Tenant")
        keys = {"key-of-zeta": {"tenant": "zeta", "tiers": ["bronze"]}}
        async with running_sidecar(engine, folder, wanted=wanted, keys=keys) as sidecar:
            assert (await post(sidecar))[0] == 401
            sidecar.client.headers["Authorization"] = "Bearer key-of-zeta"
            assert (await post(sidecar, service_tier="gold"))[0] == 403
            assert (await post(sidecar, service_tier="lead"))[0] == 400
            assert (await post(sidecar))[0] == 200
        assert len(engine.requests) == 1

    async def test_what_is_refused_never_reaches_the_engine(self, sidecar: Running, engine: StubEngine) -> None:
        status, body = await post(sidecar, previous_response_id="resp_1")
        assert status == 400
        assert json.loads(body)["error"]["param"] == "previous_response_id"
        assert engine.requests == []

    async def test_the_engines_own_400_passes_whole(self, sidecar: Running, engine: StubEngine) -> None:
        engine.behaviour = Behaviour(status=400, body=b'{"error": {"message": "too long"}}')
        assert await post(sidecar, stream=True) == (400, b'{"error": {"message": "too long"}}')

    async def test_an_answer_that_is_no_chat_is_502(self, sidecar: Running, engine: StubEngine) -> None:
        engine.behaviour = Behaviour(body=b"[not json")
        assert (await post(sidecar))[0] == 502
        await eventually(sidecar.is_idle)

    @pytest.mark.parametrize(
        "how",
        [
            pytest.param(Behaviour(die_after=2, flush=True), id="it dies"),
            pytest.param(Behaviour(end_after=2, flush=True), id="it ends early"),
            pytest.param(Behaviour(pieces=(b'data: {"choices": []}\n\n', b"data: [DONE]\n\n")), id="it says nothing"),
            pytest.param(Behaviour(pieces=(b'data: {"choices": []}\n\n', b"data: x\n\n")), id="it says no JSON"),
            pytest.param(Behaviour(pieces=(b'data: {"error": {"message": "no"}}\n\n',)), id="it says that it broke"),
        ],
    )
    async def test_a_stream_that_breaks_ends_in_an_error_that_clients_raise(
        self, sidecar: Running, engine: StubEngine, how: Behaviour
    ) -> None:
        engine.behaviour = how
        status, body = await post(sidecar, stream=True)
        events = events_in(body)
        assert status == 200
        assert [event["type"] for event in (events[0], *events[-2:])] == [OPENING[0], "response.failed", "error"]
        await eventually(sidecar.is_idle)
        _, page = await sidecar.control("GET", "/metrics")
        assert 'cacheaware_requests_total{outcome="engine-broke",tier="bronze"} 1.0' in page

    async def test_a_response_cannot_be_fetched_because_none_is_kept(self, sidecar: Running) -> None:
        async with sidecar.client.get(f"{sidecar.url}{PATH}/resp_1") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "unsupported")
