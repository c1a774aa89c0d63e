"""The process: what it says, what it answers while it starts and ends, and its exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cacheaware_engine.errors import ContextTooLong, EngineError, NotEnoughMemory
from cacheaware_engine.metrics import Metrics
from cacheaware_engine.settings import DType, Settings
from cacheaware_engine.startup import load

STARTED_S = 200  # far more than a start takes
# The engine, which loads its model when its standard input ends.
HELD = """
import sys
from cacheaware_engine import process
from cacheaware_engine.__main__ import main
load = process._load
def held(*arguments):
    sys.stdin.read()
    return load(*arguments)
process._load = held
main()
"""


@dataclass(slots=True)
class Process:
    child: asyncio.subprocess.Process
    lines: list[dict[str, Any]]

    async def said(self, message: str) -> dict[str, Any]:
        """The first log line with this message, seen already or still to come."""
        assert self.child.stderr is not None
        async with asyncio.timeout(STARTED_S):
            while True:
                for line in self.lines:
                    if line.get("message") == message:
                        return line
                raw = (await self.child.stderr.readline()).decode()
                assert raw, f"it ended without saying {message!r}: {self.lines}"
                self.lines.append(json.loads(raw) if raw.startswith("{") else {"plain": raw})

    async def ended(self) -> tuple[int, str]:
        """Exit code and what else it said."""
        assert self.child.stderr is not None
        async with asyncio.timeout(STARTED_S):
            rest = (await self.child.stderr.read()).decode()
            return await self.child.wait(), "".join(line.get("plain", "") for line in self.lines) + rest


@contextlib.asynccontextmanager
async def engine(
    folder: Path | str, kv_socket: Path, *flags: str, program: Sequence[str] = ("-m", "cacheaware_engine")
) -> AsyncIterator[Process]:
    arguments = ["--model", str(folder), "--kv-socket", str(kv_socket), "--port", "0", "--threads", "1"]
    child = await asyncio.create_subprocess_exec(
        sys.executable, *program, *arguments, "--log-format", "json", "--served-model-name", "tiny",
        "--num-kv-blocks", "64", *flags,
        stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    process = Process(child, [])
    try:
        yield process
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        child._transport.close()  # type: ignore[attr-defined]  # asyncio closes its pipes only when collected


async def test_it_answers_at_once_serves_and_drains(tiny_folder: Path, tmp_path: Path) -> None:
    kv_socket = tmp_path / "kv.sock"
    async with engine(tiny_folder, kv_socket, program=("-c", HELD)) as process, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{(await process.said('listening'))['port']}"
        async with http.get(f"{url}/health") as response:
            assert (response.status, await response.json()) == (503, {"status": "loading"})
        assert process.child.stdin is not None
        process.child.stdin.close()
        await process.said("ready")
        async with http.get(f"{url}/health") as response:
            assert response.status == 200
        body = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 200, "ignore_eos": True, "stream": True}
        async with http.post(f"{url}/v1/completions", json=body) as response:
            first = await response.content.readline()
            assert first.startswith(b"data: ")
            process.child.send_signal(signal.SIGTERM)
            await process.said("draining")
            rest = await response.text()
            assert rest.endswith("data: [DONE]\n\n")
            assert '"finish_reason":"length"' in rest
        code, _ = await process.ended()
        assert code == 0
        assert not kv_socket.exists()


async def test_a_stop_while_the_model_loads_ends_it(tiny_folder: Path, tmp_path: Path) -> None:
    async with engine(tiny_folder, tmp_path / "kv.sock") as process:
        await process.said("listening")
        process.child.send_signal(signal.SIGINT)
        assert (await process.ended())[0] == 0


async def test_a_second_signal_ends_it_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    async with engine(tiny_folder, tmp_path / "kv.sock", "--num-kv-blocks", "400") as process:
        port = (await process.said("listening"))["port"]
        await process.said("ready")
        body = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 2}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response,
        ):
            await response.content.readline()
            process.child.send_signal(signal.SIGSTOP)  # nothing is computed until both signals are there
            process.child.send_signal(signal.SIGTERM)
            process.child.send_signal(signal.SIGCONT)
            await process.said("draining")
            process.child.send_signal(signal.SIGINT)
            code, _ = await process.ended()
        assert code in (0, 128 + signal.SIGINT)


@pytest.mark.parametrize(
    ("model", "flags", "code", "said"),
    [
        pytest.param("/no/such/model", [], 1, "/no/such/model", id="no model"),
        pytest.param("pvc://claim/model", [], 1, "pvc://", id="a source that is not for one machine"),
        pytest.param(None, ["--block-size", "zero"], 2, "--block-size", id="a bad setting"),
    ],
)
async def test_what_cannot_start_says_why(
    tiny_folder: Path, tmp_path: Path, model: str | None, flags: list[str], code: int, said: str
) -> None:
    async with engine(model or tiny_folder, tmp_path / "kv.sock", *flags) as process:
        ended, text = await process.ended()
        assert ended == code
        (line,) = [line for line in text.splitlines() if not line.startswith("{")]
        assert said in line
        assert line.startswith("cacheaware-engine: ")


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        pytest.param({"max_model_len": 100_000}, ContextTooLong, "--max-model-len 100000", id="context"),
        pytest.param({"num_kv_blocks": 2 * 10**8}, NotEnoughMemory, "MiB are available", id="memory"),
        pytest.param({"kv_cache_memory": 1000}, NotEnoughMemory, "--kv-cache-memory 1000", id="not one block"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(
    tiny_folder: Path, tmp_path: Path, changes: dict[str, Any], error: type[EngineError], said: str
) -> None:
    settings = Settings(str(tiny_folder), kv_socket=tmp_path / "kv.sock", served_model_name="tiny", dtype=DType.FLOAT32)
    with pytest.raises(error, match=said):
        load(dataclasses.replace(settings, **changes), Metrics("tiny"))


def test_blocks_fill_the_memory_that_was_asked_for(tiny_folder: Path, tmp_path: Path) -> None:
    settings = Settings(str(tiny_folder), kv_socket=tmp_path / "kv.sock", served_model_name="tiny", dtype=DType.FLOAT32)
    loaded = load(dataclasses.replace(settings, kv_cache_memory=2**20), Metrics("tiny"))
    ledger = loaded.engine.ledger()
    assert ledger.bytes_per_token is not None
    block = ledger.bytes_per_token * ledger.block_size
    assert ledger.capacity * block <= 2**20 < (ledger.capacity + 1) * block
    assert loaded.max_model_len == 512


async def test_a_port_in_use_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        async with engine(tiny_folder, tmp_path / "kv.sock", "--port", port) as process:
            code, text = await process.ended()
    assert code == 2
    assert "--port" in text
    assert port in text
    assert not (tmp_path / "kv.sock").exists()


async def test_a_socket_left_by_a_killed_process_is_replaced_and_one_in_use_is_not(
    tiny_folder: Path, tmp_path: Path
) -> None:
    kv_socket = tmp_path / "kv.sock"
    async with engine(tiny_folder, kv_socket) as killed:
        await killed.said("listening")
        killed.child.kill()
        await killed.child.wait()
    assert kv_socket.exists()
    async with engine(tiny_folder, kv_socket) as process:
        await process.said("listening")
        async with engine(tiny_folder, kv_socket) as second:
            code, text = await second.ended()
        assert code == 2
        assert "--kv-socket" in text
        await process.said("ready")
        connector = aiohttp.UnixConnector(os.fspath(kv_socket))
        async with aiohttp.ClientSession(connector=connector) as kv, kv.get("http://engine/kv/ledger") as response:
            assert (await response.json())["capacity"] == 64


async def test_a_file_that_is_no_socket_is_left_alone(tiny_folder: Path, tmp_path: Path) -> None:
    kv_socket = tmp_path / "notes.txt"
    kv_socket.write_text("precious")
    async with engine(tiny_folder, kv_socket) as process:
        code, text = await process.ended()
    assert (code, kv_socket.read_text()) == (2, "precious")
    assert "--kv-socket" in text
