"""A sidecar in front of a stub engine, with its files, for tests; and how to interrupt and wait for things."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from cacheaware_api import wire
from cacheaware_sidecar.settings import Settings
from cacheaware_sidecar.sidecar import Sidecar
from cacheaware_sidecar.testing import MODEL

CONTROL_TOKEN = "control-token-of-the-test"
# Seconds for what happens at once: far more than a busy machine takes, and less than any limit of a sidecar that would
# make it happen too.
SOON = 30.0


def tier(name: str, priority: int = 0, weight: int = 1, **more: Any) -> dict[str, Any]:
    sla = {"timeToFirstToken": more.pop("ttft")} if "ttft" in more else {}
    quota = {"nominalPercent": more.pop("nominal", 0)}
    return {
        "name": name,
        "priority": priority,
        "weight": weight,
        "quota": quota,
        "sla": sla,
        "effectivePercent": quota["nominalPercent"],
        **more,
    }


def view_json(number: int = 1, uid: str = "pool-1", **changes: Any) -> dict[str, Any]:
    return {
        "revision": {"pool_uid": uid, "number": number},
        "model": MODEL,
        "tiers": [tier("gold", 100, 4, nominal=50, ttft="800ms"), tier("bronze", 0, 1, nominal=30, ttft="10s")],
        "defaultTier": "bronze",
        "sharing": "Pool",
        "identity": {"type": "Open"},
        **changes,
    }


def view(number: int = 1, uid: str = "pool-1", **changes: Any) -> wire.View:
    return wire.from_json(wire.View, view_json(number, uid, **changes))


def api_keys_json(keys: Mapping[str, Mapping[str, Any]], gateways: Sequence[str] = ()) -> dict[str, Any]:
    """`{"secret of acme": {"tenant": "acme", "tiers": ["gold"], "defaultTier": "gold"}}`, `["secret of a gateway"]`"""
    return {
        "keys": [
            {"name": f"key-{number}", "sha256": hashlib.sha256(key.encode()).hexdigest(), **entry}
            for number, (key, entry) in enumerate(keys.items())
        ],
        "gateways": [
            {"name": f"gateway-{number}", "sha256": hashlib.sha256(secret.encode()).hexdigest()}
            for number, secret in enumerate(gateways)
        ],
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """A sidecar that serves, and the files it reads."""

    sidecar: Sidecar
    url: str
    control_url: str
    view_file: Path
    secrets_dir: Path
    client: aiohttp.ClientSession

    async def control(self, method: str, path: str, message: Any = None, token: str = CONTROL_TOKEN) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}"}
        async with self.client.request(method, self.control_url + path, json=message, headers=headers) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if "json" in answer.content_type else text

    async def ready(self) -> None:
        """Until the quotas are applied and the ledger says so."""
        link = self.sidecar.link
        state = link.state
        await eventually(lambda: state.ready and (link.ledger is None or link.ledger.revision == state.applied))

    def is_idle(self) -> bool:
        """Nothing queued, nothing in flight, no account left open."""
        self.sidecar.dispatcher.budget.check_integrity()
        gate = self.sidecar.gate
        return gate.queued == 0 and gate.in_flight == 0 and self.sidecar.traffic.inside == 0


def write_files(
    folder: Path,
    wanted: Mapping[str, Any],
    keys: Mapping[str, Mapping[str, Any]] | None,
    gateways: Sequence[str] = (),
) -> None:
    (folder / "view.json").write_text(json.dumps(wanted))
    secrets = folder / "secrets"
    secrets.mkdir(exist_ok=True)
    (secrets / "salt-key").write_text("salt key of the test\n")
    (secrets / "control-token").write_text(CONTROL_TOKEN + "\n")
    (secrets / "hop-key").write_text("hop key of the test\n")
    if keys is not None or gateways:
        (secrets / "api-keys.json").write_text(json.dumps(api_keys_json(keys or {}, gateways)))


class AnyEngine(Protocol):
    """Where an engine listens: the stub, or a real one."""

    @property
    def url(self) -> str: ...
    @property
    def kv_socket(self) -> Path | None: ...


@contextlib.asynccontextmanager
async def running_sidecar(
    engine: AnyEngine,
    folder: Path,
    *,
    wanted: Mapping[str, Any] | None = None,
    keys: Mapping[str, Mapping[str, Any]] | None = None,
    gateways: Sequence[str] = (),
    wait_ready: bool = True,
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> AsyncIterator[Running]:
    """A sidecar on ports that the system picks, ready if not told otherwise."""
    write_files(folder, wanted or view_json(), keys, gateways)
    sidecar = Sidecar(
        Settings(
            engine_url=engine.url,
            kv_socket=engine.kv_socket,
            view_file=folder / "view.json",
            secrets_dir=folder / "secrets",
            port=0,
            control_port=0,
            **settings,
        ),
        clock,
    )
    async with sidecar.serving() as ports, aiohttp.ClientSession() as client:
        running = Running(
            sidecar,
            f"http://127.0.0.1:{ports.port}",
            f"http://127.0.0.1:{ports.control_port}",
            folder / "view.json",
            folder / "secrets",
            client,
        )
        if wait_ready:
            await running.ready()
        yield running


class CancelledAt:
    """Drives a coroutine and cancels it at its nth suspension, as a client that leaves at that very moment does; or
    lets what it waits for there fail in another way.
    """

    def __init__(
        self,
        work: Coroutine[Any, Any, Any],
        number: int,
        failure: type[BaseException] = asyncio.CancelledError,
    ) -> None:
        self._work = work
        self._failure = failure
        self._left = number
        self.reached = False

    def __await__(self) -> Generator[Any, None, Any]:
        throw: BaseException | None = None
        while True:
            try:
                waits_for = self._work.send(None) if throw is None else self._work.throw(throw)
            except StopIteration as stop:
                return stop.value
            throw = None
            if self._left == 0 and not self.reached:
                self.reached = True
                if waits_for is not None:
                    waits_for._asyncio_future_blocking = False
                    waits_for.cancel()
                throw = self._failure()
                continue
            self._left -= 1
            try:
                yield waits_for
            except BaseException as error:
                throw = error


async def eventually(true: Callable[[], bool]) -> None:
    """Wait for what no event tells. Fails with a TimeoutError."""
    async with asyncio.timeout(SOON):
        while not true():  # noqa: ASYNC110  # the condition belongs to another object, which has no event for it
            await asyncio.sleep(0.002)
