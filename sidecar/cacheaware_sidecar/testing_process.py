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
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp

from cacheaware_sidecar.testing import Behaviour, StubEngine

_PATIENCE = 120.0  # seconds for a process to start, or to end: far more than either takes


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

    async def ended(self) -> int:
        """The exit code."""
        return await asyncio.wait_for(self._process.wait(), _PATIENCE)

    async def ready(self, wanted: bool = True) -> None:
        """Another process can only be asked again and again."""
        async with asyncio.timeout(_PATIENCE), aiohttp.ClientSession() as client:
            while await self._asked(client) is not wanted:  # noqa: ASYNC110  # it happens in another process
                await asyncio.sleep(0.02)

    async def _asked(self, client: aiohttp.ClientSession) -> bool:
        try:
            async with client.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


@contextlib.contextmanager
def kept_port() -> Iterator[int]:
    """A port that the system chose and gives to nobody else meanwhile: a server may listen there, and start again."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers have it
        kept.bind(("127.0.0.1", 0))
        port = int(kept.getsockname()[1])
        if sys.platform != "linux":
            kept.close()  # only there may somebody listen on a port that another has and does not listen on
        yield port


@contextlib.asynccontextmanager
async def engine_process(
    kv_socket: Path, *, words: int, pause: float, port: int | None = None
) -> AsyncIterator[Process]:
    with contextlib.ExitStack() as kept:
        port = port or kept.enter_context(kept_port())
        arguments = [str(port), str(kv_socket), str(words), str(pause)]
        process = Process(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "cacheaware_sidecar.testing_process",
                *arguments,
                stderr=asyncio.subprocess.DEVNULL,
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
    with contextlib.ExitStack() as kept:
        port = port or kept.enter_context(kept_port())
        control_port = kept.enter_context(kept_port())
        with open("/dev/null" if log is None else log, "wb") as output:  # noqa: ASYNC230  # nobody waits yet
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "cacheaware_sidecar", "--engine-url", engine_url),
                *("--kv-socket", str(kv_socket), "--view-file", str(folder / "view.json")),
                *("--secrets-dir", str(folder / "secrets")),
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
