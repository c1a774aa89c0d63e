"""A sidecar under load while its engine and it itself are killed, frozen and started anew, for tests.

A run is a seed and a number of seconds. Every client gets an answer in time: a whole one, an error in OpenAI's shape,
or the end of its connection where the sidecar was killed. Afterwards nothing is inside, and the sidecar has counted
each request that reached it once. `python -m cacheaware_sidecar.testing_chaos --seconds 120` is a long one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp

from cacheaware_sidecar.testing_process import Process, engine_process, kept_port, sidecar_process
from cacheaware_sidecar.testing_sidecar import CONTROL_TOKEN, view_json, write_files

LIMITS = ("--idle-timeout", "0.6", "--first-byte-timeout", "1.5", "--request-timeout", "4", "--drain-timeout", "2")
_WITHIN = 60.0  # seconds in which every client must have its answer: far more than all limits together
_CLIENTS = 12
_REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/responses", {"input": "Hi"}),
)
_HEADERS = {"Authorization": f"Bearer {CONTROL_TOKEN}"}


class Fault(StrEnum):
    ENGINE_KILLED = "engine killed"
    ENGINE_FROZEN = "engine frozen"
    SIDECAR_KILLED = "sidecar killed"
    SIDECAR_DRAINED = "sidecar drained"


class Ending(StrEnum):
    """How a request ended for its client."""

    ANSWERED = "answered"
    REFUSED = "refused"  # an error with a status
    BROKEN_OFF = "broken off"  # an error event in a stream
    LEFT = "left"  # the client itself
    NO_SIDECAR = "no sidecar"  # nobody was listening
    CUT = "cut"  # the connection ended: right only where the sidecar did


@dataclasses.dataclass(slots=True)
class Outcome:
    faults: Counter[Fault] = dataclasses.field(default_factory=Counter)
    endings: Counter[Ending] = dataclasses.field(default_factory=Counter)
    problems: list[str] = dataclasses.field(default_factory=list)


class _Pool:
    """The engine and the sidecar of a run, each of which may be another process a moment later."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._folder = folder
        self._rng = rng
        self._socket = folder / "kv.sock"
        self._kept = contextlib.ExitStack()
        self._ports = self._kept.enter_context(kept_port()), self._kept.enter_context(kept_port())
        self._engine_life = contextlib.AsyncExitStack()
        self._sidecar_life = contextlib.AsyncExitStack()
        self.engine: Process
        self.sidecar: Process
        self.life = 0  # which sidecar it is
        self.ended: set[int] = set()  # those that were killed, or told to end
        self.up = asyncio.Event()  # requests that are sent now reach the sidecar of this life, or none

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._ports[1]}"

    async def start_engine(self) -> None:
        life = engine_process(self._socket, words=self._rng.choice((2, 20, 60)), pause=0.02, port=self._ports[0])
        self.engine = await self._engine_life.enter_async_context(life)

    async def start_sidecar(self) -> None:
        log = Path("/dev/full") if self._rng.random() < 0.5 else self._folder / "log"
        self.life += 1
        life = sidecar_process(self.engine.url, self._socket, self._folder, *LIMITS, log=log, port=self._ports[1])
        self.sidecar = await self._sidecar_life.enter_async_context(life)
        self.up.set()

    async def strike(self, fault: Fault) -> None:
        match fault:
            case Fault.ENGINE_KILLED:
                await self._engine_life.aclose()
                await asyncio.sleep(self._rng.choice((0.0, 0.5)))
                await self.start_engine()
            case Fault.ENGINE_FROZEN:
                self.engine.freeze()
                await asyncio.sleep(self._rng.choice((0.2, 1.0, 3.0)))
                self.engine.thaw()
            case Fault.SIDECAR_KILLED | Fault.SIDECAR_DRAINED:
                self.ended.add(self.life)
                if fault is Fault.SIDECAR_DRAINED:
                    self.sidecar.terminate()
                    await self.sidecar.ended()
                self.up.clear()
                await self._sidecar_life.aclose()
                await self.start_sidecar()
        await self.sidecar.ready()

    async def stop(self) -> None:
        await self._sidecar_life.aclose()
        await self._engine_life.aclose()
        self._kept.close()


