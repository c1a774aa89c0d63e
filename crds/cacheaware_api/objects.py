"""A file with one pool and what it refers to: its Secrets and ConfigMaps, as `kubectl apply -f` would take it.

What a reference names must be in the file, because a pool that runs from a file has nowhere else to look. A file for a
cluster may leave it to the cluster: it is then listed as expected there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

from pydantic import ValidationError

from cacheaware_api import errors, v1alpha1, wire
from cacheaware_api.api_keys import read_api_keys
from cacheaware_api.data_objects import ConfigMap, Secret, label, parse_data_object
from cacheaware_api.errors import ObjectInvalid, Problem, shown
from cacheaware_api.gateway_secrets import read_gateway_secrets
from cacheaware_api.rules import Path
from cacheaware_api.schema import LEAVE_OUT
from cacheaware_api.v1alpha1 import CacheAwarePool
from cacheaware_api.yaml_documents import Document, documents

DEFAULT_NAMESPACE = "default"

_Parsed: TypeAlias = CacheAwarePool | Secret | ConfigMap


@dataclasses.dataclass(frozen=True, slots=True)
class PoolFile:
    """A pool that can be run: everything it refers to is there and can be read, or is in `elsewhere`."""

    pool: CacheAwarePool
    namespace: str
    secrets: Mapping[str, Secret]
    config_maps: Mapping[str, ConfigMap]
    api_keys: wire.ApiKeys  # none with an open identity
    public_prefixes: tuple[wire.ViewPrefix, ...]  # with their texts, from ConfigMaps too
    elsewhere: tuple[str, ...] = ()  # objects that the pool refers to and that are not in the file, in words


def read_pool_file(content: bytes, *, for_cluster: bool = False) -> PoolFile:
    """Read the bytes of a file; raises `ObjectInvalid` with every problem in all of its documents.

    `for_cluster`: that something is not in the file is no problem.
    """
    problems: list[Problem] = []
    pools: list[tuple[Document, CacheAwarePool]] = []
    others: list[tuple[Document, Secret | ConfigMap]] = []
    seen_pool = 0
    for document in documents(content):
        seen_pool += isinstance(document.data, dict) and document.data.get("kind") == v1alpha1.KIND
        try:
            parsed = _parse(document)
        except ObjectInvalid as error:
            problems += error.problems
            continue
        if isinstance(parsed, CacheAwarePool):
            pools.append((document, parsed))
        else:
            others.append((document, parsed))
    if seen_pool != 1:
        fix = "add one" if seen_pool == 0 else "keep one, and put the others in files of their own"
        problems.append(Problem("the file", f"must hold exactly one {v1alpha1.KIND}, and holds {seen_pool}", fix))
    if seen_pool != 1 or not pools:
        raise ObjectInvalid(problems)
    ((document, pool),) = pools
    namespace = pool.metadata.namespace or DEFAULT_NAMESPACE
    problems += _misplaced(namespace, others)
    secrets = {each.metadata.name: each for _, each in others if isinstance(each, Secret)}
    config_maps = {each.metadata.name: each for _, each in others if isinstance(each, ConfigMap)}
    references = _References(document, secrets, config_maps, for_cluster)
    api_keys = references.api_keys(pool)
    prefixes = references.public_prefixes(pool)
    references.check_rest(pool)
    problems += references.problems
    if problems:
        raise ObjectInvalid(problems)
    return PoolFile(
        pool=pool,
        namespace=namespace,
        secrets=MappingProxyType(secrets),
        config_maps=MappingProxyType(config_maps),
        api_keys=api_keys,
        public_prefixes=prefixes,
        elsewhere=tuple(dict.fromkeys(references.elsewhere)),
    )


def _parse(document: Document) -> _Parsed:
    where = f"document {document.number}"
    if not isinstance(document.data, dict):
        message = f"must be an object, not {shown(document.data)}"
        raise ObjectInvalid([Problem(where, message, line=document.line())])
    missing = [field for field in ("apiVersion", "kind") if field not in document.data]
    if missing:
        raise ObjectInvalid(Problem(f"{where}: {field}", "is missing", "add it", document.line()) for field in missing)
    match document.data["kind"]:
        case v1alpha1.KIND:
            return _pool(document)
        case "Secret":
            return parse_data_object(Secret, document)
        case "ConfigMap":
            return parse_data_object(ConfigMap, document)
        case kind:
            message = f"must be {v1alpha1.KIND}, Secret or ConfigMap, not {shown(kind)}"
            raise ObjectInvalid([Problem(f"{where}: kind", message, "remove the document", document.line(("kind",)))])


def _pool(document: Document) -> CacheAwarePool:
    # `kubectl get -o yaml` prints the status too, and an API server passes over it in what is applied
    written = {field: value for field, value in document.data.items() if field != "status"}
    try:
        return CacheAwarePool.model_validate(written)
    except ValidationError as error:
        raise ObjectInvalid(errors.problems(error, CacheAwarePool, line_of=document.line)) from None


def _misplaced(namespace: str, others: list[tuple[Document, Secret | ConfigMap]]) -> list[Problem]:
    found: list[Problem] = []
    seen: set[tuple[str, str]] = set()
    for document, each in others:
        own = each.metadata.namespace or DEFAULT_NAMESPACE
        if own != namespace:
            message = f"is {own}, and the pool is in {namespace}"
            line = document.line(("metadata", "namespace"))
            found.append(Problem(f"{label(each)}: metadata.namespace", message, "put both in one namespace", line))
        if (each.kind, each.metadata.name) in seen:
            found.append(Problem(label(each), "is in the file twice", "remove one of them", document.line()))
        seen.add((each.kind, each.metadata.name))
    return found


class _References:
    """Follows what a pool refers to, and collects what leads nowhere, or to a cluster."""

    def __init__(
        self,
        document: Document,
        secrets: Mapping[str, Secret],
        config_maps: Mapping[str, ConfigMap],
        for_cluster: bool,
    ) -> None:
        self.problems: list[Problem] = []
        self.elsewhere: list[str] = []
        self._for_cluster = for_cluster
        self._document = document
        self._secrets = secrets
        self._config_maps = config_maps
        self._entries: dict[str, Mapping[str, bytes] | None] = {}

    def api_keys(self, pool: CacheAwarePool) -> wire.ApiKeys:
        if pool.spec.identity.trusted_headers is not None:
            return wire.ApiKeys((), self._gateways(pool.spec.identity.trusted_headers.secret_ref.name))
        source = pool.spec.identity.api_keys
        if source is None:
            return wire.ApiKeys(())
        entries = self._secret(source.secret_ref.name, ("spec", "identity", "apiKeys", "secretRef", "name"))
        if entries is None:
            return wire.ApiKeys(())
        try:
            return read_api_keys(source.secret_ref.name, entries, [tier.name for tier in pool.spec.tiers])
        except ObjectInvalid as error:
            self.problems += error.problems
            return wire.ApiKeys(())

    def _gateways(self, name: str) -> tuple[wire.GatewaySecret, ...]:
        entries = self._secret(name, ("spec", "identity", "trustedHeaders", "secretRef", "name"))
        try:
            return read_gateway_secrets(name, entries or {})
        except ObjectInvalid as error:
            self.problems += error.problems
            return ()

    def public_prefixes(self, pool: CacheAwarePool) -> tuple[wire.ViewPrefix, ...]:
        found = []
        for index, prefix in enumerate(pool.spec.public_prefixes):
            text = prefix.text
            if reference := prefix.config_map_key_ref:
                path = ("spec", "publicPrefixes", index, "configMapKeyRef")
                text = self._config_entry(reference.name, reference.key, path)
                if text == "":
                    self._add((*path, "key"), f"{reference.key} of ConfigMap {reference.name} is empty", LEAVE_OUT)
            if text:
                found.append(wire.ViewPrefix(prefix.name, text))
        return tuple(found)

    def check_rest(self, pool: CacheAwarePool) -> None:
        """References whose content only the engine reads."""
        for index, variable in enumerate(pool.spec.engine.env):
            path = ("spec", "engine", "env", index, "valueFrom")
            if variable.value_from is None:
                continue
            if (secret := variable.value_from.secret_key_ref) and not secret.optional:
                entries = self._secret(secret.name, (*path, "secretKeyRef", "name"))
                if entries is not None and secret.key not in entries:
                    self._add(
                        (*path, "secretKeyRef", "key"), f"Secret {secret.name} has no entry {secret.key}", "add it"
                    )
            if (config := variable.value_from.config_map_key_ref) and not config.optional:
                self._config_entry(config.name, config.key, (*path, "configMapKeyRef"))

    def _secret(self, name: str, path: Path) -> Mapping[str, bytes] | None:
        if name not in self._secrets:
            self._missing("Secret", name, path)
            return None
        if name not in self._entries:  # its problems are told once, however many refer to it
            try:
                self._entries[name] = self._secrets[name].entries
            except ObjectInvalid as error:
                self.problems += error.problems
                self._entries[name] = None
        return self._entries[name]

    def _config_entry(self, name: str, key: str, path: Path) -> str | None:
        if name not in self._config_maps:
            self._missing("ConfigMap", name, (*path, "name"))
        elif key not in self._config_maps[name].data:
            self._add((*path, "key"), f"ConfigMap {name} has no entry {key}", "add it under data")
        else:
            return self._config_maps[name].data[key]
        return None

    def _missing(self, kind: str, name: str, path: Path) -> None:
        if self._for_cluster:
            self.elsewhere.append(f"{kind} {name} ({errors.path_text(path)})")
        else:
            self._add(path, f"{kind} {name} is not in the file", "add it")

    def _add(self, path: Path, message: str, fix: str) -> None:
        self.problems.append(Problem(errors.path_text(path), message, fix, self._document.line(path)))
