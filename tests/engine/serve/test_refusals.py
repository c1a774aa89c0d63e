"""What is refused, and how: the right status, OpenAI's shape, and the field at fault by name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cacheaware_api.wire import Ledger, from_json
from cacheaware_engine.engine_testing import HeldRunner, Served, SteppedEngine, served
from cacheaware_engine.errors import BadRequest
from cacheaware_engine.fields import load_json
from cacheaware_engine.loader import LoadedModel
from cacheaware_engine.metrics import Metrics
from cacheaware_engine.openai_requests import Limits, chat_request, completion_request
from cacheaware_engine.service import Service

MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT = {"model": "tiny", "messages": MESSAGES}
COMPLETION = {"model": "tiny", "prompt": "Hello"}
LIMITS = Limits(vocab_size=259, max_sequences=8)

HOSTILE = [
    pytest.param(-1, id="negative"),
    pytest.param(10**30, id="huge"),
    pytest.param(1e308, id="huge float"),
    pytest.param(float("inf"), id="infinite"),
    pytest.param(float("nan"), id="not a number"),
    pytest.param("1", id="string"),
    pytest.param(True, id="true"),
    pytest.param([1], id="list"),
    pytest.param({}, id="object"),
]
NUMBERS = [
    "temperature", "top_p", "min_p", "top_k", "seed", "n", "max_tokens", "max_completion_tokens", "min_tokens",
    "priority", "best_of",
]  # fmt: skip
FINE = [("seed", -1), ("priority", -1), ("top_k", -1)]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_is_checked_and_named(name: str, value: Any) -> None:
    if (name, value) in FINE:
        completion_request({**COMPLETION, name: value}, LIMITS)
        return
    with pytest.raises(BadRequest) as refused:
        completion_request({**COMPLETION, name: value}, LIMITS)
    assert refused.value.param == name
    assert name in refused.value.message


@pytest.mark.parametrize("value", [pytest.param(None, id="null"), pytest.param("absent", id="absent")])
@pytest.mark.parametrize(
    "name", [*NUMBERS, "stop", "stream", "stream_options", "cache_salt", "vllm_xargs", "ignore_eos"]
)
def test_null_is_the_same_as_absent(name: str, value: str | None) -> None:
    body = COMPLETION if value == "absent" else {**COMPLETION, name: None}
    wanted = completion_request(body, LIMITS).wanted
    assert (wanted.sampling.temperature, wanted.n, wanted.stop, wanted.stream) == (1.0, 1, (), False)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({"temperature": 2.1}, "temperature", id="temperature above 2"),
        pytest.param({"top_p": 0}, "top_p", id="no probability"),
        pytest.param({"top_p": 1.01}, "top_p", id="more than all"),
        pytest.param({"top_k": 1.5}, "top_k", id="half a token"),
        pytest.param({"n": 0}, "n", id="no choices"),
        pytest.param({"n": 9}, "n", id="more sequences than run at once"),
        pytest.param({"max_tokens": 0}, "max_tokens", id="no tokens"),
        pytest.param({"min_tokens": 5, "max_tokens": 4}, "min_tokens", id="more at least than at most"),
        pytest.param({"stop": ""}, "stop[0]", id="empty stop"),
        pytest.param({"stop": ["a", 1]}, "stop[1]", id="stop of another type"),
        pytest.param({"stop": ["x"] * 17}, "stop", id="too many stops"),
        pytest.param({"stop_token_ids": [259]}, "stop_token_ids[0]", id="stop token outside the vocabulary"),
        pytest.param({"stream": "yes"}, "stream", id="stream in words"),
        pytest.param({"stream": 1}, "stream", id="stream as a number"),
        pytest.param({"stream_options": {"include_usage": True}}, "stream_options", id="options without a stream"),
        pytest.param({"stream": True, "stream_options": []}, "stream_options", id="options as a list"),
        pytest.param(
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            id="usage as a number",
        ),
        pytest.param({"ignore_eos": 0}, "ignore_eos", id="ignore_eos as a number"),
        pytest.param({"cache_salt": 5}, "cache_salt", id="salt as a number"),
        pytest.param({"cache_salt": ""}, "cache_salt", id="empty salt"),
        pytest.param({"vllm_xargs": "gold"}, "vllm_xargs", id="extras as a string"),
        pytest.param({"vllm_xargs": {"cacheaware_tier": 1}}, "vllm_xargs.cacheaware_tier", id="tier as a number"),
        pytest.param(
            {"vllm_xargs": {"cacheaware_tier": "<public>"}}, "vllm_xargs.cacheaware_tier", id="no tier's name"
        ),
        pytest.param({"model": 5}, "model", id="model as a number"),
        pytest.param({"model": None}, "model", id="no model"),
        pytest.param({"prompt": None}, "prompt", id="no prompt"),
        pytest.param({"prompt": 7}, "prompt", id="prompt as a number"),
        pytest.param({"prompt": []}, "prompt", id="no prompts"),
        pytest.param({"prompt": [1, "a"]}, "prompt[1]", id="ids and text"),
        pytest.param({"prompt": ["a", [1]]}, "prompt[1]", id="text and ids"),
        pytest.param({"prompt": [1, True]}, "prompt[1]", id="true as a token"),
        pytest.param({"prompt": [-1]}, "prompt[0]", id="negative token"),
        pytest.param({"prompt": [[1], [259]]}, "prompt[1][0]", id="token outside the vocabulary"),
        pytest.param({"prompt": [10**30]}, "prompt[0]", id="huge token"),
        pytest.param({"prompt": ["a"] * 300}, "prompt", id="too many prompts"),
        pytest.param({"prompt": "a\ud800"}, "prompt", id="half of a surrogate pair"),
        pytest.param({"logprobs": True}, "logprobs", id="logprobs as chats ask for them"),
        pytest.param({"logprobs": 21}, "logprobs", id="too many logprobs"),
        pytest.param({"presence_penalty": True}, "presence_penalty", id="true as a penalty"),
        pytest.param({"frequency_penalty": -2.1}, "frequency_penalty", id="a penalty too far below zero"),
        pytest.param({"repetition_penalty": 0}, "repetition_penalty", id="a repetition penalty of zero"),
        pytest.param({"logit_bias": [1]}, "logit_bias", id="biases in a list"),
        pytest.param({"logit_bias": {"x": 1}}, "logit_bias.x", id="a bias for no token"),
        pytest.param({"logit_bias": {"259": 1}}, "logit_bias.259", id="a bias outside the vocabulary"),
        pytest.param({"logit_bias": {"5": 101}}, "logit_bias.5", id="a bias too large"),
    ],
)
def test_a_bad_field_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        completion_request({**COMPLETION, **body}, LIMITS)
    assert refused.value.param == param
    assert param in refused.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("echo", True),
        ("suffix", "x"), ("tools", [{}]), ("tool_choice", "auto"), ("response_format", {"type": "json_object"}),
        ("best_of", 2), ("guided_json", {}), ("structured_outputs", {}), ("modalities", ["audio"]), ("functions", [{}]),
    ],
)  # fmt: skip
def test_what_this_engine_does_not_do_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=name) as refused:
        completion_request({**COMPLETION, name: value}, LIMITS)
    assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", False), ("tools", []), ("tool_choice", "none"), ("response_format", {"type": "text"}),
        ("echo", False),
        ("presence_penalty", 0), ("frequency_penalty", 0.0), ("repetition_penalty", 1.0), ("logit_bias", {}),
        ("suffix", ""),
        ("best_of", 1), ("user", "someone"), ("metadata", {"a": 1}), ("never_heard_of", [1, 2]),
    ],
)  # fmt: skip
def test_asking_for_nothing_special_is_fine(name: str, value: Any) -> None:
    completion_request({**COMPLETION, name: value}, LIMITS)


def test_other_likely_tokens_are_told_only_with_log_probabilities() -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(BadRequest, match="logprobs: true"):
        chat_request({**chat, "top_logprobs": 2}, LIMITS)
    assert chat_request({**chat, "logprobs": True}, LIMITS).wanted.sampling.logprobs == 0
    assert chat_request({**chat, "logprobs": True, "top_logprobs": 2}, LIMITS).wanted.sampling.logprobs == 2
    assert chat_request({**chat, "logprobs": False, "top_logprobs": 0}, LIMITS).wanted.sampling.logprobs is None


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        pytest.param(None, "messages", id="none"),
        pytest.param([], "messages", id="empty"),
        pytest.param("Hello", "messages", id="a string"),
        pytest.param(["Hello"], "messages[0]", id="a string as message"),
        pytest.param([{"content": "x"}], "messages[0].role", id="no role"),
        pytest.param([{"role": "king", "content": "x"}], "messages[0].role", id="unknown role"),
        pytest.param([{"role": "user"}], "messages[0].content", id="no content"),
        pytest.param([{"role": "user", "content": 5}], "messages[0].content", id="content as a number"),
        pytest.param([*MESSAGES, {"role": "tool", "content": "x"}], "messages[1]", id="tool role"),
        pytest.param([{"role": "assistant", "tool_calls": [{}]}], "messages[0]", id="tool calls"),
        pytest.param(
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0]",
            id="image",
        ),
        pytest.param(
            [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", id="part without text"
        ),
        pytest.param([{"role": "user", "content": ["x"]}], "messages[0].content[0]", id="part without type"),
        pytest.param([{"role": "user", "content": "\udfff"}], "messages[0].content", id="half of a surrogate pair"),
    ],
)
def test_bad_messages_are_named_by_position(messages: Any, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        chat_request({**CHAT, "messages": messages}, LIMITS)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("body", "said"),
    [
        pytest.param(b"", "not valid JSON", id="empty"),
        pytest.param(b"{", "not valid JSON", id="cut"),
        pytest.param(b'{"a": "\xff"}', "not valid UTF-8", id="not UTF-8"),
        pytest.param(b'{"a": NaN}', "NaN", id="NaN"),
        pytest.param(b'{"a": -Infinity}', "Infinity", id="infinity"),
        pytest.param(b"[]", "an empty list", id="a list"),
        pytest.param(b'"x"', "'x'", id="a string"),
        pytest.param(b"null", "nothing", id="null"),
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}", "too long", id="a number of 5,000 digits"),
        pytest.param(b"[" * 100_000, "too deep", id="nested without end"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        load_json(body)


# -- over HTTP --------------------------------------------------------------------------------------------------------


async def refusal(server: Served, path: str, body: Any) -> tuple[int, Any]:
    status, answer = await server.post(path, body)
    assert set(answer) == {"error"}, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return status, answer["error"]


async def test_a_prompt_longer_than_the_context_is_refused(server: Served) -> None:
    body = {"model": "tiny", "prompt": [5] * 256}
    status, error = await refusal(server, "/v1/completions", body)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert "256" in error["message"]
    status, error = await refusal(
        server, "/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "x" * 300}]}
    )
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")


async def test_max_tokens_beyond_the_context_is_refused_and_its_absence_fills_it(server: Served) -> None:
    body = {"model": "tiny", "prompt": [5] * 250, "ignore_eos": True}
    status, error = await refusal(server, "/v1/completions", {**body, "max_tokens": 7})
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "max_tokens")
    _, answer = await server.post("/v1/completions", {**body, "max_tokens": 6})
    assert answer["usage"]["total_tokens"] == 256
    _, answer = await server.post("/v1/completions", body)  # OpenAI's 16 where they fit
    assert answer["usage"]["total_tokens"] == 256
    _, answer = await server.post("/v1/completions", {**body, "prompt": [5] * 100})
    assert answer["usage"]["completion_tokens"] == 16
    _, answer = await server.post("/v1/completions", {**body, "prompt": [5] * 200, "max_tokens": None})
    assert answer["usage"]["total_tokens"] == 256
    _, answer = await server.post("/v1/chat/completions", {**CHAT, "ignore_eos": True})
    assert answer["usage"]["total_tokens"] == 256


async def test_an_empty_prompt_is_refused(server: Served) -> None:
    status, error = await refusal(server, "/v1/completions", {"model": "tiny", "prompt": ""})
    assert (status, error["param"]) == (400, "prompt")


async def test_what_can_never_fit_is_refused_with_the_arithmetic(tiny: LoadedModel, tmp_path: Path) -> None:
    async with served(SteppedEngine(tiny, num_blocks=10, block_size=4), tmp_path / "kv.sock") as server:
        status, error = await refusal(server, "/v1/completions", {"model": "tiny", "prompt": [5] * 60, "max_tokens": 9})
        assert (status, error["code"]) == (400, "never_fits")
        assert "16 blocks" in error["message"]
        assert "10" in error["message"]


async def test_an_unknown_tier_is_refused_with_those_that_exist(server: Served) -> None:
    tier = {"name": "gold", "priority": 1, "weight": 1, "nominal": 50, "effective": 50, "limit": 96, "lending": 50}
    revision = {"pool_uid": "a", "number": 1}
    status, _ = await server.put("/kv/quotas", {"revision": revision, "tiers": [tier], "public": 0})
    assert status == 200
    for extra in ({"cacheaware_tier": "silver"}, {}):
        status, error = await refusal(server, "/v1/completions", {**COMPLETION, "vllm_xargs": extra})
        assert (status, error["param"], error["code"]) == (400, "vllm_xargs.cacheaware_tier", "unknown_tier")
        assert "gold" in error["message"]
    status, _ = await server.post("/v1/completions", {**COMPLETION, "vllm_xargs": {"cacheaware_tier": "gold"}})
    assert status == 200


async def test_one_of_several_prompts_that_is_refused_leaves_nothing_behind(server: Served) -> None:
    status, _ = await refusal(server, "/v1/completions", {"model": "tiny", "prompt": [[5] * 20, [5] * 300]})
    assert status == 400
    ledger = from_json(Ledger, await server.idle())
    assert ledger.running == ledger.waiting == 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404), ("POST", "/v1/embeddings", 404), ("GET", "/kv/ledger", 404), ("PUT", "/kv/quotas", 404),
        ("GET", "/v1/chat/completions", 405), ("DELETE", "/v1/models", 405),
    ],
)  # fmt: skip
async def test_other_paths_and_methods_are_refused_in_the_same_shape(
    server: Served, method: str, path: str, status: int
) -> None:
    async with server.http.request(method, server.url + path) as response:
        assert response.status == status
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        assert response.headers["x-request-id"]


async def test_a_body_over_the_limit_is_413(server: Served) -> None:
    body = json.dumps({**COMPLETION, "user": "x" * 2**18}).encode()

    async def in_pieces() -> Any:
        for start in range(0, len(body), 2**16):
            yield body[start : start + 2**16]

    for data in (body, in_pieces()):
        async with server.http.post(server.url + "/v1/completions", data=data) as response:
            assert response.status == 413
            assert "larger" in (await response.json())["error"]["message"]


async def test_bytes_that_are_no_json_are_400(server: Served) -> None:
    for data in (b"\xff\xfe", b"{", b"[" * 50_000):
        async with server.http.post(server.url + "/v1/chat/completions", data=data) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_while_the_model_loads_everything_is_503() -> None:
    from aiohttp.test_utils import TestClient, TestServer

    from cacheaware_engine.app import create_app

    service = Service("tiny", "file:///tiny", Metrics("tiny"))
    async with TestClient(TestServer(create_app(service, 1000))) as client:
        health = await client.get("/health")
        assert (health.status, await health.json()) == (503, {"status": "loading"})
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/tokenize")):
            answer = await client.request(method, path, json=COMPLETION)
            assert answer.status == 503
            assert answer.headers["Retry-After"]
            assert "loading" in (await answer.json())["error"]["message"]
        assert (await client.get("/metrics")).status == 200


async def test_while_it_drains_what_runs_is_finished_and_what_comes_is_503(held: tuple[Served, HeldRunner]) -> None:
    server, runner = held
    runner.let(3)
    running = asyncio.create_task(server.post("/v1/completions", {**COMPLETION, "max_tokens": 250, "ignore_eos": True}))
    await runner.stopped()
    draining = asyncio.create_task(server.service.drain(30))
    await asyncio.sleep(0)
    status, error = await refusal(server, "/v1/completions", COMPLETION)
    assert (status, error["code"]) == (503, "draining")
    async with server.http.get(server.url + "/health") as response:
        assert response.status == 503
    assert (await server.ledger())["running"] == 1, "accounts can be read to the end"
    runner.let()
    status, answer = await running
    assert (status, answer["usage"]["completion_tokens"]) == (200, 250)
    await draining
