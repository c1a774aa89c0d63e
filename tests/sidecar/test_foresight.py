"""`POST /pool/explain`: what would happen to a request now, told without doing any of it."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cacheaware_api import wire
from cacheaware_sidecar.testing import Behaviour, StubEngine, plain_vllm_page
from cacheaware_sidecar.testing_sidecar import Running, eventually, running_sidecar, tier, view_json

CHAT = "/v1/chat/completions"
PREFIX = "You are the assistant of a library and answer from its catalogue only. " * 40  # two checkpoints
TIERS = [
    tier("gold", 100, 4, nominal=50, ttft="60s", batchingWindow="10s"),
    tier("bronze", 0, 1, nominal=30, ttft="10s"),
    tier("strict", 0, 1, ttft="50ms", admission="Reject"),
]
KEYS = {"key-of-acme": {"tenant": "acme", "tiers": ["gold", "bronze"], "defaultTier": "gold"}}


@pytest.fixture
async def sidecar(engine: StubEngine, folder: Path) -> AsyncIterator[Running]:
    async with running_sidecar(engine, folder, wanted=view_json(tiers=TIERS)) as running:
        yield running


def chat(question: str = "Hi", **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": PREFIX}, {"role": "user", "content": question}]
    return {"model": "m", "stream": True, "messages": messages, **more}


async def foreseen(
    sidecar: Running, body: Any, path: str = CHAT, headers: Mapping[str, str] | None = None
) -> wire.Foreseen:
    question = {"path": path, "body": body, "headers": dict(headers or {})}
    status, told = await sidecar.control("POST", "/pool/explain", question)
    assert status == 200, told
    return wire.from_json(wire.Foreseen, told)


async def send(sidecar: Running, body: Any, path: str = CHAT) -> tuple[int, Mapping[str, str]]:
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client,
        client.post(sidecar.url + path, json=body) as answer,
    ):
        await answer.read()
        return answer.status, answer.headers


def state(sidecar: Running) -> bytes:
    """Every account and all that was learned."""
    inside = sidecar.sidecar
    parts = (inside.dispatcher, inside.lengths, inside.outputs, inside.working_sets, inside.divergence)
    return pickle.dumps((*parts, inside.decisions, inside.figures, inside.hints, inside.traffic.inside))


async def counters(sidecar: Running) -> str:
    """Of ours: the process's own figures change by themselves."""
    _, page = await sidecar.control("GET", "/metrics")
    return "\n".join(line for line in page.splitlines() if line.startswith("cacheaware_"))


