"""Sidecar and stub engine as processes of their own, for tests that kill, freeze and restart them.

`python -m cacheaware_sidecar.testing_process PORT KV_SOCKET WORDS PAUSE` is the stub engine: answers of so many words,
each after so many seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from cacheaware_sidecar.testing import Behaviour, StubEngine


class Process:
    """One of them. What it wrote to stderr is in `log`, if it was kept."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, control_url: str = "") -> None:
        self._process = process
        self.url = url
        self.control_url = control_url

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    async def kill(self) -> None:
        """At once and for good, frozen or not."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def ended(self, seconds: float = 20.0) -> int:
        """The exit code."""
        return await asyncio.wait_for(self._process.wait(), seconds)

    async def ready(self, wanted: bool = True, seconds: float = 20.0) -> None:
        """Another process can only be asked again and again."""
        async with asyncio.timeout(seconds), aiohttp.ClientSession() as client:
            while await self._asked(client) is not wanted:  # noqa: ASYNC110  # it happens in another process
                await asyncio.sleep(0.02)

    async def _asked(self, client: aiohttp.ClientSession) -> bool:
        try:
            async with client.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.asynccontextmanager
async def engine_process(
    kv_socket: Path, *, words: int, pause: float, port: int | None = None
) -> AsyncIterator[Process]:
    port = port or free_port()
    arguments = [str(port), str(kv_socket), str(words), str(pause)]
    process = Process(
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cacheaware_sidecar.testing_process", *arguments, stderr=asyncio.subprocess.DEVNULL
        ),
        f"http://127.0.0.1:{port}",
    )
    try:
        await process.ready()
        yield process
    finally:
        await process.kill()


@contextlib.asynccontextmanager
async def sidecar_process(
    engine_url: str, kv_socket: Path, folder: Path, *flags: str, log: Path | None = None, port: int | None = None
) -> AsyncIterator[Process]:
    """Its files are in `folder`, as `testing_sidecar.write_files` wrote them; ready when this gives it."""
    port, control_port = port or free_port(), free_port()
    with open("/dev/null" if log is None else log, "wb") as output:  # noqa: ASYNC230  # nobody waits yet
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cacheaware_sidecar", "--engine-url", engine_url, "--kv-socket", str(kv_socket)),
            *("--view-file", str(folder / "view.json"), "--secrets-dir", str(folder / "secrets")),
            *("--port", str(port), "--control-port", str(control_port), *flags),
            stderr=output,
        )
    running = Process(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{control_port}")
    try:
        await running.ready()
        yield running
    finally:
        await running.kill()


async def _serve(port: int, kv_socket: Path, words: int, pause: float) -> None:
    engine = StubEngine(kv_socket)
    engine.port = port
    engine.behaviour = Behaviour(words=(" word",) * words, pause=pause)
    async with engine:
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
