"""The process: settings that are refused by name, signals that end it cleanly, a log without prompts or keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cacheaware_sidecar.settings import Settings, parse
from cacheaware_sidecar.testing import Behaviour, StubEngine
from cacheaware_sidecar.testing_process import kept_port
from cacheaware_sidecar.testing_sidecar import view_json, write_files

PATIENCE = 120.0  # seconds for a process to start, or to end: far more than either takes
REQUIRED = ["--engine-url", "http://127.0.0.1:1", "--kv-socket", "s", "--view-file", "v", "--secrets-dir", "d"]


class TestSettings:
    def test_the_defaults_are_those_of_the_design_page(self) -> None:
        assert parse(REQUIRED) == Settings(
            engine_url="http://127.0.0.1:1",
            kv_socket=Path("s"),
            view_file=Path("v"),
            secrets_dir=Path("d"),
            host="127.0.0.1",
            port=8000,
            control_host="127.0.0.1",
            control_port=9400,
            max_body_bytes=8388608,
            max_queue=1024,
            request_timeout=600,
            connect_timeout=5,
            first_byte_timeout=120,
            idle_timeout=60,
            engine_slots=None,
            drain_timeout=30,
            log_level="info",
            log_format="console",
        )

    @pytest.mark.parametrize(
        ("arguments", "names"),
        [
            pytest.param([], "--engine-url", id="nothing"),
            pytest.param([*REQUIRED, "--speed", "9"], "--speed", id="unknown flag"),
            pytest.param([*REQUIRED, "--max-q", "9"], "--max-q", id="no abbreviations"),
            pytest.param([*REQUIRED, "--port", "70000"], "--port", id="no port"),
            pytest.param([*REQUIRED, "--port", "9400"], "--control-port", id="one port for both sides"),
            pytest.param([*REQUIRED, "--max-queue", "0"], "--max-queue", id="zero"),
            pytest.param([*REQUIRED, "--max-body-bytes", "8Mi"], "--max-body-bytes", id="no number"),
            pytest.param([*REQUIRED, "--idle-timeout", "nan"], "--idle-timeout", id="nan"),
            pytest.param([*REQUIRED, "--idle-timeout", "-1"], "--idle-timeout", id="negative"),
            pytest.param([*REQUIRED, "--idle-timeout", "1e99"], "--idle-timeout", id="huge"),
            pytest.param([*REQUIRED, "--engine-slots", "1.5"], "--engine-slots", id="half a slot"),
            pytest.param([*REQUIRED, "--log-format", "xml"], "--log-format", id="unknown choice"),
            pytest.param([*REQUIRED, "--engine-url", "127.0.0.1:8001"], "--engine-url", id="no scheme"),
            pytest.param([*REQUIRED, "--engine-url", "http://u:p@host"], "--engine-url", id="credentials"),
            pytest.param([*REQUIRED, "--engine-url", "http://host:x"], "--engine-url", id="no port number"),
            pytest.param([*REQUIRED, "--kv-socket", "x" * 108], "--kv-socket", id="a path too long for a socket"),
            pytest.param([*REQUIRED, "--estimate-only"], "--estimate-only", id="a socket, and none"),
            pytest.param(["--engine-url", "http://h", *REQUIRED[4:]], "--estimate-only", id="neither socket nor none"),
        ],
    )
    def test_a_bad_one_ends_the_process_with_2_and_one_line_that_names_it(
        self, arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            parse(arguments)
        assert caught.value.code == 2
        said = capsys.readouterr().err
        assert names in said
        assert said.count("\n") == 1

    def test_an_engine_without_a_socket_is_said_to_be_one(self) -> None:
        assert parse([*REQUIRED[:2], "--estimate-only", *REQUIRED[4:]]).kv_socket is None


class Process:
    """A sidecar process in front of a stub engine."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, control_url: str) -> None:
        self._process = process
        self.url = url
        self.control_url = control_url

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    async def ended(self) -> tuple[int, str]:
        _, log = await asyncio.wait_for(self._process.communicate(), PATIENCE)
        assert self._process.returncode is not None
        return self._process.returncode, log.decode()


async def start(engine: StubEngine, folder: Path, *more: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "cacheaware_sidecar",
        *("--engine-url", engine.url, "--kv-socket", str(engine.kv_socket)),
        *("--view-file", str(folder / "view.json"), "--secrets-dir", str(folder / "secrets"), *more),
        stderr=asyncio.subprocess.PIPE,
    )


