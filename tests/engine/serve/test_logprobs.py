"""Log-probabilities and penalties as clients of the API see them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cacheaware_engine.engine_testing import Served

CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hello"}],
    "temperature": 0,
    "max_tokens": 6,
    "ignore_eos": True,
}
COMPLETION = {"model": "tiny", "prompt": "Hello", "temperature": 0, "max_tokens": 6, "ignore_eos": True}


async def test_a_chat_tells_each_tokens_log_probability(server: Served) -> None:
    _, body = await server.post("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 3})
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == 6
    for token in content:
        assert token["logprob"] <= 0
        assert len(token["top_logprobs"]) == 3
        assert token["top_logprobs"][0]["logprob"] == pytest.approx(token["logprob"]), "greedy takes the likeliest"
        assert bytes(token["bytes"]).decode() == token["token"]


async def test_a_completion_tells_them_in_columns(server: Served) -> None:
    _, body = await server.post("/v1/completions", {**COMPLETION, "logprobs": 2})
    columns = body["choices"][0]["logprobs"]
    assert [len(columns[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [6] * 4
    assert all(max(likely.values()) == pytest.approx(own) for likely, own in zip(
        columns["top_logprobs"], columns["token_logprobs"], strict=True
    ))  # fmt: skip


async def test_who_does_not_ask_is_told_nothing(server: Served) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        _, answer = await server.post(path, body)
        assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
async def test_a_stream_tells_what_the_whole_answer_tells(server: Served, path: str, body: Any) -> None:
    asked = {**body, "logprobs": True if "messages" in body else 0}
    _, whole = await server.post(path, asked)
    async with server.http.post(server.url + path, json={**asked, "stream": True}) as response:
        events = [line[6:] for line in (await response.text()).split("\n\n") if line.startswith("data: {")]
    told = [choice["logprobs"] for event in events for choice in json.loads(event)["choices"] if choice["logprobs"]]

    def values(logprobs: Any) -> list[float]:
        return logprobs["token_logprobs"] if "tokens" in logprobs else [one["logprob"] for one in logprobs["content"]]

    streamed = [value for logprobs in told for value in values(logprobs)]
    assert streamed == pytest.approx(values(whole["choices"][0]["logprobs"]), abs=1e-4)


async def test_a_penalty_changes_the_text_and_a_bias_forces_it(server: Served) -> None:
    _, forced = await server.post("/v1/completions", {**COMPLETION, "logit_bias": {"7": 100}})
    assert len(set(forced["choices"][0]["text"])) == 1
    _, varied = await server.post(
        "/v1/completions",
        {**COMPLETION, "logit_bias": {"7": 100, "8": 100}, "frequency_penalty": 2, "max_tokens": 40},
    )
    assert len(set(varied["choices"][0]["text"])) > 1
