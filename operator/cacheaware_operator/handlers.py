"""Watches, by kopf: every change is told to the loop, which decides what it means. Nothing else of kopf is used.

All are event handlers, which keep no state: kopf writes no annotation, no finalizer and no status into any object, and
a restart is no change. A stream that breaks, goes silent or is told 410 is listed and begun anew by kopf; one that
fails for good ends `watch` with its error, and the process with it.

kopf has a thread and an event loop to itself: at its end it cancels every task of its loop that is younger than itself,
and in the main thread it would take SIGTERM for its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

import kopf

from cacheaware_operator.cluster.names import POOL_LABEL
from cacheaware_operator.kinds import CONFIG_MAP, POOL, SECRET, Kind, Object
from cacheaware_operator.kubernetes_credentials import Credentials

# The server ends a stream after this time, which costs nothing; the client takes one that lasts longer for broken.
_SERVER_SECONDS, _CLIENT_SECONDS = 240, 270
# Types of Secrets that hold nobody's API keys, and of which there are many.
_OTHER_SECRETS = "type!=helm.sh/release.v1,type!=kubernetes.io/service-account-token"
_CLOSING_SECONDS = 0.25  # TLS connections close on the loop, after aiohttp's session said that it is closed

Saw = Callable[[Kind, Object, bool], None]  # the last: whether it is gone


class _NothingRemembered(kopf.DiffBaseStorage):
    """kopf copies every object, and compares it with what it was, for handlers that we do not have."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Nobody would read it."""


class Loop(Protocol):
    @property
    def kinds(self) -> tuple[Kind, ...]: ...

    def saw(self, kind: Kind, written: Object, *, gone: bool) -> None: ...


async def watch(loop: Loop, credentials: Credentials, namespaces: Collection[str]) -> None:
    """Until cancelled, or until a watch fails for good, with its error. No namespaces: the whole cluster."""
    here = asyncio.get_running_loop()

    news: deque[tuple[Kind, Object, bool]] = deque()

    def tell() -> None:
        try:
            while news:
                kind, written, gone = news.popleft()
                loop.saw(kind, written, gone=gone)
        finally:
            if news:  # one of them was a fault; the others are told all the same
                here.call_soon(tell)

    def saw(kind: Kind, written: Object, gone: bool) -> None:
        news.append((kind, written, gone))
        if len(news) == 1:  # else the loop is woken already, or about to look further
            here.call_soon_threadsafe(tell)

    cancel: concurrent.futures.Future[Callable[[], object]] = concurrent.futures.Future()

    async def operator() -> None:
        own, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancel.set_result(lambda: own.call_soon_threadsafe(task.cancel))
        try:
            await kopf.operator(
                registry=_registry(loop.kinds, saw, credentials),
                settings=_settings(loop.kinds),
                standalone=True,
                # Nobody asks for it; left out it is the user's name, and the users of containers have none.
                identity="cacheaware-operator",  # type: ignore[arg-type]  # of a type that kopf does not show
                clusterwide=not namespaces,
                namespaces=list(namespaces),
            )
        finally:
            await asyncio.sleep(_CLOSING_SECONDS)

    thread = asyncio.create_task(asyncio.to_thread(asyncio.run, operator()))
    try:
        await asyncio.shield(thread)
    except asyncio.CancelledError:
        if not thread.done():
            (await asyncio.wrap_future(cancel))()
            await asyncio.wait({thread})
        raise


def _registry(kinds: Collection[Kind], saw: Saw, credentials: Credentials) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**_: Any) -> kopf.ConnectionInfo:
        return _connection(credentials)

    for kind in kinds:
        _on_change(registry, saw, kind)
    return registry


def _on_change(registry: kopf.OperatorRegistry, saw: Saw, kind: Kind) -> None:
    @kopf.on.event(*_name(kind), registry=registry, id=f"{kind.plural}.{kind.group}")
    async def changed(event: kopf.RawEvent, **_: Any) -> None:
        saw(kind, event["object"], event["type"] == "DELETED")


def _settings(kinds: Collection[Kind]) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.persistence.diffbase_storage = _NothingRemembered()
    settings.posting.enabled = False  # Events are ours to write
    settings.peering.standalone = True  # a Lease decides; peering objects that somebody left are not looked at
    settings.scanning.disabled = True  # needs rights on CRDs and namespaces that nothing else needs
    settings.watching.server_timeout = _SERVER_SECONDS
    settings.watching.client_timeout = _CLIENT_SECONDS
    settings.watching.connect_timeout = 10
    for kind in kinds:
        if kind not in (POOL, SECRET, CONFIG_MAP):  # pools refer to Secrets and ConfigMaps that have no label of ours
            settings.watching.label_selectors[_name(kind)] = POOL_LABEL
    settings.watching.field_selectors[_name(SECRET)] = _OTHER_SECRETS
    return settings


def _name(kind: Kind) -> tuple[str, str, str]:
    return kind.group, kind.version, kind.plural


def _connection(credentials: Credentials) -> kopf.ConnectionInfo:
    scheme, token = credentials.authorization or (None, None)
    certificate, key = credentials.certificate or (None, None)
    return kopf.ConnectionInfo(
        server=credentials.server,
        ca_path=credentials.ca_file,
        insecure=credentials.insecure,
        scheme=scheme,
        token=token,
        certificate_path=certificate,
        private_key_path=key,
    )
