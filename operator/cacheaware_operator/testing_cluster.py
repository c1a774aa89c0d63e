"""An API server and sidecars for tests: real HTTP on loopback, objects in a dictionary, behaviour set by the test.

    async with FakeCluster() as there:
        there.put(POD, {...})                       # as somebody else would
        fleet = KubernetesFleet(there.cluster(), ...)
        there.writes                                # "PATCH deployments/chat", in order

It knows resource versions, uids, generations, lists in pages, label selectors, merge and apply patches, the status
subresource, preconditions of a deletion, and fields that another manager has. It checks no schema, keeps no managed
fields and has no watches: those need a real API server.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes import client

from cacheaware_api import wire
from cacheaware_operator.cluster.images import Images
from cacheaware_operator.cluster_store import ClusterStore
from cacheaware_operator.drift import merge_patch
from cacheaware_operator.kinds import Kind, Object
from cacheaware_operator.kubernetes_api import APPLY, KubernetesApi
from cacheaware_operator.kubernetes_credentials import Credentials
from cacheaware_operator.kubernetes_fleet import Cluster
from cacheaware_operator.sidecars import Sidecars

TOKEN = "the-operator's"
_SIDECARS = "/sidecars"


@dataclass
class FakeSidecar:
    """Of one pod; its engine acknowledges a view when `acknowledges` is true."""

    view: wire.View | None = None
    acknowledges: bool = True
    gone: bool = False  # answers 503 as a proxy before nobody would
    refuses: str | None = None  # a view, with these words
    told: list[int] = field(default_factory=list)  # numbers of views
    page: str = ""
    capacity: int = 1000
    held: int = 0  # blocks, of each tier

    def status(self) -> wire.PoolStatus:
        view = self.view if self.acknowledges else None
        revision = None if view is None else view.revision
        account = wire.TierLedger(0, 0, 0, self.held, 0, 0, 0, 0, wire.Slots(1, 0), 0, 0, 0, 0, 0)
        accounts = {tier.name: account for tier in (() if view is None else view.tiers)}
        public = wire.PublicLedger(0, 0, 0, {})
        ledger = wire.Ledger(1, revision, 16, 100, self.capacity, self.capacity, public, accounts, 0, 0)
        figures = {name: wire.TierFigures(queue=0, requests=0) for name in accounts}
        return wire.PoolStatus(revision, self.capacity, ledger, figures, wire.Enforcement.ENGINE, (), "fake")


class FakeCluster:
    """Serves while it is entered."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.objects: dict[str, dict[str, Any]] = {}  # by path
        self.writes: list[str] = []
        self.reads: list[str] = []
        self.headers: list[Mapping[str, str]] = []
        self.refusals: dict[str, tuple[int, Any]] = {}  # by "METHOD path": answered once each time
        self.foreign: dict[str, tuple[str, str]] = {}  # by path: manager and dotted field that applying may not change
        self.documents: dict[str, Any] = {}  # by path: what is no object, such as a schema
        self.page_size: int | None = None  # smaller than what is asked for
        self.broken = False  # closes connections without an answer
        self.sidecars: dict[str, FakeSidecar] = {}
        self._clock = clock
        self._request = asyncio.Event()  # anew for each
        self._version = 100
        self._created = 0

    # -- what a test does ----------------------------------------------------------------------------------------------

    def put(self, kind: Kind, written: Object) -> dict[str, Any]:
        """Create or replace it, as somebody else. It is returned as it is there."""
        metadata = written["metadata"]
        path = kind.path(metadata.get("namespace", "default"), metadata["name"])
        return self._store(path, copy.deepcopy(dict(written)))

    def find(self, kind: Kind, name: str, namespace: str = "default") -> dict[str, Any] | None:
        found = self.objects.get(kind.path(namespace, name))
        return None if found is None else copy.deepcopy(found)

    def remove(self, kind: Kind, name: str, namespace: str = "default") -> None:
        del self.objects[kind.path(namespace, name)]

    async def is_read(self, path: str, times: int) -> None:
        """Wait until it was asked for so often, in all."""
        async with asyncio.timeout(60):
            while self.reads.count(path) < times:
                self._request.clear()
                await self._request.wait()

    def sidecar(self, pod: str) -> FakeSidecar:
        return self.sidecars.setdefault(pod, FakeSidecar())

    def cluster(self, operator_namespace: str | None = None) -> Cluster:
        """Through which an operator acts on it."""
        return Cluster(
            api=self.api,
            store=ClusterStore(),
            sidecars=Sidecars(self._session, self.clock, self._address_of),
            images=Images(engine="example.com/engine:1", sidecar="example.com/sidecar:1"),
            operator_namespace=operator_namespace,
            clock=self.clock,
        )

    @property
    def clock(self) -> Callable[[], float]:
        return self._clock or asyncio.get_running_loop().time

    # -- serving -------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", _SIDECARS + "/{pod}/{path:.*}", self._sidecar)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._server = TestServer(app, host="127.0.0.1")
        await self._server.start_server()
        self._session = aiohttp.ClientSession()
        configuration = client.Configuration()
        configuration.host = str(self._server.make_url("")).rstrip("/")
        configuration.api_key = {"authorization": f"Bearer {TOKEN}"}
        self.api = KubernetesApi(self._session, Credentials(configuration))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()
        await self._server.close()

    def _address_of(self, pod: Object) -> str | None:
        if not pod["status"].get("podIP"):
            return None
        return str(self._server.make_url(f"{_SIDECARS}/{pod['metadata']['name']}"))

    async def _sidecar(self, request: web.Request) -> web.Response:
        sidecar = self.sidecar(request.match_info["pod"])
        if sidecar.gone:
            return web.json_response({"error": {"message": "gone"}}, status=503)
        match request.method, request.match_info["path"]:
            case "PUT", "pool/view":
                view = wire.from_json(wire.View, await request.json())
                sidecar.told.append(view.revision.number)
                if sidecar.refuses is not None:
                    return web.json_response({"error": {"message": sidecar.refuses}}, status=422)
                sidecar.view = view
                return web.json_response({"revision": wire.to_json(view.revision)})
            case "GET", "metrics":
                return web.Response(text=sidecar.page)
            case _:
                return web.json_response(wire.to_json(sidecar.status()))

    async def _answer(self, request: web.Request) -> web.Response:
        self._request.set()
        if request.method == "GET":
            self.reads.append(request.path)
        if self.broken:
            assert request.transport is not None
            request.transport.close()
        self.headers.append(dict(request.headers))
        what = f"{request.method} {request.path}"
        short = f"{request.method} {'/'.join(request.path.removesuffix('/status').split('/')[-2:])}"
        if request.method != "GET":
            self.writes.append(f"{short}/status" if request.path.endswith("/status") else short)
        if what in self.refusals:
            status, body = self.refusals[what]
            return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body))
        if request.path in self.documents:
            return web.json_response(self.documents[request.path])
        match request.method:
            case "GET":
                return self._get(request)
            case "PATCH":
                return await self._patch(request)
            case "DELETE":
                return await self._delete(request)
            case _:
                return await self._write(request)

    def _get(self, request: web.Request) -> web.Response:
        if request.path in self.objects:
            return web.json_response(self.objects[request.path])
        if not request.path.split("/")[-1].endswith("s") or request.path.split("/")[-2] not in (
            "v1",
            "v1alpha1",
            *self._namespaces(),
        ):
            return _refusal(404, "NotFound", f"{request.path} not found")
        return self._list(request)

    def _namespaces(self) -> set[str]:
        return {each["metadata"].get("namespace", "default") for each in self.objects.values()} | {"default"}

    def _list(self, request: web.Request) -> web.Response:
        plural, selector = request.path.rsplit("/", 1)[1], request.query.get("labelSelector", "")
        scoped = "/namespaces/" in request.path
        found = [
            each
            for path, each in sorted(self.objects.items())
            if path.split("/")[-2] == plural
            and (not scoped or path.startswith(request.path + "/"))
            and (not selector or selector in (each["metadata"].get("labels") or {}))
        ]
        begin, size = int(request.query.get("continue", 0)), int(request.query["limit"])
        size = min(size, self.page_size or size)
        metadata = {"resourceVersion": str(self._version)}
        if begin + size < len(found):
            metadata["continue"] = str(begin + size)
        return web.json_response({"items": found[begin : begin + size], "metadata": metadata})

    async def _patch(self, request: web.Request) -> web.Response:
        body, path = await request.json(), request.path.removesuffix("/status")
        known = self.objects.get(path)
        if request.content_type == APPLY:
            if (conflict := self._conflict(path, body)) is not None:
                return conflict
        elif known is None:
            return _refusal(404, "NotFound", f"{path} not found")
        status = 201 if known is None else 200
        return web.json_response(self._store(path, _merged(known or {}, body)), status=status)

    def _conflict(self, path: str, body: Any) -> web.Response | None:
        if path not in self.foreign:
            return None
        manager, field_path = self.foreign[path]
        there, ours = self.objects[path], body
        for name in field_path.split("."):
            if name not in ours:
                return None
            there, ours = there.get(name, {}), ours[name]
        if there == ours:
            return None
        cause = {"reason": "FieldManagerConflict", "message": f'conflict with "{manager}" using v1'}
        details = {"causes": [{**cause, "field": f".{field_path}"}]}
        return _refusal(409, "Conflict", "Apply failed with 1 conflict", details)

    async def _delete(self, request: web.Request) -> web.Response:
        known = self.objects.get(request.path)
        if known is None:
            return _refusal(404, "NotFound", f"{request.path} not found")
        wanted = (await request.json()).get("preconditions", {}).get("uid")
        if wanted not in (None, known["metadata"]["uid"]):
            return _refusal(409, "Conflict", "Precondition failed: UID")
        return web.json_response(self.objects.pop(request.path))

    async def _write(self, request: web.Request) -> web.Response:
        body = await request.json()
        path = request.path
        if request.method == "POST":
            self._created += 1
            metadata = body["metadata"]
            metadata.setdefault("name", f"{metadata.get('generateName', '')}{self._created}")
            path = f"{path}/{metadata['name']}"
        return web.json_response(self._store(path, body))

    def _store(self, path: str, written: dict[str, Any]) -> dict[str, Any]:
        """What is the same as before keeps its version, as with a real one."""
        known = self.objects.get(path)
        metadata = written.setdefault("metadata", {})
        if known is None:
            self._created += 1
            metadata.setdefault("uid", f"uid-{self._created}")
            metadata.setdefault("generation", 1)
        else:
            metadata.setdefault("uid", known["metadata"]["uid"])
            changed = known.get("spec") != written.get("spec")
            metadata["generation"] = known["metadata"].get("generation", 1) + changed
            metadata["resourceVersion"] = known["metadata"]["resourceVersion"]
            if not merge_patch(known, written):
                return known
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        self.objects[path] = written
        return written


def _merged(known: Any, patch: Any) -> Any:
    """As a JSON merge patch, which is also what applying comes to where nobody else has a field."""
    if not isinstance(known, Mapping) or not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    merged = copy.deepcopy(dict(known))
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name, {}), value)
    return merged


def _refusal(status: int, reason: str, message: str, details: Any = None) -> web.Response:
    return web.json_response({"reason": reason, "message": message, "details": details or {}}, status=status)


def pod_of(pool: str, name: str, *, ready: bool = True, ip: str | None = "127.0.0.1") -> dict[str, Any]:
    """A pod as its kubelet tells of it."""
    running = {"name": "engine", "ready": ready, "started": True, "restartCount": 0, "state": {"running": {}}}
    status: dict[str, Any] = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        "containerStatuses": [running],
        "initContainerStatuses": [{**running, "name": "sidecar"}],
    }
    if ip is not None:
        status["podIP"] = ip
    labels = {"cacheaware.dev/pool": pool}
    return {"metadata": {"name": name, "namespace": "default", "labels": labels}, "status": status}