@dataclasses.dataclass(slots=True)
class _Clients:
    """What they saw of each sidecar: how many answers began, and how many clients left before one."""

    pool: _Pool
    outcome: Outcome
    over: bool = False
    begun: Counter[int] = dataclasses.field(default_factory=Counter)
    unknown: Counter[int] = dataclasses.field(default_factory=Counter)

    async def ask_on(self, rng: random.Random) -> None:
        """One client: asks, and asks again, each time on a connection of its own."""
        while not self.over:
            await self.pool.up.wait()
            life = self.pool.life
            ending = await self._ask(rng, life)
            self.outcome.endings[ending] += 1
            if ending in (Ending.CUT, Ending.NO_SIDECAR) and life not in self.pool.ended:
                self.outcome.problems.append(f"{ending} though the sidecar lived")
            await asyncio.sleep(rng.uniform(0, 0.05))

    async def _ask(self, rng: random.Random, life: int) -> Ending:
        path, body = rng.choice(_REQUESTS)
        body = {**body, "stream": rng.random() < 0.5}
        patience = rng.uniform(0, 1) if rng.random() < 0.15 else None
        begun = False
        connector = aiohttp.TCPConnector(force_close=True)
        try:
            async with (
                asyncio.timeout(_WITHIN if patience is None else patience),
                aiohttp.ClientSession(connector=connector) as client,
                client.post(self.pool.url + path, json=body) as answer,
            ):
                begun = True
                self.begun[life] += 1
                return self._judged(answer.status, body["stream"], await answer.read())
        except TimeoutError:
            if patience is None:
                self.outcome.problems.append(f"a client waited {_WITHIN:g} s for nothing")
            if not begun:
                self.unknown[life] += 1
            return Ending.LEFT
        except aiohttp.ClientConnectorError:
            return Ending.NO_SIDECAR
        except aiohttp.ClientError:
            return Ending.CUT

    def _judged(self, status: int, streams: bool, data: bytes) -> Ending:
        if status != 200:
            if b'"error"' not in data or status not in (502, 503, 504):
                self.outcome.problems.append(f"answered {status}: {data[:200]!r}")
            return Ending.REFUSED
        if b'"error": {' in data or b'"error":{' in data:
            return Ending.BROKEN_OFF
        if streams and not data.endswith(b"data: [DONE]\n\n") and b"event: response.completed" not in data:
            self.outcome.problems.append(f"a stream without an end: {data[-200:]!r}")
        return Ending.ANSWERED


async def run(seed: int, seconds: float, enough: Callable[[Outcome], bool] = lambda outcome: True) -> Outcome:
    """For so many seconds, and then until there is `enough` to look at."""
    rng, outcome = random.Random(seed), Outcome()
    with tempfile.TemporaryDirectory(prefix="ca-") as name:
        write_files(Path(name), view_json(), None)
        pool = _Pool(Path(name), rng)
        clients = _Clients(pool, outcome)
        try:
            await pool.start_engine()
            await pool.start_sidecar()
            async with asyncio.TaskGroup() as group:
                for number in range(_CLIENTS):
                    group.create_task(clients.ask_on(random.Random(seed + number)))
                end = time.monotonic() + seconds
                while time.monotonic() < end or not enough(outcome):
                    fault = rng.choice(list(Fault))
                    outcome.faults[fault] += 1
                    await pool.strike(fault)
                    await asyncio.sleep(rng.uniform(0.2, 1.5))
                clients.over = True
            await _check_accounts(pool, clients)
        finally:
            await pool.stop()
    return outcome


async def _check_accounts(pool: _Pool, clients: _Clients) -> None:
    """Nothing is inside any more, and the sidecar that is left has counted what its clients saw."""
    problems = clients.outcome.problems
    async with aiohttp.ClientSession(headers=_HEADERS) as client:
        try:
            async with asyncio.timeout(_WITHIN):
                while await _inside(client, pool.sidecar):  # noqa: ASYNC110  # it happens in another process
                    await asyncio.sleep(0.02)
        except TimeoutError:
            problems.append("requests are left inside")
        async with client.get(f"{pool.sidecar.control_url}/metrics") as answer:
            page = await answer.text()
    counted = sum(map(float, re.findall(r"^cacheaware_requests_total\{[^}]*\} (\S+)", page, re.MULTILINE)))
    begun, unknown = clients.begun[pool.life], clients.unknown[pool.life]
    if not begun <= counted <= begun + unknown:
        problems.append(f"{counted:g} requests were counted: {begun} answers began, {unknown} clients left before one")


async def _inside(client: aiohttp.ClientSession, sidecar: Process) -> int:
    async with client.post(f"{sidecar.control_url}/pool/drain") as answer:
        return int((await answer.json())["inside"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cacheaware_sidecar.testing_chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    arguments = parser.parse_args()
    outcome = asyncio.run(run(arguments.seed, arguments.seconds))
    print(f"seed {arguments.seed}: " + ", ".join(f"{fault} {count}x" for fault, count in outcome.faults.items()))
    print(", ".join(f"{ending}: {count}" for ending, count in outcome.endings.items()))
    for problem in outcome.problems[:20]:
        print(f"- {problem}")
    raise SystemExit(1 if outcome.problems else 0)


if __name__ == "__main__":
    main()
