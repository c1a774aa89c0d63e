"""How likely a prompt's tokens were: what the network says of them, computed past the cache and counted in neither
queries nor hits."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from cacheaware_engine.engine_testing import Served, SteppedEngine
from cacheaware_engine.errors import BadRequest
from cacheaware_engine.loader import LoadedModel
from cacheaware_engine.openai_requests import Limits, completion_request
from cacheaware_engine.testing import reference_logits

PROMPT = [random.Random(3).randrange(200) for _ in range(90)]
BODY = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 4, "ignore_eos": True, "prompt_logprobs": 2}


def check(told: list[Any], reference: Any, prompt: list[int], most: int = 2) -> None:
    expected = reference_logits(reference, prompt).log_softmax(-1)
    assert told[0] is None
    assert len(told) == len(prompt)
    for position, (token, said) in enumerate(zip(prompt[1:], told[1:], strict=True)):
        own = said[str(token)]
        assert own["logprob"] == pytest.approx(expected[position, token].item(), abs=1e-3)
        assert own["rank"] == 1 + int((expected[position] > expected[position, token] + 1e-6).sum())
        likeliest = expected[position].topk(most).indices.tolist()
        assert set(said) == {str(token), *map(str, likeliest)}
        assert [said[str(one)]["rank"] for one in likeliest] == list(range(1, most + 1))


async def test_they_are_those_of_the_network(server: Served, reference: Any) -> None:
    _, answer = await server.post("/v1/completions", {**BODY, "n": 2})
    for choice in answer["choices"]:
        check(choice["prompt_logprobs"], reference, PROMPT)


async def test_a_chat_tells_them_beside_its_choices(server: Served) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "prompt_logprobs": 0}
    _, answer = await server.post("/v1/chat/completions", body)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(said) == 1 for said in answer["prompt_logprobs"][1:])


async def test_what_is_cached_is_computed_again_and_nothing_is_looked_up(server: Served, reference: Any) -> None:
    plain = {**BODY, "prompt_logprobs": None}
    _, before = await server.post("/v1/completions", plain)
    figures = server.stepped.metrics.exposition()
    _, answer = await server.post("/v1/completions", BODY)
    check(answer["choices"][0]["prompt_logprobs"], reference, PROMPT)
    assert answer["choices"][0]["text"] == before["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    after = server.stepped.metrics.exposition()
    for name in (b"vllm:prefix_cache_queries_total", b"vllm:prefix_cache_hits_total"):
        assert [line for line in figures.splitlines() if line.startswith(name)] == [
            line for line in after.splitlines() if line.startswith(name)
        ]
    ledger = await server.idle()
    assert ledger["tiers"]["default"]["query_tokens_total"] == len(PROMPT), "of the first request alone"


async def test_who_comes_after_hits_what_was_computed_for_them(server: Served) -> None:
    await server.post("/v1/completions", BODY)
    _, answer = await server.post("/v1/completions", {**BODY, "prompt_logprobs": None})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 88


async def test_others_in_the_same_steps_are_not_touched(server: Served, reference: Any) -> None:
    other = {**BODY, "prompt": PROMPT[::-1], "prompt_logprobs": None, "max_tokens": 20}
    _, alone = await server.post("/v1/completions", other)
    (_, answer), (_, beside) = await asyncio.gather(
        server.post("/v1/completions", BODY), server.post("/v1/completions", other)
    )
    check(answer["choices"][0]["prompt_logprobs"], reference, PROMPT)
    assert beside["choices"] == alone["choices"]


def test_a_prompt_that_is_preempted_is_told_of_once(tiny: LoadedModel, reference: Any) -> None:
    engine = SteppedEngine(tiny, num_blocks=40, max_num_batched_tokens=24)
    prompts = [[(7 * i + j) % 200 for j in range(40)] for i in range(4)]
    outputs = [engine.submit(prompt, 30, prompt_logprobs=1) for prompt in prompts]
    engine.run()
    assert engine.preemptions > 0, "or this test shows nothing"
    for prompt, output in zip(prompts, outputs, strict=True):
        (told,) = [delta.prompt_reports for delta in output.deltas if delta.prompt_reports]
        expected = reference_logits(reference, prompt).log_softmax(-1)
        assert [report.chosen.token for report in told if report is not None] == prompt[1:]
        own = torch.tensor([report.chosen.logprob for report in told if report is not None])
        torch.testing.assert_close(own, expected[range(39), prompt[1:]], atol=1e-3, rtol=0)


async def test_long_prompts_are_refused(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheaware_engine.service.MAX_REPORTED_PROMPT", 89)
    status, answer = await server.post("/v1/completions", BODY)
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")
    assert "89" in answer["error"]["message"]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"stream": True}, id="in a stream"),
        pytest.param({"prompt_logprobs": 21}, id="too many"),
        pytest.param({"prompt_logprobs": -1}, id="all of them"),
        pytest.param({"prompt_logprobs": True}, id="true"),
    ],
)
def test_what_is_not_told_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        completion_request({**BODY, **more}, Limits(259, 8))
    assert refused.value.param == "prompt_logprobs"
