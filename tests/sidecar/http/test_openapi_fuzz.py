"""Requests made from the OpenAPI description: those that keep to it are answered, the others are refused, and whatever
comes back is what the description says.
"""

from __future__ import annotations

import asyncio
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.generation.case import Case
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from cacheaware_sidecar.openapi import CHAT, COMPLETIONS, RESPONSES, description
from cacheaware_sidecar.testing import StubEngine
from cacheaware_sidecar.testing_sidecar import Running, eventually

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# What a description cannot say: the names of a pool's tiers, and how one field goes with another.
NOT_DESCRIBED = frozenset({"service_tier", "best_of", "top_logprobs", "tool_choice"})
EXAMPLES = {CHAT: 30, COMPLETIONS: 40, RESPONSES: 80, "/tokenize": 15, "/detokenize": 15}
SCHEMA = schemathesis.openapi.from_dict(dict(description()))
OPERATIONS = [
    pytest.param(SCHEMA[path][method], id=f"{method.upper()} {path}")
    for path, item in description()["paths"].items()
    for method in item
]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["as described", "otherwise"])
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_an_answer_is_what_the_description_says(
    sidecar: Running, engine: StubEngine, operation: Any, mode: GenerationMode
) -> None:
    if mode is GenerationMode.NEGATIVE and operation.path not in EXAMPLES:
        return  # nothing can be sent there that is otherwise
    kept = mode is GenerationMode.POSITIVE

    def run() -> None:
        with requests.Session() as session:

            @hypothesis.settings(
                max_examples=EXAMPLES.get(operation.path, 1),
                deadline=None,
                database=None,
                derandomize=True,
                phases=[hypothesis.Phase.generate],  # a failure is told as found: making it smaller takes long
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def each(case: Case[Any]) -> None:
                answer = case.call_and_validate(base_url=sidecar.url, session=session, checks=CHECKS, timeout=60)
                if kept and operation.path in (CHAT, COMPLETIONS, RESPONSES) and answer.status_code != 200:
                    assert answer.json()["error"]["param"] in NOT_DESCRIBED, answer.content

            each()

    await asyncio.to_thread(run)  # it waits for answers that this loop makes
    await eventually(sidecar.is_idle)
