"""Watches, by kopf: every change is told to the loop, which decides what it means. Nothing else of kopf is used.

All are event handlers, which keep no state: kopf writes no annotation, no finalizer and no status into any object, and
a restart is no change. A stream that breaks, goes silent or is told 410 is listed and begun anew by kopf; one that
fails for good ends `watch` with its error, and the process with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, Protocol

import kopf

from cacheaware_operator.cluster.names import POOL_LABEL
from cacheaware_operator.kinds import CONFIG_MAP, POOL, SECRET, Kind, Object
from cacheaware_operator.kubernetes_credentials import Credentials

# The server ends a stream after this time, which costs nothing; the client takes one that lasts longer for broken.
_SERVER_SECONDS, _CLIENT_SECONDS = 240, 270
# Types of Secrets that hold nobody's API keys, and of which there are many.
_OTHER_SECRETS = "type!=helm.sh/release.v1,type!=kubernetes.io/service-account-token"


class Loop(Protocol):
    @property
    def kinds(self) -> tuple[Kind, ...]: ...

    def saw(self, kind: Kind, written: Object, *, gone: bool) -> None: ...


async def watch(
    loop: Loop, credentials: Credentials, namespaces: Collection[str], stop: asyncio.Event, ready: asyncio.Event
) -> None:
    """Until `stop`, or until a watch fails for good, with its error."""
    await kopf.operator(
        registry=_registry(loop, credentials),
        settings=_settings(loop.kinds),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=list(namespaces),
        stop_flag=stop,
        ready_flag=ready,
    )


def _registry(loop: Loop, credentials: Credentials) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**_: Any) -> kopf.ConnectionInfo:
        return _connection(credentials)

    for kind in loop.kinds:
        _on_change(registry, loop, kind)
    return registry


def _on_change(registry: kopf.OperatorRegistry, loop: Loop, kind: Kind) -> None:
    @kopf.on.event(*_name(kind), registry=registry, id=f"{kind.plural}.{kind.group}")
    async def changed(event: kopf.RawEvent, **_: Any) -> None:
        loop.saw(kind, event["object"], gone=event["type"] == "DELETED")


def _settings(kinds: Collection[Kind]) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
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