class TestAnswer:
    async def test_tells_who_calls_what_is_cached_and_that_it_goes(self, engine: StubEngine, sidecar: Running) -> None:
        assert (await send(sidecar, chat()))[0] == 200
        told = await foreseen(sidecar, chat("Another"))
        assert (told.course, told.reason) == (wire.Course.GO, "not-held")
        assert (told.tenant, told.tier, told.tier_by, told.scope) == (None, "bronze", "defaultTier", "pool")
        assert told.prompt_tokens is not None
        assert told.prompt_blocks == -(-told.prompt_tokens // engine.ledger().block_size)
        assert told.cached_tokens is not None
        assert 0 < told.cached_tokens < told.prompt_tokens
        assert (told.waiting_before, told.promised_ms) == (0, 10_000.0)
        assert told.fields == ("defaultTier", "sharing")

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            pytest.param(CHAT, chat(), id="chat"),
            pytest.param("/v1/completions", {"prompt": PREFIX}, id="completions"),
            pytest.param("/v1/responses", {"input": PREFIX}, id="responses"),
        ],
    )
    async def test_is_given_for_every_path_that_queues(self, sidecar: Running, path: str, body: Any) -> None:
        told = await foreseen(sidecar, body, path)
        assert told.course is wire.Course.GO
        assert told.prompt_tokens is not None
        assert told.prompt_tokens > 500

    async def test_a_follower_would_be_held_and_is(self, engine: StubEngine, sidecar: Running) -> None:
        gate = asyncio.Event()
        engine.behaviour = Behaviour(hold=gate)
        first = asyncio.create_task(send(sidecar, chat("one", service_tier="gold")))
        await engine.count(1)
        told = await foreseen(sidecar, chat("two", service_tier="gold"))
        assert (told.course, told.reason) == (wire.Course.HOLD, "prefix-ready")
        assert told.hold_at_most_ms == pytest.approx(10_000)
        assert told.fields == ("sharing", "tiers[gold].batchingWindow")
        engine.behaviour = Behaviour()
        second = asyncio.create_task(send(sidecar, chat("two", service_tier="gold")))
        await eventually(lambda: sidecar.sidecar.scheduler.held == 1)
        gate.set()
        await first
        assert 'desc="prefix-ready"' in (await second)[1]["Server-Timing"]

    async def test_behind_a_full_engine_it_would_wait_and_behind_a_full_queue_it_would_be_refused(
        self, engine: StubEngine, folder: Path
    ) -> None:
        engine.behaviour = Behaviour(hold=(gate := asyncio.Event()))
        async with running_sidecar(
            engine, folder, wanted=view_json(tiers=TIERS), engine_slots=1, max_queue=1
        ) as sidecar:
            running = [asyncio.create_task(send(sidecar, chat()))]
            await engine.count(1)
            told = await foreseen(sidecar, {"prompt": "Hi"}, "/v1/completions")
            assert (told.course, told.reason, told.waiting_before) == (wire.Course.WAIT, "slots", 0)
            assert told.fields[2:] == ("tiers[bronze].quota.nominalPercent", "tiers[bronze].weight")
            running.append(asyncio.create_task(send(sidecar, {"prompt": "Hi"}, "/v1/completions")))
            await eventually(lambda: sidecar.sidecar.gate.queued == 1)
            told = await foreseen(sidecar, {"prompt": "Hi"}, "/v1/completions")
            assert (told.course, told.reason, told.status) == (wire.Course.REFUSE, "queue-full", 429)
            assert told.waiting_before == 1
            gate.set()
            await asyncio.gather(*running)

    async def test_a_promise_that_cannot_be_kept_is_refused_where_its_tier_says_so(
        self, engine: StubEngine, folder: Path
    ) -> None:
        engine.steps = tuple(wire.StepReport(1, tokens, 0, 0, 0, 0.001 * tokens) for tokens in (8, 256, 64, 16) * 4)
        engine.behaviour = Behaviour(hold=(gate := asyncio.Event()))
        async with running_sidecar(engine, folder, wanted=view_json(tiers=TIERS)) as sidecar:
            await eventually(lambda: sidecar.sidecar.scheduler.costs.prices is not None)
            running = asyncio.create_task(send(sidecar, {"prompt": "Hi", "stream": True}, "/v1/completions"))
            await engine.count(1)
            told = await foreseen(sidecar, chat(service_tier="strict"))
            assert (told.course, told.reason, told.in_time) == (wire.Course.REFUSE, "sla-infeasible", False)
            assert told.time_to_first_token_ms is not None
            assert told.time_to_first_token_ms > 50
            assert told.fields == ("sharing", "tiers[strict].sla.timeToFirstToken", "tiers[strict].admission")
            assert (await send(sidecar, chat(service_tier="strict")))[0] == 429
            gate.set()
            await running

    async def test_blocks_that_are_counted_here_are_waited_for(self, folder: Path) -> None:
        body = {"prompt": "x" * 1600, "max_tokens": 16, "stream": True}  # 25 blocks of 64 letters
        bronze = tier("bronze", quota={"nominalPercent": 30, "borrowingLimitPercent": 0})
        async with StubEngine(None) as engine:
            engine.metrics_page = plain_vllm_page(101)
            engine.behaviour = Behaviour(hold=(gate := asyncio.Event()))
            async with running_sidecar(engine, folder, wanted=view_json(tiers=[bronze])) as sidecar:
                running = asyncio.create_task(send(sidecar, body, "/v1/completions"))
                await engine.count(1)
                told = await foreseen(sidecar, {**body, "prompt": "y" * 1600}, "/v1/completions")
                assert (told.course, told.reason) == (wire.Course.WAIT, "blocks")
                assert [field.removeprefix("tiers[bronze].quota.") for field in told.fields[-2:]] == [
                    "nominalPercent",
                    "borrowingLimitPercent",
                ]
                told = await foreseen(sidecar, {**body, "prompt": "y" * 3200}, "/v1/completions")
                assert told.note is not None
                assert "needs 51 blocks" in told.note
                assert engine.tokenized == []
                gate.set()
                await running


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "status", "reason", "param"),
        [
            pytest.param(chat(service_tier="lead"), 400, "unknown-tier", "service_tier", id="an unknown tier"),
            pytest.param(chat(n=99), 400, "bad-request", "n", id="a number out of bounds"),
            pytest.param([1], 400, "bad-request", None, id="no object"),
            pytest.param(chat("x" * 5000), 413, "too-large", None, id="too many bytes"),
        ],
    )
    async def test_are_those_that_the_request_would_get(
        self, engine: StubEngine, folder: Path, body: Any, status: int, reason: str, param: str | None
    ) -> None:
        async with running_sidecar(engine, folder, wanted=view_json(tiers=TIERS), max_body_bytes=5000) as sidecar:
            told = await foreseen(sidecar, body)
            assert (told.course, told.status, told.reason, told.param) == (wire.Course.REFUSE, status, reason, param)
            async with sidecar.client.post(sidecar.url + CHAT, json=body) as answer:
                error = (await answer.json())["error"]
            assert (answer.status, error["message"], error["param"]) == (told.status, told.message, told.param)

    async def test_keys_decide_and_are_never_told(self, engine: StubEngine, folder: Path) -> None:
        wanted = view_json(tiers=TIERS, identity={"type": "APIKeys"}, sharing="Tenant")
        async with running_sidecar(engine, folder, wanted=wanted, keys=KEYS) as sidecar:
            known = {"authorization": "Bearer key-of-acme"}
            told = await foreseen(sidecar, chat(), headers=known)
            assert (told.key, told.tenant, told.tier, told.tier_by) == ("key-0", "acme", "gold", "key")
            assert (told.scope, told.fields) == ("tenant", ("identity.apiKeys", "sharing"))
            strict = await foreseen(sidecar, chat(service_tier="strict"), headers=known)
            assert (strict.reason, strict.status, strict.tenant) == ("tier-not-allowed", 403, "acme")
            unknown = await foreseen(sidecar, chat(), headers={"Authorization": "Bearer secret-of-nobody"})
            assert (unknown.reason, unknown.status, unknown.fields) == ("unknown-key", 401, ("identity.apiKeys",))
            for answer in (told, strict, unknown):
                said = json.dumps(wire.to_json(answer))
                assert "key-of-acme" not in said
                assert "secret-of-nobody" not in said
                assert PREFIX[:20] not in said

    async def test_a_replica_that_shuts_down_says_so(self, sidecar: Running) -> None:
        await sidecar.control("POST", "/pool/drain")
        assert (await foreseen(sidecar, chat())).reason == "draining"

    async def test_an_engine_that_is_not_ready_is_told(self, engine: StubEngine, sidecar: Running) -> None:
        engine.healthy = False
        await eventually(lambda: not sidecar.sidecar.link.state.healthy)
        told = await foreseen(sidecar, chat())
        assert (told.reason, told.status, told.tier) == ("no-engine", 503, "bronze")


