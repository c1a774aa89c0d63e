"""The OpenAI API as clients see it: answers, streams, usage and the small endpoints."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from cacheaware_engine.engine_testing import Served

MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
COMPLETION = {"model": "tiny", "prompt": "Hello", "temperature": 0, "max_tokens": 8, "ignore_eos": True}


async def stream(server: Served, path: str, body: Any) -> list[Any]:
    """The values of a stream's events, after checking its form."""
    async with server.http.post(server.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        text = (await response.read()).decode()
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") and "\n" not in event for event in events[:-1])
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


async def test_a_chat_is_answered(server: Served) -> None:
    status, body = await server.post("/v1/chat/completions", CHAT)
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    prompt_tokens = len(server.stepped.tokenizer.encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"))
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 8,
        "total_tokens": prompt_tokens + 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_stream_says_what_the_whole_answer_says(server: Served) -> None:
    for path, body, text_of in (
        ("/v1/chat/completions", CHAT, lambda choice: choice["delta"].get("content", "")),
        ("/v1/completions", COMPLETION, lambda choice: choice["text"]),
    ):
        _, whole = await server.post(path, {**body, "max_tokens": 40, "n": 2, "seed": 4, "temperature": 1})
        chunks = await stream(server, path, {**body, "max_tokens": 40, "n": 2, "seed": 4, "temperature": 1})
        for choice in whole["choices"]:
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            assert "".join(map(text_of, own)) == text
            assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
            assert own[-1]["finish_reason"] is not None


async def test_a_chat_stream_has_the_form_that_clients_expect(server: Served) -> None:
    chunks = await stream(server, "/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_a_stream_has_no_usage_unless_asked_for(server: Served) -> None:
    chunks = await stream(server, "/v1/chat/completions", CHAT)
    assert not any("usage" in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [
        pytest.param("Hi", ["Hi"], id="a string"),
        pytest.param(["Hi", "Ho", "Hi"], ["Hi", "Ho", "Hi"], id="strings"),
        pytest.param([72, 105], [[72, 105]], id="token ids"),
        pytest.param([[72, 105], [72]], [[72, 105], [72]], id="lists of token ids"),
    ],
)
async def test_every_kind_of_prompt_is_a_request_of_its_own(server: Served, prompt: Any, choices: list[Any]) -> None:
    status, body = await server.post("/v1/completions", {**COMPLETION, "prompt": prompt})
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == list(range(len(choices)))
    for choice, alone in zip(body["choices"], choices, strict=True):
        _, single = await server.post("/v1/completions", {**COMPLETION, "prompt": alone})
        assert choice["text"] == single["choices"][0]["text"]
    tokens = [len(alone) for alone in choices]
    assert body["usage"]["prompt_tokens"] == sum(tokens)
    assert body["usage"]["completion_tokens"] == 8 * len(choices)


async def test_choices_of_several_prompts_and_n_are_numbered_prompt_by_prompt(server: Served) -> None:
    _, body = await server.post("/v1/completions", {**COMPLETION, "prompt": ["Hi", "Ho"], "n": 2})
    texts = [choice["text"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3]


async def test_a_prefix_hit_shows_in_the_usage(server: Served) -> None:
    body = {**COMPLETION, "prompt": list(range(50, 81))}
    await server.post("/v1/completions", body)
    _, again = await server.post("/v1/completions", body)
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 28}
    chunks = await stream(server, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 28}


async def test_a_salt_keeps_a_prefix_from_others(server: Served) -> None:
    body = {**COMPLETION, "prompt": list(range(50, 81)), "cache_salt": "one"}
    await server.post("/v1/completions", body)
    _, other = await server.post("/v1/completions", {**body, "cache_salt": "two"})
    _, same = await server.post("/v1/completions", body)
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert same["usage"]["prompt_tokens_details"]["cached_tokens"] == 28


async def test_a_stop_string_ends_the_text_before_it(server: Served) -> None:
    _, free = await server.post("/v1/completions", {**COMPLETION, "max_tokens": 60})
    text = free["choices"][0]["text"]
    stop = text[20:22]
    for path_stop in (stop, ["never seen", stop]):
        _, body = await server.post("/v1/completions", {**COMPLETION, "max_tokens": 60, "stop": path_stop})
        assert body["choices"][0]["text"] == text[: text.find(stop)]
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["choices"][0]["stop_reason"] == stop
        chunks = await stream(server, "/v1/completions", {**COMPLETION, "max_tokens": 60, "stop": path_stop})
        assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == text[: text.find(stop)]


async def test_a_stop_token_ends_the_text(server: Served) -> None:
    body = {**COMPLETION, "prompt": [1, 2, 3], "max_tokens": 40, "stop_token_ids": list(range(16))}
    _, answer = await server.post("/v1/completions", body)
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")
    _, all_ids = await server.post("/v1/completions", {**body, "stop_token_ids": [*range(243, 259)], "seed": 1})
    assert all_ids["choices"][0]["finish_reason"] in ("stop", "length")


async def test_min_tokens_keeps_the_end_from_coming_early(server: Served) -> None:
    """With this temperature the random model ends soon; min_tokens rules its end out until then."""
    body = {**COMPLETION, "temperature": 2, "ignore_eos": False, "max_tokens": 60, "min_tokens": 50}
    answers = await asyncio.gather(*(server.post("/v1/completions", {**body, "seed": seed}) for seed in range(12)))
    assert all(50 <= answer["usage"]["completion_tokens"] <= 60 for _, answer in answers)


async def test_content_may_be_text_parts(server: Served) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    _, joined = await server.post("/tokenize", {"messages": [{"role": "user", "content": parts}]})
    _, plain = await server.post("/tokenize", {"messages": [{"role": "user", "content": "Hel\nlo"}]})
    assert joined == plain


async def test_the_model_is_listed_with_its_context(server: Served) -> None:
    async with server.http.get(server.url + "/v1/models") as response:
        (entry,) = (await response.json())["data"]
    assert (entry["id"], entry["object"], entry["max_model_len"]) == ("tiny", "model", 256)


async def test_tokenize_and_detokenize_are_inverse(server: Served) -> None:
    status, tokenized = await server.post("/tokenize", {"model": "tiny", "prompt": "Grüße 🎉"})
    assert (status, tokenized["count"], tokenized["max_model_len"]) == (200, len("Grüße 🎉".encode()), 256)
    _, text = await server.post("/detokenize", {"tokens": tokenized["tokens"]})
    assert text == {"prompt": "Grüße 🎉"}


async def test_a_chat_is_tokenized_as_it_will_be_served(server: Served) -> None:
    _, tokenized = await server.post("/tokenize", {"messages": MESSAGES})
    _, answer = await server.post("/v1/chat/completions", CHAT)
    assert tokenized["count"] == answer["usage"]["prompt_tokens"]
    _, text = await server.post("/detokenize", {"tokens": tokenized["tokens"]})
    assert text["prompt"] == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


async def test_health_is_ok(server: Served) -> None:
    async with server.http.get(server.url + "/health") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})


async def test_the_callers_request_id_comes_back_and_decides_nothing(server: Served) -> None:
    for given in ("abc-1", "abc-1", None, "x" * 300, "a b"):
        headers = {} if given is None else {"x-request-id": given}
        async with server.http.post(server.url + "/v1/completions", json=COMPLETION, headers=headers) as response:
            body = await response.json()
            returned = response.headers["x-request-id"]
            assert (returned == given) == (given == "abc-1")
            assert returned
            assert "abc-1" not in body["id"]


async def test_metrics_have_vllms_names(server: Served) -> None:
    prompt = list(range(100, 120))
    for _ in range(2):
        await server.post("/v1/completions", {**COMPLETION, "prompt": prompt})
    async with server.http.get(server.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    label = '{model_name="tiny"}'
    expected = {
        f"vllm:num_requests_running{label}": 0,
        f"vllm:num_requests_waiting{label}": 0,
        f"vllm:kv_cache_usage_perc{label}": 0,
        f"vllm:prompt_tokens_total{label}": 40,
        f"vllm:generation_tokens_total{label}": 16,
        f"vllm:prefix_cache_queries_total{label}": 40,
        f"vllm:prefix_cache_hits_total{label}": 16,
        f"vllm:num_preemptions_total{label}": 0,
        f"vllm:time_to_first_token_seconds_count{label}": 2,
        f"vllm:inter_token_latency_seconds_count{label}": 14,
        f"vllm:e2e_request_latency_seconds_count{label}": 2,
        'vllm:request_success_total{finished_reason="length",model_name="tiny"}': 2,
        'vllm:request_success_total{finished_reason="stop",model_name="tiny"}': 0,
        'vllm:request_success_total{finished_reason="abort",model_name="tiny"}': 0,
    }
    assert {name: float(samples[name]) for name in expected} == expected
    (info,) = [line for line in lines if line.startswith("vllm:cache_config_info{")]
    assert 'num_gpu_blocks="96"' in info
    assert 'block_size="4"' in info


# -- the official client ----------------------------------------------------------------------------------------------


async def test_the_openai_client_works(server: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        answer = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=6, temperature=0
        )
        assert answer.choices[0].finish_reason in ("stop", "length")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        text, usage = "", None
        events = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hi"}],
            max_completion_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in events:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == answer.choices[0].message.content
        assert usage is not None
        assert usage.completion_tokens == answer.usage.completion_tokens
        legacy = await client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=3)
        assert len(legacy.choices) == 2


async def test_the_openai_client_raises_its_own_errors(server: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "Hi"}])
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=1000
            )
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "max_completion_tokens")
