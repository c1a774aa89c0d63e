"""In front of a plain vLLM: quotas by estimate, and honest about it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cacheaware_api import wire
from cacheaware_sidecar.testing import Behaviour, StubEngine, plain_vllm_page
from cacheaware_sidecar.testing_sidecar import Running, eventually, running_sidecar, tier, view_json

CHAT = "/v1/chat/completions"
BLOCKS = 100
TIERS = [
    tier("gold", 100, 4, nominal=50, ttft="10s"),
    tier("bronze", 0, 1, quota={"nominalPercent": 30, "borrowingLimitPercent": 10}),
]


@pytest.fixture
async def engine() -> AsyncIterator[StubEngine]:
    async with StubEngine(None) as engine:
        engine.metrics_page = plain_vllm_page(BLOCKS + 1)
        yield engine


@pytest.fixture
async def sidecar(engine: StubEngine, folder: Path) -> AsyncIterator[Running]:
    async with running_sidecar(engine, folder, wanted=view_json(tiers=TIERS)) as running:
        yield running


def body(words: str = "Hi", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": words}], "max_tokens": 16, **more}


def blocks(number: int, start: str = "x", **more: Any) -> dict[str, Any]:
    """A prompt of about so many blocks, four letters a token, that shares nothing with one of another `start`."""
    return body(start + "x" * (64 * number - 128), **more)


async def ask(sidecar: Running, message: dict[str, Any]) -> tuple[int, Any]:
    """On a connection of its own, which closes when the call is cancelled."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client,
        client.post(sidecar.url + CHAT, json=message) as answer,
    ):
        said = await answer.read()
        return answer.status, said


async def status(sidecar: Running) -> wire.PoolStatus:
    return wire.from_json(wire.PoolStatus, (await sidecar.control("GET", "/pool/status"))[1])


def condition(told: wire.PoolStatus, kind: str) -> wire.Condition:
    (found,) = [each for each in told.conditions if each.type == kind]
    return found


def held(sidecar: Running) -> dict[str, int]:
    assert sidecar.sidecar.blocks is not None
    return sidecar.sidecar.blocks.held()


class TestWhatItTells:
    async def test_it_is_ready_and_says_that_it_estimates(self, sidecar: Running) -> None:
        async with sidecar.client.get(f"{sidecar.control_url}/readyz") as answer:
            assert answer.status == 200
        told = await status(sidecar)
        assert told.enforcement is wire.Enforcement.ESTIMATE_ONLY
        assert (told.applied, told.capacity) == (wire.Revision("pool-1", 1), BLOCKS)
        quotas = condition(told, "QuotaEnforced")
        assert (quotas.status, quotas.reason) == ("False", "EstimateOnly")
        assert told.ledger is not None
        assert (told.ledger.block_size, told.ledger.bytes_per_token) == (16, None)
        gold, bronze = told.ledger.tiers["gold"], told.ledger.tiers["bronze"]
        assert (gold.nominal, gold.limit, bronze.nominal, bronze.limit) == (50, 100, 30, 40)

    async def test_blocks_are_held_while_a_request_runs_and_no_longer(
        self, sidecar: Running, engine: StubEngine
    ) -> None:
        let_go = asyncio.Event()
        engine.behaviour = Behaviour(hold=let_go)
        call = asyncio.create_task(ask(sidecar, blocks(60, service_tier="gold")))
        await engine.count(1)
        ledger = (await status(sidecar)).ledger
        assert ledger is not None
        gold = ledger.tiers["gold"]
        assert gold.held == pytest.approx(60, abs=2)
        assert (gold.borrowed, gold.cached, gold.slots.running) == (gold.held - 50, 0, 1)
        assert sum(tier.held for tier in ledger.tiers.values()) + ledger.free == ledger.capacity
        let_go.set()
        assert (await call)[0] == 200
        await eventually(sidecar.is_idle)
        assert held(sidecar) == {}

    async def test_hits_are_those_that_the_engine_counted(self, sidecar: Running) -> None:
        for _ in range(2):
            await ask(sidecar, body(service_tier="gold"))
        ledger = (await status(sidecar)).ledger
        assert ledger is not None
        gold = ledger.tiers["gold"]
        assert (gold.hit_tokens_total, gold.query_tokens_total) == (128, 200)

    async def test_metrics_have_what_is_known_and_nothing_else(self, sidecar: Running) -> None:
        _, page = await sidecar.control("GET", "/metrics")
        assert f"cacheaware_kv_capacity_blocks {float(BLOCKS)}" in page
        assert 'cacheaware_kv_blocks{state="held",tier="gold"} 0.0' in page
        assert 'cacheaware_kv_quota_blocks{kind="limit",tier="bronze"} 40.0' in page
        for unknown in ('state="cached"', "evicted", "reclaimed", "cacheaware_preemptions"):
            assert unknown not in page

    async def test_the_engine_gets_priority_and_salt_all_the_same(self, sidecar: Running, engine: StubEngine) -> None:
        await ask(sidecar, body(service_tier="gold"))
        sent = engine.requests[0].json
        assert sent["priority"] == -100
        assert len(sent["cache_salt"]) == 43

    async def test_public_prefixes_are_not_resident_and_it_says_so(self, engine: StubEngine, folder: Path) -> None:
        wanted = view_json(tiers=TIERS, publicPercent=10, publicPrefixes=[{"name": "assistant", "text": "You help."}])
        async with running_sidecar(engine, folder, wanted=wanted) as sidecar:
            public = condition(await status(sidecar), "PublicPrefixesResident")
            assert (public.status, public.reason) == ("False", "NotResident")