class TestQuestion:
    @pytest.mark.parametrize(
        ("question", "param"),
        [
            pytest.param({"path": "/v1/models", "body": {}}, "path", id="a path that does not queue"),
            pytest.param({"body": {}}, "path", id="no path"),
            pytest.param({"path": ["x"], "body": {}}, "path", id="a path that is no text"),
            pytest.param({"path": CHAT}, "body", id="no body"),
            pytest.param({"path": CHAT, "body": {}, "headers": ["x"]}, "headers", id="headers that are none"),
            pytest.param({"path": CHAT, "body": {}, "headers": {"n": 1}}, "headers", id="a header that is no text"),
        ],
    )
    async def test_that_makes_no_sense_is_400_by_its_field(self, sidecar: Running, question: Any, param: str) -> None:
        status, said = await sidecar.control("POST", "/pool/explain", question)
        assert (status, said["error"]["param"]) == (400, param)

    async def test_needs_the_token(self, sidecar: Running) -> None:
        for token in ("", "wrong"):
            assert (await sidecar.control("POST", "/pool/explain", {"path": CHAT, "body": {}}, token))[0] == 401


async def test_asking_changes_no_account_and_calls_no_engine(engine: StubEngine, folder: Path) -> None:
    wanted = view_json(tiers=TIERS)
    engine.behaviour = Behaviour()
    async with running_sidecar(engine, folder, wanted=wanted, engine_slots=2) as sidecar:
        for number in range(3):
            await send(sidecar, chat(str(number), service_tier="gold"))
        engine.behaviour = Behaviour(hold=(gate := asyncio.Event()))
        running = [asyncio.create_task(send(sidecar, chat(f"now {n}", service_tier="gold"))) for n in range(3)]
        await eventually(lambda: len(engine.requests) >= 4 and sidecar.sidecar.gate.queued + len(engine.requests) == 6)
        before, told, calls = state(sidecar), await counters(sidecar), len(engine.requests)
        _, decisions = await sidecar.control("GET", "/pool/explain")
        for body in (chat("now", service_tier="gold"), chat("x"), chat(service_tier="lead"), chat(n=3), chat(n=99)):
            await foreseen(sidecar, body)
        assert state(sidecar) == before
        assert await counters(sidecar) == told
        assert (await sidecar.control("GET", "/pool/explain"))[1]["decisions"] == decisions["decisions"]
        assert len(engine.requests) == calls
        gate.set()
        assert [status for status, _ in await asyncio.gather(*running)] == [200, 200, 200]
        assert sidecar.is_idle()
