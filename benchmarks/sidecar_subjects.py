"""What `bench_sidecar` compares: our sidecar and two Rust routers, each a process of its own before the same engine.

The routers live in an environment of their own under `build/`, made with pip when it is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from cacheaware_sidecar.testing_sidecar import view_json, write_files

ROOT = Path(__file__).resolve().parents[1]
ROUTERS = ROOT / "build" / "routers"
ROUTER_VERSIONS = {"vllm-router": "0.1.17", "sglang-router": "0.3.2"}
_MIB = 1024 * 1024


class NotInstalled(Exception):
    """The rivals cannot be had here; ours is measured alone."""


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    url: str
    process: psutil.Process

    @property
    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    @property
    def memory_mib(self) -> float:
        return float(self.process.memory_info().rss) / _MIB

    @property
    def descriptors(self) -> int:
        return int(self.process.num_fds())


def install_routers(pip_args: Sequence[str]) -> None:
    """Raises `NotInstalled` with what pip said."""
    if all((ROUTERS / "bin" / name).exists() for name in ROUTER_VERSIONS):
        return
    pip = [str(ROUTERS / "bin" / "python"), "-m", "pip", "install", "--quiet", *pip_args]
    wanted = [f"{name}=={version}" for name, version in ROUTER_VERSIONS.items()]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(ROUTERS)], check=True, capture_output=True, text=True)
        subprocess.run([*pip, *wanted], check=True, capture_output=True, text=True, timeout=600)
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise NotInstalled(str(said).strip().splitlines()[-1]) from None


@contextlib.asynccontextmanager
async def running_engine(folder: Path) -> AsyncIterator[Subject]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.sidecar_stub", str(port), str(folder / "kv.sock")]
    async with running("engine", command, f"http://127.0.0.1:{port}", "/health", folder) as subject:
        yield subject


@contextlib.asynccontextmanager
async def running_sidecar(engine: Subject, folder: Path, turns: Path | None = None) -> AsyncIterator[Subject]:
    """`turns`: where to write how long the turns of its event loop took, once it has ended."""
    write_files(folder, view_json(), None)
    port = free_port()
    program = ["cacheaware_sidecar"] if turns is None else ["benchmarks.sidecar_turns", str(turns)]
    command = [
        *(sys.executable, "-m", *program, "--port", str(port), "--control-port", str(free_port())),
        *("--engine-url", engine.url, "--kv-socket", str(folder / "kv.sock"), "--max-queue", "4096"),
        *("--view-file", str(folder / "view.json"), "--secrets-dir", str(folder / "secrets")),
    ]
    async with running("ours", command, f"http://127.0.0.1:{port}", "/readyz", folder) as subject:
        yield subject


@contextlib.asynccontextmanager
async def running_router(name: str, engine: Subject, folder: Path) -> AsyncIterator[Subject]:
    port, metrics = free_port(), free_port()
    program = [str(ROUTERS / "bin" / name), *(["launch"] if name == "sglang-router" else [])]
    command = [
        *program,
        *("--host", "127.0.0.1", "--port", str(port), "--worker-urls", engine.url, "--log-level", "warn"),
        *("--prometheus-port", str(metrics), "--max-concurrent-requests", "4096"),
    ]
    if name == "vllm-router":
        command[command.index("warn")] = "warning"
    async with running(name, command, f"http://127.0.0.1:{port}", "/health", folder) as subject:
        yield subject


@contextlib.asynccontextmanager
async def running(name: str, command: Sequence[str], url: str, health: str, folder: Path) -> AsyncIterator[Subject]:
    with (folder / f"{name}.log").open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220  # nothing else runs while the subjects are being started
            command, cwd=ROOT, stdout=output, stderr=output
        )
    try:
        await _healthy(process, url + health, folder / f"{name}.log")
        yield Subject(name, url, psutil.Process(process.pid))
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    async with asyncio.timeout(60), aiohttp.ClientSession() as client:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(url) as answer:
                    if answer.status == 200:
                        return
            if process.poll() is not None:
                said = log.read_text()[-2000:]  # noqa: ASYNC240  # it is over: nobody waits
                raise RuntimeError(f"{process.args!r} ended with {process.returncode}: {said}")
            await asyncio.sleep(0.1)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def router_versions() -> dict[str, str]:
    """As they are installed."""
    listed = subprocess.run(
        [str(ROUTERS / "bin" / "python"), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"],
        check=True,
        capture_output=True,
        text=True,
    )
    return {each["name"]: each["version"] for each in json.loads(listed.stdout) if each["name"] in ROUTER_VERSIONS}
