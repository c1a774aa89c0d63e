"""Grouping seen from outside: who waits for whom, what the client, the engine, metrics and explain are told of it."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cacheaware_api.wire import StepReport
from cacheaware_sidecar.testing import Behaviour, StubEngine
from cacheaware_sidecar.testing_sidecar import Running, eventually, running_sidecar, tier, view_json

PREFIX = "You are the assistant of a library and answer from its catalogue only. " * 40  # 2,840 bytes: two checkpoints
WINDOWS = [tier("gold", 100, 4, ttft="20s", batchingWindow="10s"), tier("bronze", 0, 1, ttft="10s")]


async def ask(sidecar: Running, question: str, service_tier: str = "gold") -> aiohttp.ClientResponse:
    body = {
        "model": "m",
        "stream": True,
        "service_tier": service_tier,
        "messages": [{"role": "system", "content": PREFIX}, {"role": "user", "content": question}],
    }
    async with sidecar.client.post(f"{sidecar.url}/v1/chat/completions", json=body) as answer:
        await answer.read()
        return answer


async def two_that_share(sidecar: Running, engine: StubEngine, service_tier: str) -> list[aiohttp.ClientResponse]:
    """The second one comes while the engine computes the first; it computes until both have been seen."""
    gate = asyncio.Event()
    engine.behaviour = Behaviour(hold=gate)
    first = asyncio.create_task(ask(sidecar, "one", service_tier))
    await engine.count(1)
    engine.behaviour = Behaviour()
    second = asyncio.create_task(ask(sidecar, "two", service_tier))
    await eventually(lambda: sidecar.sidecar.scheduler.held == 1 or len(engine.requests) == 2)
    gate.set()
    return [await first, await second]


def timing(answer: aiohttp.ClientResponse) -> str:
    return answer.headers["Server-Timing"]


async def page_line(sidecar: Running, start: str) -> str:
    _, page = await sidecar.control("GET", "/metrics")
    return next(str(line) for line in page.splitlines() if line.startswith(start))


async def test_a_follower_is_held_until_its_prefix_is_ready_and_everybody_is_told(
    engine: StubEngine, folder: Path
) -> None:
    async with running_sidecar(engine, folder, wanted=view_json(tiers=WINDOWS)) as sidecar:
        leader, follower = await two_that_share(sidecar, engine, "gold")
        assert 'desc="not-held"' in timing(leader)
        assert 'desc="prefix-ready"' in timing(follower)
        assert "hold;dur=0.0" not in timing(follower)
        flushes = 'cacheaware_flushes_total{reason="prefix-ready",tier="gold"}'
        assert (await page_line(sidecar, flushes)).endswith(" 1.0")
        assert (await page_line(sidecar, 'cacheaware_hold_seconds_count{tier="gold"}')).endswith(" 2.0")
        _, answer = await sidecar.control("GET", "/pool/explain")
        newest = answer["decisions"][0]
        assert (newest["flushReason"], newest["tier"]) == ("prefix-ready", "gold")
        assert newest["holdMs"] > 0
        assert newest["predictedHitTokens"] > 512
        assert engine.requests[1].json["vllm_xargs"]["cacheaware_group"] == newest["group"]
        assert sidecar.is_idle()


async def test_a_tier_without_a_window_holds_nobody(engine: StubEngine, folder: Path) -> None:
    async with running_sidecar(engine, folder, wanted=view_json(tiers=WINDOWS)) as sidecar:
        for answer in await two_that_share(sidecar, engine, "bronze"):
            assert 'hold;dur=0.0;desc="not-held"' in timing(answer)


async def test_what_the_engine_says_of_its_steps_reaches_the_cost_model(engine: StubEngine, folder: Path) -> None:
    engine.steps = tuple(
        StepReport(1, tokens, 10 * tokens, 0, 0, 0.01 + 0.001 * tokens) for tokens in (8, 256, 64, 16) * 4
    )
    async with running_sidecar(engine, folder) as sidecar:
        costs = sidecar.sidecar.scheduler.costs
        await eventually(lambda: costs.prices is not None)
        assert costs.prefill_seconds(256) == pytest.approx(0.266, rel=0.2)


async def test_an_engine_with_larger_blocks_than_prompts_gets_no_groups(folder: Path) -> None:
    class LargeBlocks(StubEngine):
        def ledger(self) -> Any:
            return dataclasses.replace(super().ledger(), block_size=8320)

    async with (
        LargeBlocks(folder / "kv.sock") as engine,
        running_sidecar(engine, folder, wanted=view_json(tiers=WINDOWS)) as sidecar,
    ):
        for answer in await two_that_share(sidecar, engine, "gold"):
            assert 'desc="not-held"' in timing(answer)
        engine.behaviour = Behaviour(cached_tokens=0)
        await ask(sidecar, "three")  # when the others have been computed
        assert all("cacheaware_group" not in request.json["vllm_xargs"] for request in engine.requests)
        _, answer = await sidecar.control("GET", "/pool/explain")
        assert [decision["predictedHitTokens"] for decision in answer["decisions"]] == [0, 0, 0]


async def test_prompts_that_differ_in_their_first_line_are_told_in_the_status(
    engine: StubEngine, sidecar: Running
) -> None:
    rules = "\n".join(f"Rule {number}: answer in {number} sentences." for number in range(60))
    engine.behaviour = Behaviour(prompt_tokens=700, cached_tokens=0)
    prompts = [f"It is {number} o'clock.\n{rules}" for number in range(6)]
    for prompt in prompts:
        body = {"model": "m", "messages": [{"role": "user", "content": prompt}]}
        async with sidecar.client.post(f"{sidecar.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
    forwarded = [request.json["messages"] for request in engine.requests]
    assert forwarded == [[{"role": "user", "content": prompt}] for prompt in prompts], "nothing is rewritten"
    _, status = await sidecar.control("GET", "/pool/status")
    (advice,) = status["advice"]
    assert (advice["tier"], advice["requests"], advice["divergesAtToken"]) == ("bronze", 5, 0)
    assert 600 < advice["wouldSaveTokens"] <= 700
    tokens = await page_line(sidecar, 'cacheaware_diverging_prompt_tokens_total{tier="bronze"}')
    assert float(tokens.split()[-1]) == pytest.approx(5 * advice["wouldSaveTokens"], rel=0.01)
    _, explained = await sidecar.control("GET", "/pool/explain")
    assert explained["advice"] == [advice]
