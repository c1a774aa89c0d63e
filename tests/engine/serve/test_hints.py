"""Hints, the way blocks lie, and groups, as they are seen from outside the engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cacheaware_api.wire import StepReport, from_json
from cacheaware_engine.engine_testing import PATIENCE_S, HeldRunner, Served, SteppedEngine
from cacheaware_engine.loader import LoadedModel

BODY = {"model": "tiny", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


async def put_hints(server: Served, body: Any) -> tuple[int, Any]:
    async with server.kv.put("http://engine/kv/hints", json=body) as response:
        return response.status, await response.json()


async def test_hints_set_blocks_aside_and_leave_the_ledger_alone(server: Served) -> None:
    before = await server.ledger()
    status, answer = await put_hints(server, {"groups": {"docs": {"expected_blocks": 50, "ttl_s": 60}}})
    assert (status, answer) == (200, {"set_aside": {"docs": 9}}), "a tenth of 96 blocks"
    after = await server.ledger()
    assert after["free"] == before["free"]
    body = {**BODY, "prompt": [1] * 20, "vllm_xargs": {"cacheaware_group": "docs"}}
    status, _ = await server.post("/v1/completions", body)
    assert status == 200
    _, answer = await put_hints(server, {"groups": {}})
    assert answer["set_aside"]["docs"] < 9, "its requests take from what is set aside"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({}, "groups", id="nothing"),
        pytest.param({"groups": {"a": {"ttl_s": 1}}}, "groups.a.expected_blocks", id="no-blocks"),
        pytest.param({"groups": {"a": {"expected_blocks": -1, "ttl_s": 1}}}, "groups.a.expected_blocks", id="negative"),
        pytest.param({"groups": {"a": {"expected_blocks": 1, "ttl_s": "x"}}}, "groups.a.ttl_s", id="not-a-time"),
        pytest.param(
            {"groups": {str(i): {"expected_blocks": 1, "ttl_s": 1} for i in range(1025)}}, "groups", id="too-many"
        ),
    ],
)
async def test_bad_hints_are_refused_by_name(server: Served, body: Any, param: str) -> None:
    status, answer = await put_hints(server, body)
    assert status == 400
    assert answer["error"]["param"].endswith(param.removeprefix("groups.a.")), answer


async def test_steps_tell_who_read_a_prefix_together(held: tuple[Served, HeldRunner]) -> None:
    server, runner = held
    prefix = [number % 200 for number in range(80)]
    runner.let()
    await server.post("/v1/completions", {**BODY, "prompt": prefix})
    async with server.kv.get("http://engine/kv/steps") as response:
        runner.let(0)
        calls = [
            server.post("/v1/completions", {**BODY, "prompt": [*prefix, 201 + i], "max_tokens": 30}) for i in range(3)
        ]
        answers = asyncio.gather(*calls)
        await server.given(3)
        runner.let(10)
        reports: list[StepReport] = []
        while not any(group.size == 3 for report in reports for group in report.groups):
            line = await asyncio.wait_for(response.content.readline(), PATIENCE_S)
            if line.startswith(b"data: "):
                reports.append(from_json(StepReport, json.loads(line[6:])))
        runner.let()
        await answers
    group = next(group for report in reports for group in report.groups if group.size == 3)
    assert group.prefix_tokens == 80
    assert group.cascade


def metric(engine: SteppedEngine, name: str) -> float:
    lines = engine.metrics.exposition().decode().splitlines()
    return float(next(line for line in lines if line.startswith(name)).rsplit(" ", 1)[1])


def test_metrics_tell_how_blocks_lie_and_what_was_read(tiny: LoadedModel) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0  # every look at the clock is a second later
        return now

    engine = SteppedEngine(tiny, num_blocks=80, clock=clock)
    for member in range(2):
        engine.submit([*range(60), 201 + member], 20)
    for _ in range(10):
        engine.step()
    assert metric(engine, "cacheaware_kv_extents_per_sequence") == 1.5, (
        "one shares the other's prefix, and goes on behind"
    )
    assert 0 < metric(engine, "cacheaware_kv_internal_fragmentation_ratio") < 0.2
    assert 0 <= metric(engine, "cacheaware_kv_external_fragmentation_ratio") < 1
    read, unique = metric(engine, "cacheaware_kv_read_bytes_total"), metric(engine, "cacheaware_kv_unique_bytes_total")
    assert unique <= read <= 1.3 * unique
    assert 0.5 * read < metric(engine, "cacheaware_kv_in_place_bytes_total") <= read
