"""Watches that break: a server that says 410, closes streams or refuses them; and lists that catch what was missed."""

import asyncio
import getpass
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from cacheaware_operator.handlers import watch
from cacheaware_operator.kinds import POOL, SECRET, Kind, Object
from cacheaware_operator.kubernetes_credentials import Credentials

GROUPS: Mapping[str, list[tuple[str, str, bool]]] = {
    "v1": [("namespaces", "Namespace", False), ("events", "Event", True), ("secrets", "Secret", True)],
    "apiextensions.k8s.io/v1": [("customresourcedefinitions", "CustomResourceDefinition", False)],
    "cacheaware.dev/v1alpha1": [("cacheawarepools", "CacheAwarePool", True)],
}

Stream = Callable[[web.StreamResponse], Any]  # what a watch does once it is open


def pool(name: str, version: int) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"apiVersion": "cacheaware.dev/v1alpha1", "kind": "CacheAwarePool", "metadata": metadata, "spec": {}}


class ApiServer:
    """As much of one as a watch needs. Pools are listed as they are; each watch of pools does the next of `streams`."""

    def __init__(self) -> None:
        self.pools: list[dict[str, Any]] = []
        self.streams: list[Stream] = []
        self.writes: list[str] = []
        self.seen: list[Mapping[str, str]] = []  # queries of watches of pools
        self._version = 10

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/api", self._core)
        app.router.add_get("/apis", self._groups)
        for name in GROUPS:
            path = f"/api/{name}" if name == "v1" else f"/apis/{name}"
            app.router.add_get(path, self._resources(name))
        app.router.add_get("/apis/cacheaware.dev/v1alpha1/cacheawarepools", self._pools)
        app.router.add_get("/api/v1/secrets", self._secrets)
        app.router.add_route("*", "/{path:.*}", self._other)
        return app

    async def _core(self, request: web.Request) -> web.Response:
        return web.json_response({"versions": ["v1"]})

    async def _groups(self, request: web.Request) -> web.Response:
        groups = []
        for name in GROUPS:
            if "/" in name:
                version = {"groupVersion": name, "version": name.split("/")[1]}
                groups.append({"name": name.split("/")[0], "versions": [version], "preferredVersion": version})
        return web.json_response({"groups": groups})

    def _resources(self, name: str) -> Callable[[web.Request], Any]:
        async def answer(request: web.Request) -> web.Response:
            verbs = ["list", "watch", "get", "patch"]
            resources = [
                {"name": plural, "singularName": kind.lower(), "kind": kind, "namespaced": scoped, "verbs": verbs}
                for plural, kind, scoped in GROUPS[name]
            ]
            return web.json_response({"groupVersion": name, "resources": resources})

        return answer

    async def _pools(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response({"items": self.pools, "metadata": {"resourceVersion": str(self._version)}})
        self.seen.append(dict(request.query))
        response = web.StreamResponse()
        await response.prepare(request)
        if self.streams:
            await self.streams.pop(0)(response)
        else:
            await asyncio.sleep(60)
        return response

    async def _secrets(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response({"items": [], "metadata": {"resourceVersion": "1"}})
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(60)
        return response

    async def _other(self, request: web.Request) -> web.Response:
        self.writes.append(f"{request.method} {request.path}")
        return web.json_response({"message": "not there"}, status=404)


async def send(response: web.StreamResponse, type_: str, written: Object) -> None:
    await response.write(json.dumps({"type": type_, "object": written}).encode() + b"\n")


class Told:
    """The loop that watches tell."""

    kinds: tuple[Kind, ...] = (POOL, SECRET)

    def __init__(self) -> None:
        self.names: list[tuple[str, bool]] = []
        self._news = asyncio.Event()

    def saw(self, kind: Kind, written: Object, *, gone: bool) -> None:
        self.names.append((written["metadata"]["name"], gone))
        self._news.set()

    async def wait_for(self, name: str, *, gone: bool = False) -> None:
        while (name, gone) not in self.names:
            self._news.clear()
            async with asyncio.timeout(60):
                await self._news.wait()


@pytest.fixture
def api() -> ApiServer:
    return ApiServer()


@pytest.fixture
async def credentials(api: ApiServer, tmp_path: Path) -> AsyncIterator[Credentials]:
    async with TestServer(api.app(), host="127.0.0.1") as server:
        kubeconfig = tmp_path / "kubeconfig"
        config = {
            "clusters": [{"name": "c", "cluster": {"server": str(server.make_url("")).rstrip("/")}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        kubeconfig.write_text(yaml.safe_dump(config))
        yield Credentials.load(kubeconfig)


@pytest.fixture
async def told(api: ApiServer, credentials: Credentials) -> AsyncIterator[Told]:
    told = Told()
    watching = asyncio.create_task(watch(told, credentials, ()))
    yield told
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_what_is_there_and_what_changes_is_told(api: ApiServer, told: Told) -> None:
    async def change(response: web.StreamResponse) -> None:
        await send(response, "ADDED", pool("new", 11))
        await send(response, "DELETED", pool("old", 12))
        await asyncio.sleep(60)

    api.pools, api.streams = [pool("old", 1)], [change]
    await told.wait_for("old")
    await told.wait_for("new")
    await told.wait_for("old", gone=True)
    assert {"allowWatchBookmarks", "timeoutSeconds", "resourceVersion"} <= set(api.seen[0])
    assert api.writes == []  # no annotation, no status, no Event, no peering


@pytest.fixture
def nameless_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, whose user is a number."""

    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 65532")

    monkeypatch.setattr(getpass, "getuser", unknown)


async def test_a_user_without_a_name_may_watch(nameless_user: None, api: ApiServer, told: Told) -> None:
    api.pools = [pool("chat", 1)]
    await told.wait_for("chat")


async def test_a_stream_that_is_too_old_is_listed_anew(api: ApiServer, told: Told) -> None:
    async def too_old(response: web.StreamResponse) -> None:
        api.pools = [pool("missed", 20)]
        await send(response, "ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})

    api.streams = [too_old]
    await told.wait_for("missed")


async def test_a_stream_that_breaks_goes_on_where_it_was(api: ApiServer, told: Told) -> None:
    async def breaks(response: web.StreamResponse) -> None:
        await send(response, "ADDED", pool("before", 11))
        await told.wait_for("before")
        assert response._req is not None
        assert response._req.transport is not None
        response._req.transport.abort()

    async def goes_on(response: web.StreamResponse) -> None:
        await send(response, "ADDED", pool("after", 12))
        await asyncio.sleep(60)

    api.streams = [breaks, goes_on]
    await told.wait_for("after")
    assert api.seen[1]["resourceVersion"] == "11"


async def test_a_watch_that_fails_for_good_ends_with_its_error(api: ApiServer, credentials: Credentials) -> None:
    async def broken(response: web.StreamResponse) -> None:
        await send(response, "ERROR", {"kind": "Status", "code": 500, "message": "etcd is gone"})

    api.streams = [broken]
    with pytest.raises(Exception, match="etcd is gone"):
        async with asyncio.timeout(60):
            await watch(Told(), credentials, ())
