"""A node for the operator's benchmark, in a process of its own: a kubelet and the sidecars of its pods, as stand-ins.

Every pod that is scheduled here gets an address of its own on loopback and is said to run and to be ready. At that
address, on the port of a sidecar's control side, something answers as a sidecar does whose engine acknowledges views at
once. So the operator runs as it is, and reaches its sidecars as it does in a cluster.

The benchmark tells it over HTTP (the port is the first line of its output) which pods misbehave, and asks what came:

    PUT /behaviour {"silent": [pod, …], "slow": {pod: seconds}, "references": n}
    GET /asked     {pod: [seconds of CLOCK_MONOTONIC at which its metrics were read, …]}
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web
from e2e.cluster import MERGE_PATCH, pod_status

from cacheaware_api import wire
from cacheaware_operator.cluster.names import CONTROL_PORT
from cacheaware_operator.kubernetes_credentials import Credentials
from cacheaware_sidecar.metrics import LedgerCollector, Metrics, WorkingSetCollector
from cacheaware_sidecar.reuse_histogram import BOUNDS
from cacheaware_sidecar.working_set import TierWorkingSet

NODE = "bench"
CAPACITY = 1000  # blocks of each engine
SILENT_SECONDS = 60.0  # longer than anybody waits
_LEASE_SECONDS = 10.0
_WRITERS = 16
_ROOM = {"cpu": "100k", "memory": "1000Ti", "pods": "20000", "ephemeral-storage": "1000Ti"}


@dataclass(slots=True)
class StandIn:
    """One sidecar."""

    view: wire.View | None = None
    silent: bool = False
    slow: float = 0.0  # seconds before it answers
    read: list[float] = field(default_factory=list)  # when its metrics were


class Sidecars:
    """All sidecars, by address."""

    def __init__(self) -> None:
        self.by_address: dict[str, StandIn] = {}
        self.pod_of: dict[str, str] = {}
        self.references = 0.0  # that gold's prompts have made so far; growing ones are traffic
        self._pages: dict[tuple[tuple[str, ...], float], bytes] = {}
        self._statuses: dict[tuple[wire.Revision, tuple[str, ...]], bytes] = {}
        self._server = web.Server(self._answer)
        self._listeners: list[asyncio.Server] = []

    async def begin(self, pod: str) -> str:
        """The address at which the pod's sidecar answers from now on."""
        number = len(self.by_address)
        address = f"127.{20 + number // 62500}.{number // 250 % 250}.{number % 250 + 1}"
        self.by_address[address], self.pod_of[address] = StandIn(), pod
        listener = await asyncio.get_running_loop().create_server(
            self._server, address, CONTROL_PORT, family=socket.AF_INET
        )
        self._listeners.append(listener)
        return address

    async def end(self) -> None:
        for listener in self._listeners:
            listener.close()
        await self._server.shutdown(0)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        assert request.transport is not None
        sidecar = self.by_address[request.transport.get_extra_info("sockname")[0]]
        body = await request.read()
        if sidecar.silent or sidecar.slow:
            await asyncio.sleep(SILENT_SECONDS if sidecar.silent else sidecar.slow)
        match request.method, request.path:
            case "PUT", "/pool/view":
                sidecar.view = wire.from_json(wire.View, json.loads(body))
                answer = json.dumps({"revision": wire.to_json(sidecar.view.revision)}).encode()
            case "GET", "/metrics":
                sidecar.read.append(time.monotonic())
                answer = self._page(sidecar.view)
            case _:
                answer = self._status(sidecar.view)
        return web.Response(body=answer, content_type="application/json")

    def _status(self, view: wire.View | None) -> bytes:
        if view is None:
            return json.dumps(wire.to_json(status_of(None))).encode()
        key = (view.revision, tuple(tier.name for tier in view.tiers))
        if key not in self._statuses:
            self._statuses[key] = json.dumps(wire.to_json(status_of(view))).encode()
        return self._statuses[key]

    def _page(self, view: wire.View | None) -> bytes:
        """Made by the sidecar's own classes, so that it is as long as a real one."""
        tiers = () if view is None else tuple(tier.name for tier in view.tiers)
        key = (tiers, self.references)
        if key not in self._pages:
            metrics = Metrics(lambda: tiers, lambda tier: 0)
            metrics.keep(tiers)
            for tier in tiers:
                metrics.time_to_first_token.labels(tier).observe(0.2)
                metrics.time_per_output_token.labels(tier).observe(0.05)
                for met in ("true", "false"):
                    metrics.sla.labels(tier, "timeToFirstToken", met).inc()
                metrics.requests.labels(tier, "completed").inc()
            reuse = {tier: working_set(self.references if tier == tiers[-1] else 0.0) for tier in tiers}
            metrics.registry.register(WorkingSetCollector(lambda: reuse))
            metrics.registry.register(LedgerCollector(lambda: status_of(view).ledger))
            self._pages[key] = metrics.page()
        return self._pages[key]


def working_set(references: float) -> TierWorkingSet:
    """Seven in ten references come back, half of them within a third of the cache."""
    reach = 1.2 * CAPACITY
    counts = [references * 0.7 * min(1.0, (bound / reach) ** 0.5) for bound in BOUNDS]
    return TierWorkingSet((*counts, references), references * reach / 2, 0.05)


