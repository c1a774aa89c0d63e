"""The engine has the wanted quotas, after every new view and in every new process; what it refuses is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cacheaware_api import wire
from cacheaware_api.testing_time import standing_still
from cacheaware_sidecar.testing import StubEngine
from cacheaware_sidecar.testing_sidecar import Running, eventually, running_sidecar, tier, view, view_json

PREFIX = [{"name": "assistant", "text": "You are a patient assistant."}]


def condition(sidecar: Running, kind: str) -> wire.Condition:
    (found,) = [one for one in sidecar.sidecar.status().conditions if one.type == kind]
    return found


async def test_a_view_becomes_quotas_in_blocks(sidecar: Running, engine: StubEngine) -> None:
    assert engine.quotas is not None
    assert {one.name: (one.nominal, one.priority) for one in engine.quotas.tiers} == {
        "gold": (500, 100),
        "bronze": (300, 0),
    }
    assert sidecar.sidecar.link.state.applied == wire.Revision("pool-1", 1)
    assert condition(sidecar, "QuotaEnforced").status == "True"


async def test_a_new_view_is_applied_at_once(sidecar: Running, engine: StubEngine) -> None:
    status, said = await sidecar.control(
        "PUT", "/pool/view", view_json(2, tiers=[tier("solo", nominal=90)], defaultTier="solo")
    )
    assert (status, said) == (200, {"revision": {"pool_uid": "pool-1", "number": 2}})
    await sidecar.ready()
    assert engine.quotas is not None
    assert [(one.name, one.nominal) for one in engine.quotas.tiers] == [("solo", 900)]


async def test_an_engine_that_starts_anew_gets_the_quotas_again(sidecar: Running, engine: StubEngine) -> None:
    await engine.stop()
    await engine.start()
    await eventually(lambda: engine.quotas is not None)
    await sidecar.ready()
    assert [quotas.revision.number for quotas in engine.quotas_put] == [1, 1]
    assert sidecar.sidecar.link.state.applied == wire.Revision("pool-1", 1)


async def test_a_ledger_that_counts_backwards_is_a_new_engine(engine: StubEngine, folder: Path) -> None:
    for _ in range(5):
        await engine.touch()
    async with running_sidecar(engine, folder, wanted=view_json(publicPercent=10, publicPrefixes=PREFIX)) as sidecar:
        await eventually(lambda: engine.public is not None)
        engine._sequence, engine.quotas, engine.public = 0, None, None
        await engine.stop()
        await engine.start()
        await eventually(lambda: engine.public is not None)
        await sidecar.ready()
        assert engine.quotas is not None


async def test_an_engine_that_comes_up_after_the_sidecar_is_found(folder: Path) -> None:
    engine = StubEngine(folder / "kv.sock")
    engine.port = 1  # nothing listens there
    async with running_sidecar(engine, folder, wait_ready=False) as sidecar:
        status, said = await sidecar.control("GET", "/readyz")
        assert (status, said["status"]) == (503, "engine not ready")
        assert condition(sidecar, "QuotaEnforced").status == "Unknown"
        assert sidecar.sidecar.status().capacity is None


async def test_an_engine_that_loads_is_not_ready_and_not_asked(engine: StubEngine, folder: Path) -> None:
    engine.healthy = False
    async with running_sidecar(engine, folder, wait_ready=False) as sidecar:
        await eventually(lambda: sidecar.sidecar.link.state.health_reason == "loading")
        async with sidecar.client.post(sidecar.url + "/v1/completions", json={"prompt": "Hi"}) as answer:
            assert answer.status == 503
            assert "loading" in await answer.text()
        assert engine.requests == []
        engine.healthy = True
        await sidecar.ready()
        async with sidecar.client.post(sidecar.url + "/v1/completions", json={"prompt": "Hi"}) as answer:
            assert answer.status == 200


class TestRefused:
    async def test_quotas_that_the_engine_refuses_are_said_and_the_old_ones_serve_on(
        self, sidecar: Running, engine: StubEngine
    ) -> None:
        engine.refuse_quotas = "33 tiers have a nominal quota and there are 32 slots"
        await sidecar.control("PUT", "/pool/view", view_json(2))
        await eventually(lambda: condition(sidecar, "QuotaEnforced").reason == "QuotaRefused")
        assert "33 tiers" in condition(sidecar, "QuotaEnforced").message
        assert sidecar.sidecar.link.state.applied == wire.Revision("pool-1", 1)
        assert (await sidecar.control("GET", "/readyz"))[0] == 503
        async with sidecar.client.post(sidecar.url + "/v1/completions", json={"prompt": "Hi"}) as answer:
            assert answer.status == 200
        engine.refuse_quotas = None
        await sidecar.control("PUT", "/pool/view", view_json(3))
        await sidecar.ready()
        assert condition(sidecar, "QuotaEnforced").status == "True"

    async def test_a_pool_whose_first_quotas_are_refused_serves_nobody(self, engine: StubEngine, folder: Path) -> None:
        engine.refuse_quotas = "no"
        async with running_sidecar(engine, folder, wait_ready=False) as sidecar:
            await eventually(lambda: condition(sidecar, "QuotaEnforced").reason == "QuotaRefused")
            await eventually(lambda: sidecar.sidecar.link.state.healthy)
            async with sidecar.client.post(sidecar.url + "/v1/completions", json={"prompt": "Hi"}) as answer:
                assert answer.status == 503


class TestPublicPrefixes:
    async def test_they_are_pushed_as_system_messages(self, engine: StubEngine, folder: Path) -> None:
        wanted = view_json(publicPercent=10, publicPrefixes=PREFIX)
        async with running_sidecar(engine, folder, wanted=wanted) as sidecar:
            await eventually(lambda: condition(sidecar, "PublicPrefixesResident").status == "True")
            assert engine.public is not None
            (prefix,) = engine.public.prefixes
            assert prefix.messages == ({"role": "system", "content": "You are a patient assistant."},)
            await sidecar.control("PUT", "/pool/view", view_json(2))
            await eventually(lambda: engine.public is not None and engine.public.prefixes == ())

    async def test_a_share_that_is_too_small_is_said(self, engine: StubEngine, folder: Path) -> None:
        engine.refuse_public = "needs 9 blocks, allowed 3"
        wanted = view_json(publicPercent=10, publicPrefixes=PREFIX)
        async with running_sidecar(engine, folder, wanted=wanted) as sidecar:
            await eventually(lambda: condition(sidecar, "PublicPrefixesResident").reason == "ShareTooSmall")
            assert "9 blocks" in condition(sidecar, "PublicPrefixesResident").message
            assert sidecar.sidecar.link.state.ready


async def test_a_request_waits_for_a_view_that_is_just_being_applied(sidecar: Running, engine: StubEngine) -> None:
    new = view(2, tiers=[tier("solo", nominal=90)], defaultTier="solo")
    sidecar.sidecar.views.offer(new)
    assert not sidecar.sidecar.link.state.ready
    with standing_still():  # it does not wait for ever
        async with sidecar.client.post(sidecar.url + "/v1/completions", json={"prompt": "Hi"}) as answer:
            assert (answer.status, answer.headers["x-cacheaware-tier"]) == (200, "solo")
    assert engine.quotas is not None
    assert engine.quotas.revision.number == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"sequence": 1}', json.dumps("x")])
async def test_a_ledger_that_makes_no_sense_is_no_ledger(folder: Path, text: str) -> None:
    from aiohttp import web

    asked = 0

    async def nonsense(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(text=text)

    app = web.Application()
    app.router.add_get("/kv/ledger", nonsense)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "kv.sock")).start()
    engine = StubEngine(folder / "kv.sock")
    engine.port = 1
    try:
        async with running_sidecar(engine, folder, wait_ready=False) as sidecar:
            await eventually(lambda: asked >= 2)
            assert sidecar.sidecar.link.ledger is None
            assert not sidecar.sidecar.failed.is_set()
    finally:
        await runner.cleanup()