@contextlib.asynccontextmanager
async def running(engine: StubEngine, folder: Path, wanted: Any, keys: Any, *more: str) -> AsyncIterator[Process]:
    write_files(folder, wanted, keys)
    with kept_port() as port, kept_port() as control_port:
        process = await start(engine, folder, "--port", str(port), "--control-port", str(control_port), *more)
        found = Process(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{control_port}")
        try:
            async with aiohttp.ClientSession() as client:
                await _until(lambda: _ready(client, found.url), True)
            yield found
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()


async def _until(asked: Callable[[], Awaitable[bool]], wanted: bool) -> None:
    """Another process can only be asked again and again."""
    async with asyncio.timeout(PATIENCE):
        while await asked() is not wanted:  # noqa: ASYNC110  # what is waited for happens in another process
            await asyncio.sleep(0.02)


async def _ready(client: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with client.get(f"{url}/readyz") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def test_sigterm_lets_streams_finish_refuses_new_requests_and_ends_with_0(
    engine: StubEngine, folder: Path
) -> None:
    let_go = asyncio.Event()
    engine.behaviour = Behaviour(hold=let_go)
    body = {"prompt": "Hi", "stream": True}
    async with (
        running(engine, folder, view_json(), None) as process,
        aiohttp.ClientSession() as client,
        client.get(f"{process.url}/healthz"),
    ):
        inside = asyncio.create_task(client.post(f"{process.url}/v1/completions", json=body).__aenter__())
        await engine.count(1)
        process.terminate()
        await _until(lambda: _ready(client, process.control_url), False)
        async with client.post(f"{process.url}/v1/completions", json=body) as answer:
            assert (answer.status, answer.headers["x-cacheaware-reason"]) == (503, "draining")
            assert answer.headers["Retry-After"] == "1"
        let_go.set()
        async with await inside as answer:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        code, _ = await process.ended()
    assert code == 0


async def test_sigterm_lets_a_stream_finish_that_has_begun(engine: StubEngine, folder: Path) -> None:
    engine.behaviour = Behaviour(words=("x",) * 30, pause=0.05)
    async with (
        running(engine, folder, view_json(), None) as process,
        aiohttp.ClientSession() as client,
        client.post(f"{process.url}/v1/completions", json={"prompt": "Hi", "stream": True}) as answer,
    ):
        first = await answer.content.readline()
        process.terminate()
        await _until(lambda: _ready(client, process.control_url), False)
        stream = first + await answer.read()
        assert stream.count(b'"text": "x"') == 30
        assert stream.endswith(b"data: [DONE]\n\n")
        code, _ = await process.ended()
    assert code == 0


async def test_a_stream_that_does_not_end_is_cut_after_the_drain_timeout(engine: StubEngine, folder: Path) -> None:
    engine.behaviour = Behaviour(hang_after=1)
    async with (
        running(engine, folder, view_json(), None, "--drain-timeout", "0.2") as process,
        aiohttp.ClientSession() as client,
        client.post(f"{process.url}/v1/completions", json={"prompt": "Hi", "stream": True}) as answer,
    ):
        await answer.content.readline()
        process.terminate()
        code, _ = await process.ended()
        await asyncio.wait_for(engine.requests[0].left.wait(), PATIENCE)
    assert code == 0


async def test_the_log_has_a_line_for_each_request_and_no_prompt_and_no_key(engine: StubEngine, folder: Path) -> None:
    keys = {"key-of-acme": {"tenant": "acme", "tiers": ["gold"], "defaultTier": "gold"}}
    wanted = view_json(identity={"type": "APIKeys"})
    async with (
        running(engine, folder, wanted, keys, "--log-format", "json") as process,
        aiohttp.ClientSession() as client,
    ):
        for key in ("key-of-acme", "key-of-nobody"):
            headers = {"Authorization": f"Bearer {key}", "x-request-id": "mine-1"}
            body = {"prompt": "a secret prompt", "stream": True}
            async with client.post(f"{process.url}/v1/completions", json=body, headers=headers) as answer:
                await answer.read()
        process.terminate()
        code, log = await process.ended()
    assert code == 0
    for word in ("secret", "key-of", "salt key"):
        assert word not in log
    good, bad = [line for line in map(json.loads, log.splitlines()) if line["message"] == "request"]
    assert (good["tier"], good["outcome"], good["hit_tokens"], good["output_tokens"]) == ("gold", "answered", 64, 7)
    assert (good["label"], good["key"]) == ("mine-1", "key-0")
    assert good["queue_ms"] >= 0
    assert good["ttft_ms"] > 0
    assert (bad["outcome"], bad["reason"], bad["status"]) == ("bad-request", "unknown-key", 401)


class TestStart:
    @pytest.mark.parametrize(
        ("wanted", "names"),
        [
            pytest.param(view_json(identity={"type": "Nobody"}), "identity.type", id="unknown identity"),
            pytest.param(view_json(tiers=[]), "tiers", id="no tiers"),
        ],
    )
    async def test_a_view_that_makes_no_sense_is_refused_by_its_field(
        self, engine: StubEngine, folder: Path, wanted: Any, names: str
    ) -> None:
        write_files(folder, wanted, None)
        process = await start(engine, folder, "--port", "0", "--control-port", "0")
        _, said = await asyncio.wait_for(process.communicate(), PATIENCE)
        assert process.returncode == 2
        assert names in said.decode()
        assert said.count(b"\n") == 1

    async def test_a_missing_secret_is_named(self, engine: StubEngine, folder: Path) -> None:
        write_files(folder, view_json(), None)
        (folder / "secrets" / "salt-key").unlink()
        process = await start(engine, folder, "--port", "0", "--control-port", "0")
        _, said = await asyncio.wait_for(process.communicate(), PATIENCE)
        assert process.returncode == 2
        assert "salt-key" in said.decode()

    async def test_a_port_in_use_is_named(self, engine: StubEngine, folder: Path) -> None:
        write_files(folder, view_json(), None)
        process = await start(engine, folder, "--port", str(engine.port), "--control-port", "0")
        _, said = await asyncio.wait_for(process.communicate(), PATIENCE)
        assert process.returncode == 2
        assert str(engine.port) in said.decode()