def status_of(view: wire.View | None) -> wire.PoolStatus:
    tiers = [] if view is None else view.tiers
    accounts = {
        tier.name: wire.TierLedger(
            nominal=CAPACITY * tier.quota.nominal_percent // 100,
            effective=CAPACITY * tier.effective_percent // 100,
            limit=CAPACITY,
            held=40,
            cached=200,
            lapsed=10,
            borrowed=0,
            lent=0,
            slots=wire.Slots(nominal=8, running=1),
            evicted_total=1000,
            reclaimed_total=10,
            preempted_total=1,
            hit_tokens_total=100_000,
            query_tokens_total=200_000,
        )
        for tier in tiers
    }
    ledger = wire.Ledger(
        sequence=1,
        revision=None if view is None else view.revision,
        block_size=16,
        bytes_per_token=46_080,
        capacity=CAPACITY,
        free=CAPACITY - 240 * len(accounts),
        public=wire.PublicLedger(0, 0, 0, {}),
        tiers=accounts,
        running=len(accounts),
        waiting=0,
    )
    figures = wire.TierFigures(
        queue=0, requests=100, hit_percent=50.0, time_to_first_token_p95=0.2, attainment_percent=99.0
    )
    return wire.PoolStatus(
        applied=None if view is None else view.revision,
        capacity=CAPACITY,
        ledger=ledger,
        tiers=dict.fromkeys(accounts, figures),
        enforcement=wire.Enforcement.ENGINE,
        conditions=(),
        key_algorithm="stand-in",
    )


class Kubelet:
    """Says of every pod of its node that it is ready, once its sidecar answers."""

    def __init__(self, api: aiohttp.ClientSession, sidecars: Sidecars) -> None:
        self._api = api
        self._sidecars = sidecars
        self._known: set[str] = set()  # uids
        self._writers = asyncio.Semaphore(_WRITERS)

    async def run(self) -> None:
        await self._register()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew())
            async for pod in self._pods():
                if pod["metadata"]["uid"] not in self._known and not pod["metadata"].get("deletionTimestamp"):
                    self._known.add(pod["metadata"]["uid"])
                    tasks.create_task(self._start(pod))

    async def _register(self) -> None:
        now = _stamp()
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": now, "lastTransitionTime": now}
        status = {"capacity": _ROOM, "allocatable": _ROOM, "conditions": [{**ready, "reason": "Bench", "message": ""}]}
        await self._write("POST", "/api/v1/nodes", {"metadata": {"name": NODE}, "status": status})

    async def _renew(self) -> None:
        """A node whose Lease is old is given up."""
        path, spec = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", {"holderIdentity": NODE}
        await self._write("POST", path, {"metadata": {"name": NODE}, "spec": {**spec, "renewTime": _micro_stamp()}})
        while True:
            await asyncio.sleep(_LEASE_SECONDS)
            await self._write("PATCH", f"{path}/{NODE}", {"spec": {"renewTime": _micro_stamp()}})

    async def _start(self, pod: Mapping[str, Any]) -> None:
        metadata = pod["metadata"]
        async with self._writers:
            address = await self._sidecars.begin(metadata["name"])
            path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
            await self._write("PATCH", path, {"status": pod_status(pod, True, address)})

    async def _pods(self) -> AsyncIterator[Mapping[str, Any]]:
        query = {"watch": "true", "fieldSelector": f"spec.nodeName={NODE}"}
        while True:
            async with self._api.get("/api/v1/pods", params=query) as answer:
                rest = b""
                async for part in answer.content.iter_any():
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        yield json.loads(line)["object"]

    async def _write(self, method: str, path: str, body: Any) -> None:
        kind = {"Content-Type": MERGE_PATCH if method == "PATCH" else "application/json"}
        async with self._api.request(method, path, json=body, headers=kind) as answer:
            if answer.status >= 400:
                raise RuntimeError(f"{method} {path}: {answer.status} {await answer.text()}")


def _stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _micro_stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def control(sidecars: Sidecars) -> web.Application:
    """What the benchmark tells and asks."""

    async def behave(request: web.Request) -> web.Response:
        told = await request.json()
        for address, sidecar in sidecars.by_address.items():
            pod = sidecars.pod_of[address]
            sidecar.silent, sidecar.slow = pod in told["silent"], told["slow"].get(pod, 0.0)
        sidecars.references = told["references"]
        return web.Response()

    async def asked(request: web.Request) -> web.Response:
        read = {sidecars.pod_of[address]: sidecar.read for address, sidecar in sidecars.by_address.items()}
        return web.json_response(read)

    app = web.Application()
    app.router.add_put("/behaviour", behave)
    app.router.add_get("/asked", asked)
    return app


async def serve(kubeconfig: Path) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    credentials, sidecars = Credentials.load(kubeconfig), Sidecars()
    scheme, token = credentials.authorization or ("", "")
    headers = {"Authorization": f"{scheme} {token}"}
    tls = credentials.tls()
    connector = aiohttp.TCPConnector(ssl=True if tls is None else tls, limit=_WRITERS + 4)
    forever = aiohttp.ClientTimeout(total=None)
    runner = web.AppRunner(control(sidecars), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        async with aiohttp.ClientSession(
            f"{credentials.server}/", headers=headers, connector=connector, timeout=forever
        ) as api:
            work = asyncio.create_task(Kubelet(api, sidecars).run())
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            for task in (work, stopping):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
    finally:
        await runner.cleanup()
        await sidecars.end()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kubeconfig", type=Path, required=True)
    uvloop.run(serve(parser.parse_args().kubeconfig))
