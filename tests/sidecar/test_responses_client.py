"""`/v1/responses` with the `openai` client, in front of a real engine on a tiny random model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from cacheaware_sidecar.testing_sidecar import Running, running_sidecar, view_json

torch = pytest.importorskip("torch", reason="needs the engine extra")

PROMPT = "The quick brown fox jumps over the lazy dog."
KEYS = {"key-of-acme": {"tenant": "acme", "tiers": ["gold"]}}
ON = {"ignore_eos": True}  # a random model says its end at any time
CHAT: Any = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from cacheaware_engine.engine_testing import load_for_test
    from cacheaware_engine.testing import save_tiny_model

    torch.set_num_threads(1)
    return load_for_test(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
async def sidecar(tiny: Any, folder: Path) -> AsyncIterator[Running]:
    from cacheaware_engine.engine_testing import SteppedEngine, served

    wanted = view_json(model="tiny", identity={"type": "APIKeys"}, sharing="Tenant", defaultTier="gold")
    stepped = SteppedEngine(tiny, num_blocks=200, block_size=4)
    async with (
        served(stepped, folder / "kv.sock") as engine,
        running_sidecar(engine, folder, wanted=wanted, keys=KEYS) as running,
    ):
        yield running
        assert not engine.deaths
        await engine.idle()
        stepped.assert_empty()


@pytest.fixture
async def client(sidecar: Running) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{sidecar.url}/v1", api_key="key-of-acme", max_retries=0) as client:
        yield client


async def text_of_chat(client: AsyncOpenAI) -> str:
    """What the same prompt says as a chat."""
    answer = await client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=8, temperature=0, extra_body=ON
    )
    assert answer.choices[0].message.content
    return answer.choices[0].message.content


async def test_an_answer_is_the_one_of_the_same_chat_and_hits_its_cache(client: AsyncOpenAI) -> None:
    text = await text_of_chat(client)
    answer = await client.responses.create(
        model="tiny", input=PROMPT, max_output_tokens=8, temperature=0, extra_body=ON
    )
    assert answer.output_text == text
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 8
    assert answer.usage.input_tokens_details.cached_tokens > 8
    assert answer.model_extra is not None
    assert answer.model_extra["store"] is False
    type(answer).model_validate(answer.model_dump())  # nothing of it is of another type than the client says


async def test_a_conversation_goes_on_from_the_answer(client: AsyncOpenAI) -> None:
    first = await client.responses.create(model="tiny", instructions="Be brief.", input=PROMPT, max_output_tokens=4)
    history: Any = [*CHAT, *(item.model_dump() for item in first.output), {"role": "user", "content": "Why?"}]
    second = await client.responses.create(model="tiny", instructions="Be brief.", input=history, max_output_tokens=4)
    assert first.usage is not None
    assert second.usage is not None
    # The first prompt is found again; blocks are of four tokens.
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 4


async def test_a_stream_of_events_as_they_come(client: AsyncOpenAI) -> None:
    text = await text_of_chat(client)
    stream = await client.responses.create(
        model="tiny", input=PROMPT, max_output_tokens=8, temperature=0, stream=True, extra_body=ON
    )
    events = [event async for event in stream]
    for event in events:
        type(event).model_validate(event.model_dump())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == text
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 8


async def test_the_clients_own_account_of_a_stream(client: AsyncOpenAI) -> None:
    """It checks the order and puts the response together itself; one that was cut it would not give out."""
    text = await text_of_chat(client)
    last = next(character for character in reversed(text) if character != "\ufffd")
    async with client.responses.stream(
        model="tiny", input=PROMPT, temperature=0, max_output_tokens=8, extra_body={**ON, "stop": [last]}
    ) as stream:
        snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text == snapshots[-1] == text[: text.index(last)]


async def test_logprobs(client: AsyncOpenAI) -> None:
    answer = await client.responses.create(
        model="tiny",
        input=PROMPT,
        max_output_tokens=2,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        extra_body=ON,
    )
    message = answer.output[0]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [len(each.top_logprobs) for each in part.logprobs] == [2, 2]


async def test_an_output_that_keeps_to_a_schema(client: AsyncOpenAI) -> None:
    pytest.importorskip("llguidance", reason="needs the structured extra")
    schema: Any = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    wanted: Any = {"format": {"type": "json_schema", "name": "s", "schema": {**schema, "additionalProperties": False}}}
    answer = await client.responses.create(model="tiny", input=PROMPT, max_output_tokens=100, text=wanted)
    assert json.loads(answer.output_text)["a"] in (1, 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"previous_response_id": "resp_1"}, "previous_response_id", id="what went before"),
        pytest.param({"store": True}, "store", id="to keep it"),
        pytest.param({"background": True}, "background", id="to answer later"),
        pytest.param({"tools": [{"type": "web_search"}]}, "tools[0].type", id="a tool that runs on the server"),
        pytest.param({"tools": [{"type": "function", "name": "f"}]}, "tools", id="what this engine lacks"),
    ],
)
async def test_what_it_cannot_do_is_refused_by_name(client: AsyncOpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input=PROMPT, **fields)
    assert caught.value.param == param


async def test_what_was_never_kept_cannot_be_fetched(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_1")