class TestWhatItBounds:
    async def test_a_tier_at_its_limit_waits_and_another_within_nominal_does_not(
        self, sidecar: Running, engine: StubEngine
    ) -> None:
        let_go = asyncio.Event()
        engine.behaviour = Behaviour(hold=let_go)
        calls = [asyncio.create_task(ask(sidecar, blocks(30, str(n)))) for n in range(3)]
        await engine.count(1)
        await eventually(lambda: sidecar.sidecar.gate.queued == 2)
        calls.append(asyncio.create_task(ask(sidecar, blocks(40, service_tier="gold"))))
        await engine.count(2)
        assert [request.json["priority"] for request in engine.requests] == [0, -100]
        let_go.set()
        assert [code for code, _ in await asyncio.gather(*calls)] == [200] * 4
        await eventually(sidecar.is_idle)
        assert held(sidecar) == {}

    async def test_a_prompt_that_can_never_fit_is_400_with_the_arithmetic(
        self, sidecar: Running, engine: StubEngine
    ) -> None:
        engine.counts_tokens_as = 700
        code, said = await ask(sidecar, blocks(60))
        assert code == 400
        assert b"700 tokens needs 45 blocks of 16 tokens" in said
        assert b"at most 40 of 100" in said
        assert b"context_length_exceeded" in said
        assert engine.requests == []
        assert [sorted(asked) for asked in engine.tokenized] == [["messages", "model"]]
        assert sidecar.is_idle()

    async def test_an_estimate_refuses_nobody_whose_tokens_fit(self, sidecar: Running, engine: StubEngine) -> None:
        engine.counts_tokens_as = 100
        assert (await ask(sidecar, blocks(60)))[0] == 200

    async def test_an_engine_that_cannot_count_decides_itself(self, sidecar: Running, engine: StubEngine) -> None:
        # the stub counts prompts only, and fails on messages
        assert (await ask(sidecar, blocks(60)))[0] == 200
        assert len(engine.tokenized) == 1

    async def test_a_new_view_changes_the_bounds_at_once(self, sidecar: Running, engine: StubEngine) -> None:
        let_go = asyncio.Event()
        engine.behaviour = Behaviour(hold=let_go)
        calls = [asyncio.create_task(ask(sidecar, blocks(30, str(n)))) for n in range(2)]
        await eventually(lambda: sidecar.sidecar.gate.queued == 1)
        wider = [TIERS[0], tier("bronze", 0, 1, nominal=50)]
        assert (await sidecar.control("PUT", "/pool/view", view_json(2, tiers=wider)))[0] == 200
        await engine.count(2)
        assert (await status(sidecar)).applied == wire.Revision("pool-1", 2)
        let_go.set()
        await asyncio.gather(*calls)

    async def test_more_tiers_with_a_quota_than_sequences_is_told(self, engine: StubEngine, folder: Path) -> None:
        wanted = view_json(tiers=TIERS)
        async with running_sidecar(engine, folder, wanted=wanted, engine_slots=1, wait_ready=False) as sidecar:
            await eventually(lambda: sidecar.sidecar.link.state.problem is not None)
            quotas = condition(await status(sidecar), "QuotaEnforced")
            assert (quotas.status, quotas.reason) == ("False", "QuotaRefused")
            assert "--max-num-seqs" in quotas.message


