"""Texts that were asked to follow a JSON schema do, and what cannot be followed is refused by its field."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from cacheaware_engine.engine_testing import Served, SteppedEngine
from cacheaware_engine.errors import BadRequest
from cacheaware_engine.loader import LoadedModel
from cacheaware_engine.openai_requests import Limits, chat_request
from cacheaware_engine.sampler import SequenceSampler, sample
from cacheaware_engine.sampling_params import SamplingParams
from cacheaware_engine.structured_output import Grammars, load_grammars

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="llguidance is not installed (the extra `structured`)"
)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200}
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["the king", "a cat"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def asked(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def grammars_of(model: LoadedModel) -> Grammars:
    found = load_grammars(model.tokenizer, model.config.vocab_size, model.eos_token_ids)
    assert found is not None
    return found


@needs_library
@pytest.mark.parametrize("temperature", [0.0, 1.5])
async def test_a_text_follows_its_schema(server: Served, temperature: float) -> None:
    body = {**CHAT, "temperature": temperature, "seed": 3, "n": 3, "response_format": asked(PERSON)}
    status, answer = await server.post("/v1/chat/completions", body)
    assert status == 200, answer
    for choice in answer["choices"]:
        person = json.loads(choice["message"]["content"])
        assert set(person) == {"name", "age"}
        assert person["name"] in ("the king", "a cat")
        assert 0 <= person["age"] <= 99
        assert choice["finish_reason"] == "stop"


@needs_library
async def test_json_without_a_schema_is_an_object(server: Served) -> None:
    body = {"model": "tiny", "prompt": "x", "seed": 1, "max_tokens": 240, "response_format": {"type": "json_object"}}
    _, answer = await server.post("/v1/completions", body)
    (choice,) = answer["choices"]
    assert choice["text"].lstrip().startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["text"]), dict)


@needs_library
async def test_others_in_the_same_batch_say_what_they_say_without_it(server: Served) -> None:
    import asyncio

    plain = {**CHAT, "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    _, alone = await server.post("/v1/chat/completions", plain)
    (_, beside), (_, held) = await asyncio.gather(
        server.post("/v1/chat/completions", plain),
        server.post("/v1/chat/completions", {**CHAT, "response_format": asked(PERSON)}),
    )
    assert beside["choices"] == alone["choices"]
    json.loads(held["choices"][0]["message"]["content"])


@needs_library
def test_a_preempted_text_goes_on_in_its_schema(tiny: LoadedModel) -> None:
    constraint = grammars_of(tiny).constraint(json.dumps({"enum": ["a" * 40]}))
    engine = SteppedEngine(tiny, num_blocks=24, max_num_seqs=4)
    held = [engine.submit([9 + i] * 7, 60, ignore_eos=False, constraint=constraint) for i in range(4)]
    engine.run()
    assert engine.preemptions > 0, "or this test shows nothing"
    assert [output.text() for output in held] == [json.dumps("a" * 40)] * 4


@needs_library
def test_where_only_the_end_is_allowed_the_end_comes(tiny: LoadedModel) -> None:
    constraint = grammars_of(tiny).constraint(json.dumps({"const": 7}))
    sequence = SequenceSampler(SamplingParams(), constraint=constraint)
    logits = torch.randn(1, tiny.config.vocab_size, generator=torch.Generator().manual_seed(1))
    said = [sample(logits, [sequence])[0] for _ in range(2)]
    assert tiny.tokenizer.decode(said[:1]) == "7"
    assert said[1] in tiny.eos_token_ids


@needs_library
@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"type": "king"}, id="no such type"),
        pytest.param({"$ref": "#/$defs/nowhere"}, id="a reference to nothing"),
        pytest.param({"type": "string", "pattern": "("}, id="no regular expression"),
        pytest.param({"type": "array", "uniqueItems": True}, id="a rule that would not be kept to"),
    ],
)
async def test_a_schema_that_cannot_be_followed_is_refused(server: Served, schema: Mapping[str, Any]) -> None:
    status, answer = await server.post("/v1/chat/completions", {**CHAT, "response_format": asked(schema)})
    assert (status, answer["error"]["param"]) == (400, "response_format.json_schema.schema"), answer


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({"response_format": "json"}, "response_format", id="a string"),
        pytest.param({"response_format": {}}, "response_format.type", id="no type"),
        pytest.param({"response_format": {"type": "xml"}}, "response_format.type", id="another type"),
        pytest.param({"response_format": {"type": "json_schema"}}, "response_format.json_schema", id="no schema"),
        pytest.param(
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            id="only a name",
        ),
        pytest.param({"response_format": asked([1])}, "response_format.json_schema.schema", id="a list as schema"),
        pytest.param(
            {"response_format": asked({"enum": ["x" * 70_000]})}, "response_format.json_schema.schema", id="too large"
        ),
        pytest.param({"response_format": asked(PERSON), "ignore_eos": True}, "ignore_eos", id="with no end"),
        pytest.param({"response_format": asked(PERSON), "min_tokens": 5}, "min_tokens", id="with an end of its own"),
    ],
)
def test_a_bad_format_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        chat_request({**CHAT, **body}, Limits(259, 8, structured_output=True))
    assert refused.value.param == param
    assert param in refused.value.message


def test_without_the_library_a_format_is_refused_with_what_to_install() -> None:
    with pytest.raises(BadRequest, match="structured") as refused:
        chat_request({**CHAT, "response_format": {"type": "json_object"}}, Limits(259, 8))
    assert (refused.value.param, refused.value.code) == ("response_format", "unsupported_parameter")
