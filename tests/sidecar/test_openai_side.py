"""The OpenAI side as curl sees it: paths, bodies, identity, and errors that say what to do."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from cacheaware_api.testing_time import standing_still
from cacheaware_sidecar.app import plain_errors
from cacheaware_sidecar.testing import Behaviour, StubEngine
from cacheaware_sidecar.testing_sidecar import SOON, Running, eventually, running_sidecar, tier, view_json

CHAT = "/v1/chat/completions"
HI = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
KEYS = {
    "key-of-acme": {"tenant": "acme", "tiers": ["gold", "bronze"], "defaultTier": "gold"},
    "key-of-zeta": {"tenant": "zeta", "tiers": ["bronze"]},
}
WITH_KEYS = view_json(identity={"type": "APIKeys"}, sharing="Tenant")


async def send(
    sidecar: Running, path: str = CHAT, data: Any = None, method: str = "POST", **headers: str
) -> tuple[int, dict[str, Any], aiohttp.ClientResponse]:
    payload = data if isinstance(data, bytes) else json.dumps(HI if data is None else data).encode()
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with sidecar.client.request(method, sidecar.url + path, data=io.BytesIO(payload), headers=sent) as answer:
        return answer.status, json.loads(await answer.read() or b"{}"), answer


async def in_chunks(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 50_000):
        yield data[start : start + 50_000]


class TestPaths:
    @pytest.mark.parametrize(
        "path",
        [
            "/",
            "/v1",
            "/kv/ledger",
            "/kv/quotas",
            "//kv/ledger",
            "/v1/chat/completions/",
            "/v1/chat/completions/../../kv/ledger",
            "/pool/view",
            "/sleep",
            "/reset_prefix_cache",
            "/v1/load_lora_adapter",
            "/server_info",
            "/%2e%2e/kv/ledger",
            "/invocations",
        ],
    )
    async def test_what_is_not_listed_is_404(self, sidecar: Running, engine: StubEngine, path: str) -> None:
        for method in ("GET", "POST", "PUT"):
            status, said, answer = await send(sidecar, path, method=method)
            assert (status, said["error"]["code"]) == (404, "not-found")
            assert answer.headers["x-cacheaware-reason"] == "not-found"
        assert engine.requests == []

    @pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages", "/v1/audio/transcriptions", "/v1/responses/r1"])
    async def test_what_cannot_be_isolated_yet_is_404_unsupported(self, sidecar: Running, path: str) -> None:
        status, said, _ = await send(sidecar, path)
        assert (status, said["error"]["code"]) == (404, "unsupported")
        assert "/v1/chat/completions" in said["error"]["message"]

    async def test_another_method_is_405(self, sidecar: Running) -> None:
        status, said, answer = await send(sidecar, method="GET")
        assert (status, said["error"]["code"]) == (405, "method-not-allowed")
        assert answer.headers["Allow"] == "POST"

    async def test_models_and_tokenize_pass(self, sidecar: Running) -> None:
        status, said, _ = await send(sidecar, "/v1/models", method="GET")
        assert (status, said["data"][0]["id"]) == (200, "stub-model")
        status, said, _ = await send(sidecar, "/tokenize", {"prompt": "Hi", "priority": 3})
        assert (status, said["count"]) == (200, 2)

    async def test_metrics_carry_the_engines_with_our_queue_among_its_waiters(
        self, engine: StubEngine, folder: Path
    ) -> None:
        engine.behaviour = Behaviour(hang_after=0)
        async with running_sidecar(engine, folder, engine_slots=1) as sidecar:
            calls = [asyncio.create_task(send(sidecar)) for _ in range(3)]
            await eventually(lambda: sidecar.sidecar.gate.queued == 2)
            with standing_still():  # the engine's page is waited for two seconds
                async with sidecar.client.get(sidecar.url + "/metrics") as answer:
                    page = await answer.text()
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        assert 'vllm:num_requests_waiting{engine="0"} 4.0' in page  # its 2 and our 2
        assert 'vllm:num_requests_running{engine="0"} 1.0' in page
        assert 'cacheaware_queue_requests{tier="bronze"} 2.0' in page
        assert 'cacheaware_kv_quota_blocks{kind="nominal",tier="gold"} 500.0' in page
        assert "cacheaware_kv_capacity_blocks 1000.0" in page

    async def test_health_is_the_engines(self, sidecar: Running, engine: StubEngine) -> None:
        for path in ("/health", "/healthz", "/readyz"):
            assert (await send(sidecar, path, method="GET"))[0] == 200
        engine.healthy = False
        sidecar.sidecar.link.state.doubt()
        await eventually(lambda: not sidecar.sidecar.link.state.healthy)
        assert (await send(sidecar, "/health", method="GET"))[0] == 503
        assert (await send(sidecar, "/readyz", method="GET"))[0] == 503
        assert (await send(sidecar, "/healthz", method="GET"))[0] == 200
        assert (await send(sidecar))[0] == 503


class TestBodies:
    @pytest.mark.parametrize("chunked", [False, True], ids=["by its length", "in chunks"])
    @pytest.mark.parametrize(
        "size", [15, 6_200, *(size + by for size in (2**16, 2**17) for by in (-1, 0, 1)), 2**20, 4 * 2**20]
    )
    async def test_a_body_of_any_size_arrives_whole(
        self, sidecar: Running, engine: StubEngine, size: int, chunked: bool
    ) -> None:
        prompt = "x" * (size - len('{"prompt": ""}'))
        data = json.dumps({"prompt": prompt}).encode()
        assert len(data) == size
        sent = in_chunks(data) if chunked else io.BytesIO(data)
        async with sidecar.client.post(sidecar.url + "/v1/completions", data=sent) as answer:
            assert answer.status == 200
        assert engine.requests[0].json["prompt"] == prompt

    async def test_above_the_limit_it_is_413(self, engine: StubEngine, folder: Path) -> None:
        async with running_sidecar(engine, folder, max_body_bytes=1000) as sidecar:
            fits = json.dumps({"prompt": "x" * 900}).encode()
            assert (await send(sidecar, "/v1/completions", fits + b" " * (1000 - len(fits))))[0] == 200
            for data in (fits + b" " * (1001 - len(fits)), b"x" * 5_000_000):
                status, said, answer = await send(sidecar, "/v1/completions", data)
                assert (status, answer.headers["x-cacheaware-reason"]) == (413, "too-large")
                assert "1000 bytes" in said["error"]["message"]

    async def test_the_limit_holds_for_a_body_that_does_not_tell_its_length(
        self, engine: StubEngine, folder: Path
    ) -> None:
        async def endless() -> Any:
            while True:
                yield b"x" * 10_000

        async with running_sidecar(engine, folder, max_body_bytes=100_000) as sidecar:
            try:
                async with sidecar.client.post(sidecar.url + CHAT, data=endless()) as answer:
                    assert answer.status == 413
            except aiohttp.ClientOSError:
                pass  # the connection was closed while the body was still being sent
            assert sidecar.is_idle()
            assert engine.requests == []

    async def test_the_limit_holds_for_what_a_compressed_body_unfolds_to(
        self, engine: StubEngine, folder: Path
    ) -> None:
        bomb = gzip.compress(b" " * 50_000_000)
        async with running_sidecar(engine, folder, max_body_bytes=1_000_000) as sidecar:
            assert (await send(sidecar, data=bomb, Content_Encoding="gzip"))[0] == 413
            assert (await send(sidecar, data=b"not gzip", Content_Encoding="gzip"))[0] == 400

    @pytest.mark.parametrize(
        "data", [b"", b"{", b"[]", b'{"messages": "\xff"}', b"[" * 99_999, b'{"n": 1e999}', b'{"max_tokens": -1}']
    )
    async def test_what_cannot_be_read_is_400_in_openais_shape(
        self, sidecar: Running, engine: StubEngine, data: bytes
    ) -> None:
        status, said, answer = await send(sidecar, data=data)
        assert (status, answer.headers["x-cacheaware-reason"]) == (400, "bad-request")
        assert set(said["error"]) == {"message", "type", "param", "code"}
        assert engine.requests == []

    @pytest.mark.parametrize(
        "messages",
        [
            pytest.param([{"role": "user", "content": None}], id="null"),
            pytest.param([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], id="image"),
            pytest.param([{"role": "user", "content": [{"type": "hologram"}]}], id="unknown part"),
            pytest.param([{"role": "tool", "tool_call_id": "1", "content": "42"}], id="tool"),
            pytest.param("what is this", id="no list"),
            pytest.param([[[]]], id="nonsense"),
        ],
    )
    async def test_an_unknown_shape_is_the_engines_to_judge(
        self, sidecar: Running, engine: StubEngine, messages: Any
    ) -> None:
        assert (await send(sidecar, data={"messages": messages}))[0] == 200
        assert engine.requests[0].json["messages"] == messages


class TestIdentity:
    async def test_keys_and_tiers_decide(self, engine: StubEngine, folder: Path) -> None:
        async with running_sidecar(engine, folder, wanted=WITH_KEYS, keys=KEYS) as sidecar:
            acme, zeta = "Bearer key-of-acme", "Bearer key-of-zeta"
            status, said, answer = await send(sidecar)
            assert (status, said["error"]["code"]) == (401, "unknown-key")
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert (await send(sidecar, Authorization="Bearer wrong"))[0] == 401
            assert (await send(sidecar, "/v1/models", method="GET"))[0] == 401
            assert (await send(sidecar, "/v1/models", method="GET", Authorization=zeta))[0] == 200
            status, _, answer = await send(sidecar, Authorization=acme)
            assert (status, answer.headers["x-cacheaware-tier"]) == (200, "gold")
            status, _, answer = await send(sidecar, Authorization=zeta)
            assert (status, answer.headers["x-cacheaware-tier"]) == (200, "bronze")
            status, said, answer = await send(sidecar, data=HI | {"service_tier": "gold"}, Authorization=zeta)
            assert (status, answer.headers["x-cacheaware-reason"]) == (403, "tier-not-allowed")
            assert "one of bronze" in said["error"]["message"]
            status, said, answer = await send(sidecar, data=HI | {"service_tier": "lead"}, Authorization=acme)
            assert (status, answer.headers["x-cacheaware-reason"]) == (400, "unknown-tier")
            assert "bronze, gold" in said["error"]["message"]
            assert said["error"]["param"] == "service_tier"
        assert len(engine.requests) == 2
        assert all("Authorization" not in request.headers for request in engine.requests)

    async def test_a_stranger_does_not_get_to_send_a_body(self, engine: StubEngine, folder: Path) -> None:
        async with running_sidecar(engine, folder, wanted=WITH_KEYS, keys=KEYS, max_body_bytes=10) as sidecar:
            assert (await send(sidecar, data=b"x" * 1000))[0] == 401

    async def test_headers_that_name_a_tier_or_tenant_count_for_nothing(
        self, sidecar: Running, engine: StubEngine
    ) -> None:
        aliases = ("x_cacheaware_tier", "x_llm_d_inference_objective", "x_cacheaware_tenant")
        _, _, answer = await send(sidecar, **dict.fromkeys(aliases, "gold"))
        assert answer.headers["x-cacheaware-tier"] == "bronze"
        assert not [
            name for name in engine.requests[0].headers if "llm-d" in name.lower() or "cacheaware" in name.lower()
        ]

    async def test_the_salt_follows_the_tenant_and_not_what_a_client_sends(
        self, engine: StubEngine, folder: Path
    ) -> None:
        async with running_sidecar(engine, folder, wanted=WITH_KEYS, keys=KEYS) as sidecar:
            for key in ("key-of-acme", "key-of-acme", "key-of-zeta"):
                data = HI | {"cache_salt": "theirs", "priority": -999, "vllm_xargs": {"cacheaware_tier": "gold"}}
                assert (await send(sidecar, data=data, Authorization=f"Bearer {key}"))[0] == 200
        one, two, other = (request.json["cache_salt"] for request in engine.requests)
        assert one == two != other
        assert "theirs" not in (one, other)
        assert [request.json["priority"] for request in engine.requests] == [-100, -100, 0]
        tiers = [request.json["vllm_xargs"] for request in engine.requests]
        assert tiers == [{"cacheaware_tier": "gold"}, {"cacheaware_tier": "gold"}, {"cacheaware_tier": "bronze"}]

    async def test_another_tenant_gets_no_predicted_hit(self, engine: StubEngine, folder: Path) -> None:
        prompt = {"messages": [{"role": "user", "content": "You are a patient assistant. " * 40}]}
        async with running_sidecar(engine, folder, wanted=WITH_KEYS, keys=KEYS) as sidecar:
            for key in ("key-of-acme", "key-of-zeta", "key-of-acme"):
                assert (await send(sidecar, data=prompt, Authorization=f"Bearer {key}"))[0] == 200
            again, other, first = sidecar.sidecar.decisions.last(3)
            assert (first.predicted_hit_tokens, other.predicted_hit_tokens) == (0, 0)
            assert (again.predicted_hit_tokens or 0) > 50

    async def test_new_keys_count_without_a_restart_and_a_broken_file_takes_none_away(
        self, engine: StubEngine, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        from cacheaware_sidecar.testing_sidecar import api_keys_json

        async with running_sidecar(engine, folder, wanted=WITH_KEYS, keys=KEYS) as sidecar:
            keys_file = sidecar.secrets_dir / "api-keys.json"

            async def status(key: str) -> int:
                return (await send(sidecar, "/v1/models", method="GET", Authorization=f"Bearer {key}"))[0]

            async def becomes(key: str, wanted: int) -> None:
                async with asyncio.timeout(SOON):
                    while await status(key) != wanted:  # noqa: ASYNC110  # a file that is looked at now and then
                        await asyncio.sleep(0.02)

            assert await status("key-of-new") == 401
            keys_file.write_text(json.dumps(api_keys_json({"key-of-new": {"tenant": "n", "tiers": ["bronze"]}})))
            await becomes("key-of-new", 200)
            assert await status("key-of-acme") == 401
            keys_file.write_text("{ half")
            await eventually(lambda: "the last good secrets stay in force" in caplog.text)
            assert await status("key-of-new") == 200


class TestBusy:
    async def test_a_full_queue_is_429(self, engine: StubEngine, folder: Path) -> None:
        let_go = asyncio.Event()
        engine.behaviour = Behaviour(hold=let_go)
        async with running_sidecar(engine, folder, engine_slots=1, max_queue=1) as sidecar:
            calls = [asyncio.create_task(send(sidecar)) for _ in range(2)]
            await eventually(lambda: sidecar.sidecar.gate.queued == 1)
            status, said, answer = await send(sidecar)
            assert (status, said["error"]["code"]) == (429, "queue-full")
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.headers["x-should-retry"] == "true"
            let_go.set()
            assert [(await call)[0] for call in calls] == [200, 200]
        page = sidecar.sidecar.metrics.page().decode()
        assert 'cacheaware_rejections_total{reason="queue-full",tier="bronze"} 1.0' in page

    async def test_a_tier_that_rejects_says_429_instead_of_serving_late(self, engine: StubEngine, folder: Path) -> None:
        engine.behaviour = Behaviour(hang_after=0)
        wanted = view_json(tiers=[tier("bronze", nominal=30, ttft="100ms", admission="Reject")])
        async with running_sidecar(engine, folder, wanted=wanted, engine_slots=1) as sidecar:
            running = asyncio.create_task(send(sidecar))
            await engine.count(1)
            status, said, _ = await send(sidecar)
            assert (status, said["error"]["code"]) == (429, "sla-infeasible")
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert len(engine.requests) == 1

    async def test_gold_goes_first_when_the_engine_has_room_again(self, engine: StubEngine, folder: Path) -> None:
        let_go = asyncio.Event()
        engine.behaviour = Behaviour(hold=let_go)
        async with running_sidecar(engine, folder, engine_slots=1) as sidecar:
            calls = [asyncio.create_task(send(sidecar)) for _ in range(5)]
            await eventually(lambda: sidecar.sidecar.gate.queued == 4)
            calls.append(asyncio.create_task(send(sidecar, data=HI | {"service_tier": "gold"})))
            await eventually(lambda: sidecar.sidecar.gate.queued == 5)
            let_go.set()
            await asyncio.gather(*calls)
        assert [request.json["priority"] for request in engine.requests][1] == -100

    async def test_what_the_engine_refused_is_not_charged_to_its_tier(self, engine: StubEngine, folder: Path) -> None:
        let_go = asyncio.Event()
        engine.behaviour = Behaviour(hold=let_go)
        wanted = view_json(tiers=[tier("a"), tier("b")], defaultTier="a")
        async with running_sidecar(engine, folder, wanted=wanted, engine_slots=1) as sidecar:
            calls = [asyncio.create_task(send(sidecar))]
            await engine.count(1)
            engine.behaviour = Behaviour(status=400, body=b"{}")
            for number, name in enumerate(("a", "b", "a", "b"), start=1):
                calls.append(asyncio.create_task(send(sidecar, data=HI | {"service_tier": name})))
                await eventually(lambda number=number: sidecar.sidecar.gate.queued == number)  # type: ignore[misc]  # bound now
            let_go.set()
            await asyncio.gather(*calls)
        order = [request.json["vllm_xargs"]["cacheaware_tier"] for request in engine.requests]
        assert order == ["a", "a", "a", "b", "b"]  # level again after each one, so the first name goes on


async def test_a_fault_of_our_own_is_500_in_openais_shape(caplog: pytest.LogCaptureFixture) -> None:
    async def faulty(request: web.Request) -> web.Response:
        raise TypeError("a detail for the log")

    app = web.Application(middlewares=[plain_errors])
    app.router.add_get("/", faulty)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        async with aiohttp.ClientSession() as client, client.get(url) as answer:
            assert (answer.status, answer.headers["x-cacheaware-reason"]) == (500, "internal")
            assert "a detail" not in await answer.text()
    finally:
        await runner.cleanup()
    assert "a detail for the log" in caplog.text
