"""The Torch engine and a sidecar as processes of their own, and clients that stream from them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from benchmarks.sidecar_subjects import free_port, running, running_sidecar

from cacheaware_sidecar.testing import MODEL

TOKEN_BYTES = 46_080  # of keys and values, of SmolLM2-135M in float32


class Servers:
    """Both processes, from construction to `close`."""

    def __init__(self, model: Path, threads: int, kv_tokens: int, max_num_batched_tokens: int) -> None:
        self._loop = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        port = free_port()
        self._command = [
            *(sys.executable, "-m", "cacheaware_engine", "--model", str(model), "--served-model-name", MODEL),
            *("--port", str(port), "--threads", str(threads), "--dtype", "float32", "--log-level", "warning"),
            *("--kv-cache-memory", str(kv_tokens * TOKEN_BYTES)),
            *("--max-num-batched-tokens", str(max_num_batched_tokens)),
        ]
        self._engine_url = f"http://127.0.0.1:{port}"
        try:
            self._loop.run(self._start())
        except BaseException:  # Ctrl-C too: what was started must not outlive this
            self.close()
            raise

    def run(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[int]:
        """Prompts and how many tokens to make of each, all at once; how many were made."""
        return self._loop.run(self._all(requests))

    def close(self) -> None:
        self._loop.run(self._stack.aclose())
        self._loop.close()

    async def _start(self) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        command = [*self._command, "--kv-socket", str(folder / "kv.sock")]
        engine = await self._stack.enter_async_context(running("engine", command, self._engine_url, "/health", folder))
        sidecar = await self._stack.enter_async_context(running_sidecar(engine, folder))
        self._url = f"{sidecar.url}/v1/completions"
        self._client = await self._stack.enter_async_context(aiohttp.ClientSession())

    async def _all(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[int]:
        return await asyncio.gather(*(self._one(prompt, max_tokens) for prompt, max_tokens in requests))

    async def _one(self, prompt: Sequence[int], max_tokens: int) -> int:
        body = {
            "model": MODEL, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        made = 0
        async with self._client.post(self._url, json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {await answer.text()}")
            async for line in answer.content:
                if line.startswith(b"data: {") and (usage := json.loads(line[6:]).get("usage")):
                    made = usage["completion_tokens"]
        if made != max_tokens:
            raise RuntimeError(f"a stream of {max_tokens} tokens ended with {made}")
        return made
