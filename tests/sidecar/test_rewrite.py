"""What the engine is sent: the client's wish about the text, the server's decision about everything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheaware_sidecar.errors import BadRequest
from cacheaware_sidecar.rewrite import (
    PRIVATE,
    for_engine,
    label,
    parse_generation,
    parse_object,
    request_headers,
    response_headers,
    trace_id,
    without_private,
)

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)


def rewritten(body: dict[str, Any], priority: int = 100) -> dict[str, Any]:
    sent = for_engine(parse_generation(json.dumps(body).encode()), tier="gold", priority=priority, salt="our salt")
    result: dict[str, Any] = json.loads(sent)
    return result


class TestBody:
    def test_tier_priority_and_salt_are_ours(self) -> None:
        sent = rewritten({"prompt": "Hi"})
        assert sent == {
            "prompt": "Hi",
            "priority": -100,
            "cache_salt": "our salt",
            "vllm_xargs": {"cacheaware_tier": "gold"},
        }

    @pytest.mark.parametrize(("tier", "engine"), [(100, -100), (0, 0), (-5, 5)])
    def test_the_engine_counts_priority_the_other_way_round(self, tier: int, engine: int) -> None:
        assert rewritten({}, priority=tier)["priority"] == engine

    @pytest.mark.parametrize("field", PRIVATE)
    def test_a_clients_own_value_never_gets_through(self, field: str) -> None:
        sent = rewritten({"prompt": "Hi", field: "gold"})
        assert sent.get(field) != "gold"
        assert json.loads(without_private({field: "gold", "prompt": "Hi"})) == {"prompt": "Hi"}

    def test_a_field_said_twice_gets_through_neither_time(self) -> None:
        asked = parse_generation(
            b'{"cache_salt": "a", "prompt": "Hi", "cache_salt": "b", "priority": 1, "priority": -9}'
        )
        sent = for_engine(asked, tier="gold", priority=1, salt="our salt")
        assert sent.count(b"cache_salt") == sent.count(b"priority") == 1
        assert json.loads(sent)["cache_salt"] == "our salt"

    def test_an_integer_beyond_64_bits_passes_digit_by_digit(self) -> None:
        assert b'"x":123456789012345678901234567890' in for_engine(
            parse_generation(b'{"x": 123456789012345678901234567890}'), tier="gold", priority=0, salt="s"
        )

    def test_unknown_fields_pass_unchanged(self) -> None:
        more = {"guided_json": {"type": "object"}, "x": 1.5, "big": 12345678901234567890123, "text": "ü🙂\x00"}
        sent = rewritten({"prompt": "Hi", **more})
        assert {name: sent[name] for name in more} == more

    @pytest.mark.parametrize(
        ("options", "sent", "wants"),
        [
            pytest.param(None, {"include_usage": True}, False, id="no options"),
            pytest.param({}, {"include_usage": True}, False, id="empty options"),
            pytest.param({"include_usage": False}, {"include_usage": True}, False, id="refused by the client"),
            pytest.param({"include_usage": True}, {"include_usage": True}, True, id="wanted by the client"),
            pytest.param({"include_usage": True, "x": 1}, {"include_usage": True, "x": 1}, True, id="others stay"),
            pytest.param({"continuous_usage_stats": True}, {"include_usage": True}, False, id="usage in every chunk"),
        ],
    )
    def test_a_stream_always_tells_its_usage(self, options: Any, sent: Any, wants: bool) -> None:
        body = {"stream": True} | ({} if options is None else {"stream_options": options})
        assert rewritten(body)["stream_options"] == sent
        assert parse_generation(json.dumps(body).encode()).wants_usage is wants

    def test_an_answer_that_does_not_stream_gets_no_stream_options(self) -> None:
        assert "stream_options" not in rewritten({"stream": False})

    @pytest.mark.parametrize(
        ("data", "says"),
        [
            pytest.param(b"", "not JSON", id="empty"),
            pytest.param(b"{", "not JSON", id="cut"),
            pytest.param(b"[]", "JSON object", id="list"),
            pytest.param(b'"Hi"', "JSON object", id="string"),
            pytest.param(b"null", "JSON object", id="null"),
            pytest.param(b'{"prompt": "\xff"}', "UTF-8", id="invalid UTF-8"),
            pytest.param(b'{"prompt": "\xf0\x9f"}', "UTF-8", id="half a character"),
            pytest.param(b'{"x": NaN}', "NaN", id="NaN"),
            pytest.param(b'{"x": -Infinity}', "Infinity", id="Infinity"),
            pytest.param(b'{"x": ' + b"9" * 5000 + b"}", "digits", id="an integer of 5,000 digits"),
            pytest.param(b'{"x": 1e999}', "too large", id="a number beyond every float"),
            pytest.param(b"[" * 100_000, "nested", id="deep nesting"),
            pytest.param(b'{"stream": "yes"}', "true or false", id="stream that is a string"),
            pytest.param(b'{"stream": 1}', "true or false", id="stream that is a number"),
            pytest.param(b'{"stream_options": []}', "object", id="stream options that are a list"),
        ],
    )
    def test_what_cannot_be_read_is_400(self, data: bytes, says: str) -> None:
        with pytest.raises(BadRequest, match=says) as caught:
            parse_generation(data)
        assert len(caught.value.message) < 300

    @pytest.mark.parametrize(
        ("data", "says"),
        [
            pytest.param(b'{"prompt": "\\ud800"}', "surrogate", id="half a surrogate pair"),
        ],
    )
    def test_what_cannot_be_written_is_400(self, data: bytes, says: str) -> None:
        asked = parse_generation(data)
        with pytest.raises(BadRequest, match=says):
            for_engine(asked, tier="gold", priority=0, salt="s")

    @settings(deadline=None)  # other processes share the cores
    @given(st.dictionaries(st.text(max_size=3), ANYTHING), st.sampled_from([None, 1]), st.booleans())
    def test_a_body_is_read_as_the_standard_library_reads_it(
        self, body: dict[str, Any], indent: int | None, escaped: bool
    ) -> None:
        try:
            text = json.dumps(body, indent=indent, ensure_ascii=escaped, allow_nan=False)
        except ValueError:
            return  # infinity is no JSON
        assert repr(parse_object(text.encode())) == repr(json.loads(text))

    def test_half_of_a_surrogate_pair_can_be_read(self) -> None:
        assert parse_object(b'{"x": "\\ud800", "y": 1}') == {"x": "\ud800", "y": 1}


class TestNumbers:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("n", 1),
            ("n", 16),
            ("n", 2.0),
            ("max_tokens", 1),
            ("max_tokens", None),
            ("temperature", 0),
            ("temperature", 2.0),
            ("top_p", 1),
            ("top_k", -1),
            ("seed", -(2**63)),
            ("logprobs", True),
            ("logprobs", 5),
            ("prompt_logprobs", 0),
        ],
    )
    def test_what_makes_sense_passes(self, field: str, value: Any) -> None:
        assert rewritten({field: value})[field] == value

    @pytest.mark.parametrize(
        "field",
        [
            "n",
            "best_of",
            "max_tokens",
            "max_completion_tokens",
            "min_tokens",
            "prompt_logprobs",
            "logprobs",
            "top_logprobs",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "seed",
        ],
    )
    @pytest.mark.parametrize("value", [-(2**70), 2**70, 1e300, "1", [], {}, -99.5])
    def test_a_wild_value_in_any_field_is_400_and_named(self, field: str, value: Any) -> None:
        with pytest.raises(BadRequest) as caught:
            rewritten({field: value})
        assert caught.value.param == field

    @pytest.mark.parametrize(
        ("field", "value"),
        [("n", 0), ("n", 17), ("n", 1.5), ("n", True), ("top_p", 0), ("max_tokens", 0), ("prompt_logprobs", -1)],
    )
    def test_just_outside_is_outside(self, field: str, value: Any) -> None:
        with pytest.raises(BadRequest, match=f"{field} must be"):
            rewritten({field: value})

    def test_best_of_must_cover_n_and_counts_the_sequences(self) -> None:
        assert parse_generation(b'{"n": 2, "best_of": 4}').sequences == 4
        assert parse_generation(b'{"n": 3}').sequences == 3
        with pytest.raises(BadRequest, match="best_of must be at least n"):
            parse_generation(b'{"n": 4, "best_of": 2}')

    @pytest.mark.parametrize(
        ("prompt", "sequences"),
        [
            pytest.param("Hi", 2, id="a text"),
            pytest.param([1, 2, 3], 2, id="token ids"),
            pytest.param(["a", "b", "c"], 6, id="texts"),
            pytest.param([[1], [2, 3]], 4, id="lists of token ids"),
            pytest.param([], 2, id="none"),
        ],
    )
    def test_each_prompt_of_a_list_takes_a_place_of_its_own(self, prompt: Any, sequences: int) -> None:
        assert parse_generation(json.dumps({"prompt": prompt, "n": 2}).encode()).sequences == sequences

    def test_a_list_of_prompts_has_a_bound(self) -> None:
        assert parse_generation(json.dumps({"prompt": ["a"] * 256}).encode()).sequences == 256
        with pytest.raises(BadRequest, match="at most 256 prompts") as caught:
            parse_generation(json.dumps({"prompt": ["a"] * 257}).encode())
        assert caught.value.param == "prompt"

    @settings(deadline=None)  # other processes share the cores
    @given(st.dictionaries(st.sampled_from(["n", "best_of", "max_tokens", "seed", "logprobs"]), ANYTHING))
    def test_no_value_breaks_the_check(self, body: dict[str, Any]) -> None:
        try:
            asked = parse_generation(json.dumps(body).encode())
        except BadRequest:
            return  # refused in words is as good as taken
        assert 1 <= asked.sequences <= 16


OF_ONE_HOP = (
    "Connection",
    "Keep-Alive",
    "Proxy-Authenticate",
    "Proxy-Authorization",
    "Proxy-Connection",
    "TE",
    "Trailer",
    "Transfer-Encoding",
    "Upgrade",
)


class TestHeaders:
    @pytest.mark.parametrize(
        "name",
        [
            "Authorization",
            "Cookie",
            "Host",
            *OF_ONE_HOP,
            "Content-Length",
            "Expect",
            "X-Forwarded-For",
            "X-Data-Parallel-Rank",
            "X-Cacheaware-Tier",
            "X-Cacheaware-Tenant",
            "X-LLM-D-Inference-Objective",
            "X-LLM-D-Inference-Fairness-Id",
            "X-LLM-D-SLO-TTFT-MS",
        ],
    )
    def test_nothing_that_routes_or_authenticates_reaches_the_engine(self, name: str) -> None:
        assert name.lower() not in request_headers([(name, "x")], "req-1")

    def test_tracing_goes_on_and_the_request_id_is_ours(self) -> None:
        sent = request_headers([("Traceparent", "00-a-b-01"), ("X-Request-Id", "theirs")], "req-1")
        assert sent["traceparent"] == "00-a-b-01"
        assert sent["x-request-id"] == "req-1"
        assert sent["accept-encoding"] == "identity"

    def test_what_connection_names_ends_here_both_ways(self) -> None:
        pairs = [("Connection", "close, Tracestate, X-Hop"), ("Tracestate", "a"), ("X-Hop", "b"), ("Accept", "*/*")]
        assert "tracestate" not in request_headers(pairs, "req-1")
        # "tracestate" and "x-hop" are named in Connection, so they belong to that hop
        assert response_headers([*pairs, ("X-Stays", "c")]) == [("accept", "*/*"), ("x-stays", "c")]

    @pytest.mark.parametrize(
        "name",
        [
            *OF_ONE_HOP,
            "Content-Length",
            "Content-Encoding",
            "Set-Cookie",
            "X-Request-Id",
        ],
    )
    def test_framing_of_an_answer_is_not_copied(self, name: str) -> None:
        assert response_headers([(name, "x")]) == []

    @pytest.mark.parametrize(
        ("header", "trace"),
        [
            pytest.param(f"00-{'ab' * 16}-{'cd' * 8}-01", "ab" * 16, id="a trace"),
            pytest.param(f"cc-{'ab' * 16}-{'cd' * 8}-01-what-comes-later", "ab" * 16, id="a later version"),
            pytest.param(f"00-{'0' * 32}-{'cd' * 8}-01", None, id="all zeros"),
            pytest.param(f"00-{'AB' * 16}-{'cd' * 8}-01", None, id="capitals"),
            pytest.param("a line\nbreak", None, id="nonsense"),
            pytest.param(None, None, id="none"),
        ],
    )
    def test_the_log_names_the_trace(self, header: str | None, trace: str | None) -> None:
        assert trace_id(header) == trace

    @pytest.mark.parametrize(
        ("text", "kept"),
        [("abc-1.2:3", True), ("", False), ("a\nb", False), ("x" * 129, False), ("{}", False), (None, False)],
    )
    def test_a_callers_request_id_is_a_label_only_if_it_is_harmless(self, text: str | None, kept: bool) -> None:
        assert label(text) == (text if kept else None)
