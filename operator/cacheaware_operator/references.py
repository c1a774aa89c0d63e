"""What a pool object refers to: the Secret with API keys or gateways, the ConfigMaps with public prefixes. Pure.

`read_pool` makes a `Wanted` of an object as the API server has it, or says as `PoolBlocked` what its author has to do.
What only the engine reads (variables from Secrets) is the kubelet's to find.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cacheaware_api import wire
from cacheaware_api.api_keys import read_api_keys
from cacheaware_api.conditions import Reason
from cacheaware_api.errors import ObjectInvalid
from cacheaware_api.gateway_secrets import read_gateway_secrets
from cacheaware_api.v1alpha1 import CacheAwarePoolSpec, parse_spec
from cacheaware_operator.errors import PoolBlocked
from cacheaware_operator.kinds import CONFIG_MAP, SECRET, Kind, Object
from cacheaware_operator.plan import Wanted


@dataclass(frozen=True, slots=True)
class Reference:
    kind: Kind
    name: str
    path: str  # of the field that refers to it


def references(pool: Object) -> tuple[Reference, ...]:
    """Of an object that may be invalid: a watch must find its pools whatever they look like."""
    return tuple(dict.fromkeys(_references(pool.get("spec") or {})))


def _references(spec: Object) -> Iterator[Reference]:
    for field in ("apiKeys", "trustedHeaders"):
        try:
            name = spec["identity"][field]["secretRef"]["name"]
            yield Reference(SECRET, str(name), f"spec.identity.{field}.secretRef.name")
        except (KeyError, TypeError):
            continue
    prefixes = spec.get("publicPrefixes")
    for index, prefix in enumerate(prefixes if isinstance(prefixes, list) else ()):
        try:
            name = prefix["configMapKeyRef"]["name"]
            yield Reference(CONFIG_MAP, str(name), f"spec.publicPrefixes[{index}].configMapKeyRef.name")
        except (KeyError, TypeError):
            continue


def read_pool(pool: Object, found: Mapping[tuple[Kind, str], Object | None]) -> Wanted:
    """`found` has every object of `references(pool)`, or None where there is none. Raises `PoolBlocked`."""
    metadata = pool["metadata"]
    try:
        spec = parse_spec(pool.get("spec"))
    except ObjectInvalid as error:
        raise PoolBlocked(Reason.INVALID_SPEC, str(error)) from None
    return Wanted(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 1),
        spec=spec,
        api_keys=_api_keys(spec, found),
        prefix_texts=dict(_prefix_texts(spec, found)),
    )


def _api_keys(spec: CacheAwarePoolSpec, found: Mapping[tuple[Kind, str], Object | None]) -> wire.ApiKeys:
    field = "apiKeys" if spec.identity.api_keys is not None else "trustedHeaders"
    source = spec.identity.api_keys or spec.identity.trusted_headers
    if source is None:
        return wire.ApiKeys(())
    name = source.secret_ref.name
    secret = found[SECRET, name]
    if secret is None:
        where = f"spec.identity.{field}.secretRef.name"
        raise PoolBlocked(Reason.SECRET_NOT_FOUND, f"{where}: there is no Secret {name} in the namespace: create it")
    entries = {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}
    try:
        if spec.identity.trusted_headers is not None:
            return wire.ApiKeys((), read_gateway_secrets(name, entries))
        return read_api_keys(name, entries, [tier.name for tier in spec.tiers])
    except ObjectInvalid as error:
        raise PoolBlocked(Reason.SECRET_INVALID, str(error)) from None


def _prefix_texts(
    spec: CacheAwarePoolSpec, found: Mapping[tuple[Kind, str], Object | None]
) -> Iterator[tuple[str, str]]:
    for index, prefix in enumerate(spec.public_prefixes):
        if prefix.text is not None:
            yield prefix.name, prefix.text
            continue
        reference = prefix.config_map_key_ref
        assert reference is not None, "a prefix has a text or a reference"
        where = f"spec.publicPrefixes[{index}].configMapKeyRef"
        config_map = found[CONFIG_MAP, reference.name]
        if config_map is None:
            what = f"{where}.name: there is no ConfigMap {reference.name} in the namespace: create it"
            raise PoolBlocked(Reason.CONFIG_MAP_NOT_FOUND, what)
        text = (config_map.get("data") or {}).get(reference.key)
        if not text:
            what = f"{where}.key: ConfigMap {reference.name} has no text under {reference.key}: add it under data"
            raise PoolBlocked(Reason.CONFIG_MAP_NOT_FOUND, what)
        yield prefix.name, text
