"""The `openai` client against a sidecar: its own exception classes, its streams, its cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from cacheaware_api.testing_time import let_pass
from cacheaware_sidecar.testing import Behaviour, StubEngine
from cacheaware_sidecar.testing_sidecar import SOON, Running, eventually, running_sidecar, view_json

KEYS = {"key-of-zeta": {"tenant": "zeta", "tiers": ["bronze"]}}
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
async def sidecar(engine: StubEngine, folder: Path) -> AsyncIterator[Running]:
    wanted = view_json(identity={"type": "APIKeys"}, sharing="Tenant")
    async with running_sidecar(
        engine, folder, wanted=wanted, keys=KEYS, engine_slots=1, max_queue=1, first_byte_timeout=10
    ) as running:
        yield running


@pytest.fixture
async def client(sidecar: Running) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{sidecar.url}/v1", api_key="key-of-zeta", max_retries=0) as client:
        yield client


async def test_an_answer(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="stub-model", messages=MESSAGES)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 64


async def test_a_completion_and_the_models(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="stub-model", prompt="The capital", max_tokens=8)
    assert answer.choices[0].text == "The capital of France is Paris."
    assert [model.id async for model in client.models.list()] == ["stub-model"]


@pytest.mark.parametrize("with_usage", [True, False])
async def test_a_stream(client: AsyncOpenAI, with_usage: bool) -> None:
    stream = await client.chat.completions.create(
        model="stub-model", messages=MESSAGES, stream=True, stream_options={"include_usage": with_usage}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "The capital of France is Paris."
    assert [chunk.usage is not None for chunk in chunks] == [False] * 7 + [True] * with_usage


class TestErrors:
    async def test_an_unknown_key(self, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").chat.completions.create(model="m", messages=MESSAGES)

    async def test_a_tier_that_is_not_allowed(self, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES, extra_body={"service_tier": "gold"})
        assert caught.value.code == "tier-not-allowed"
        assert caught.value.param == "service_tier"

    async def test_a_tier_that_there_is_not(self, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="set service_tier to one of bronze"):
            await client.chat.completions.create(model="m", messages=MESSAGES, extra_body={"service_tier": "lead"})

    async def test_a_context_that_is_too_long(self, client: AsyncOpenAI, engine: StubEngine) -> None:
        said = b'{"error": {"message": "too long", "code": "context_length_exceeded", "param": null, "type": "x"}}'
        engine.behaviour = Behaviour(status=400, body=said)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        assert caught.value.code == "context_length_exceeded"

    async def test_a_model_that_there_is_not(self, client: AsyncOpenAI, engine: StubEngine) -> None:
        engine.behaviour = Behaviour(status=404, body=b'{"error": {"message": "no such model", "code": "x"}}')
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="m", messages=MESSAGES)

    async def test_a_path_that_is_not_supported(self, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.embeddings.create(model="m", input="x")
        assert caught.value.code == "unsupported"

    async def test_a_full_queue(self, client: AsyncOpenAI, sidecar: Running, engine: StubEngine) -> None:
        let_go = asyncio.Event()
        engine.behaviour = Behaviour(hold=let_go)
        calls = [asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES)) for _ in range(2)]
        await eventually(lambda: sidecar.sidecar.gate.queued == 1)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert caught.value.response.headers["x-cacheaware-reason"] == "queue-full"
        let_go.set()
        await asyncio.gather(*calls)

    async def test_an_engine_that_breaks(self, client: AsyncOpenAI, engine: StubEngine) -> None:
        engine.behaviour = Behaviour(die_after=0)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert caught.value.status_code == 502

    async def test_an_engine_that_is_silent(self, client: AsyncOpenAI, engine: StubEngine) -> None:
        engine.behaviour = Behaviour(hang_after=0)
        call = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES, stream=True))
        await engine.count(1)
        let_pass(10)
        with pytest.raises(openai.InternalServerError) as caught:
            await call
        assert caught.value.status_code == 504

    async def test_an_engine_that_is_gone(self, client: AsyncOpenAI, engine: StubEngine) -> None:
        await engine.stop()
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"

    async def test_a_stream_that_breaks_after_its_first_byte(self, client: AsyncOpenAI, engine: StubEngine) -> None:
        engine.behaviour = Behaviour(die_after=3, flush=True)
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        chunks = aiter(stream)
        for _ in range(3):
            await anext(chunks)
        with pytest.raises(openai.APIError, match="broke off"):
            await anext(chunks)


async def test_a_stream_that_the_client_closes_ends_in_the_engine(
    client: AsyncOpenAI, sidecar: Running, engine: StubEngine
) -> None:
    engine.behaviour = Behaviour(words=("x",) * 1000, pause=0.01)
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await asyncio.wait_for(engine.requests[0].left.wait(), SOON)
    await eventually(sidecar.is_idle)


async def test_the_clients_own_retries_ride_out_an_engine_that_comes_back(
    client: AsyncOpenAI, sidecar: Running, engine: StubEngine
) -> None:
    await engine.stop()
    sidecar.sidecar.link.state.doubt()
    await eventually(lambda: not sidecar.sidecar.link.state.healthy)
    call = asyncio.create_task(client.with_options(max_retries=5).chat.completions.create(model="m", messages=MESSAGES))
    await engine.start()
    assert (await call).choices[0].message.content == "The capital of France is Paris."