class TestGivenBack:
    @pytest.mark.parametrize("streams", [True, False], ids=["stream", "no stream"])
    @pytest.mark.parametrize(
        "behaviour",
        [
            pytest.param(Behaviour(), id="answered"),
            pytest.param(Behaviour(status=400, body=b'{"error": {"message": "no"}}'), id="refused"),
            pytest.param(Behaviour(status=500, body=b"oops"), id="failed"),
            pytest.param(Behaviour(die_after=0), id="cut before the first byte"),
            pytest.param(Behaviour(die_after=2, flush=True), id="cut in the middle"),
            pytest.param(Behaviour(end_after=2), id="ended early"),
        ],
    )
    async def test_however_it_ends_its_blocks_are_free(
        self, sidecar: Running, engine: StubEngine, behaviour: Behaviour, streams: bool
    ) -> None:
        engine.behaviour = behaviour
        for _ in range(2):
            with contextlib.suppress(aiohttp.ClientError):
                await ask(sidecar, blocks(20, stream=streams))
        await eventually(sidecar.is_idle)
        assert held(sidecar) == {}

    @pytest.mark.parametrize("streams", [True, False], ids=["stream", "no stream"])
    async def test_a_client_that_leaves_frees_its_blocks_running_or_waiting(
        self, sidecar: Running, engine: StubEngine, streams: bool
    ) -> None:
        engine.behaviour = Behaviour(hang_after=0)
        calls = [asyncio.create_task(ask(sidecar, blocks(30, str(n), stream=streams))) for n in range(3)]
        await eventually(lambda: sidecar.sidecar.gate.queued == 2)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await eventually(sidecar.is_idle)
        assert held(sidecar) == {}


class TestWhatTheEngineTells:
    async def test_without_a_size_it_serves_and_says_that_it_bounds_nothing(
        self, engine: StubEngine, folder: Path
    ) -> None:
        engine.metrics_page = "vllm:num_requests_waiting 0.0\n"
        async with running_sidecar(engine, folder, wanted=view_json(tiers=TIERS)) as sidecar:
            assert (await ask(sidecar, blocks(500)))[0] == 200
            told = await status(sidecar)
            assert (told.capacity, told.ledger) == (None, None)
            quotas = condition(told, "QuotaEnforced")
            assert (quotas.status, quotas.reason) == ("False", "CapacityUnknown")
            _, page = await sidecar.control("GET", "/metrics")
            assert "cacheaware_kv_capacity_blocks" not in page

    async def test_an_engine_that_is_not_there_yet_is_waited_for(self, engine: StubEngine, folder: Path) -> None:
        engine.healthy = False
        async with running_sidecar(engine, folder, wait_ready=False) as sidecar:
            quotas = condition(await status(sidecar), "QuotaEnforced")
            assert (quotas.status, quotas.reason) == ("Unknown", "NotKnownYet")
            assert (await ask(sidecar, body()))[0] == 503
            engine.healthy = True
            await sidecar.ready()
            assert (await ask(sidecar, body()))[0] == 200

    async def test_another_process_with_another_cache_is_noticed(self, sidecar: Running, engine: StubEngine) -> None:
        long = "one prompt that is longer than a chunk of the prefix key, which has 64 bytes"
        await ask(sidecar, body(long))
        assert len(sidecar.sidecar.scheduler.index) > 0
        engine.healthy = False
        sidecar.sidecar.link.state.doubt()
        await eventually(lambda: not sidecar.sidecar.link.state.healthy)
        engine.metrics_page = plain_vllm_page(501)
        engine.healthy = True
        await eventually(lambda: (ledger := sidecar.sidecar.link.ledger) is not None and ledger.capacity == 500)
        assert len(sidecar.sidecar.scheduler.index) == 0
