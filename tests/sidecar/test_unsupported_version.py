"""An engine that has a KV socket and says on it that it keeps no accounts: served by estimate, and told so."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from cacheaware_api import wire
from cacheaware_sidecar.testing import StubEngine, plain_vllm_page
from cacheaware_sidecar.testing_process import kept_port
from cacheaware_sidecar.testing_sidecar import CONTROL_TOKEN, view_json, write_files

WHY = "tier quotas are not enforced: vLLM 0.99.0 is not supported: use one of 0.31.x, 0.32.x"


@pytest.fixture
async def kv_socket(tmp_path: Path) -> AsyncIterator[Path]:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": WHY, "code": "unsupported_version"}}, status=501)

    app = web.Application()
    app.router.add_route("*", "/kv/{rest}", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "kv.sock")).start()
    yield tmp_path / "kv.sock"
    await runner.cleanup()


async def test_it_serves_by_estimate_and_says_which_version_it_is(folder: Path, kv_socket: Path) -> None:
    write_files(folder, view_json(), None)
    with kept_port() as port, kept_port() as control:
        async with StubEngine(None) as engine, aiohttp.ClientSession() as client:
            engine.metrics_page = plain_vllm_page(101)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "cacheaware_sidecar", "--engine-url", engine.url, "--kv-socket", str(kv_socket),
                "--port", str(port), "--control-port", str(control),
                "--view-file", str(folder / "view.json"), "--secrets-dir", str(folder / "secrets"),
            )  # fmt: skip
            try:
                async with asyncio.timeout(120):
                    while not await ready(client, port):  # noqa: ASYNC110  # it happens in another process
                        await asyncio.sleep(0.05)
                headers = {"Authorization": f"Bearer {CONTROL_TOKEN}"}
                async with client.get(f"http://127.0.0.1:{control}/pool/status", headers=headers) as answer:
                    told = wire.from_json(wire.PoolStatus, await answer.json())
            finally:
                process.terminate()
                code = await process.wait()
    assert told.enforcement is wire.Enforcement.ESTIMATE_ONLY
    (quotas,) = [each for each in told.conditions if each.type == "QuotaEnforced"]
    assert (quotas.status, quotas.reason) == ("False", "UnsupportedVersion")
    assert quotas.message.startswith(WHY)
    assert code == 0


async def ready(client: aiohttp.ClientSession, port: int) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with client.get(f"http://127.0.0.1:{port}/readyz") as answer:
            return answer.status == 200
    return False
