"""Who is calling: the request's headers and the key file become a `Caller`. Pure; leaves the tier to `tiers.py`.

With `APIKeys` only the bearer key counts. With `TrustedHeaders` a gateway tells tenant and tier in headers, and proves
itself with a secret; the client's own `Authorization` is then the gateway's business. With any other type, and without
the proof, nothing reads those headers; none is ever forwarded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from collections.abc import Mapping

from multidict import MultiMapping

from cacheaware_api import wire
from cacheaware_sidecar.errors import BadRequest, Unauthorized

ANONYMOUS = ""  # the tenant of an open pool: fairness has one queue, and sharing by tenant isolates every request

GATEWAY_SECRET = "x-cacheaware-gateway-secret"
TIER = ("x-cacheaware-tier", "x-llm-d-inference-objective")  # ours, and what other gateways call it
TENANT = ("x-cacheaware-tenant", "x-llm-d-inference-fairness-id")
_LONGEST = 253


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """A known caller, or nobody in particular (`Open`)."""

    tenant: str | None  # None: nobody is known
    tiers: frozenset[str] | None  # None: any tier of the view
    default_tier: str | None = None
    key_name: str | None = None  # label of the key, or of the gateway's secret, for logs
    decided_tier: str | None = None  # by a gateway: nothing else counts then
    decided_by: str | None = None  # the header that said it

    @property
    def fair_share(self) -> str:
        return ANONYMOUS if self.tenant is None else self.tenant


OPEN_CALLER = Caller(tenant=None, tiers=None)


class KeyRing:
    """API keys and gateways by their SHA-256. Looking one up takes the same time for every one of the ring."""

    def __init__(self, keys: wire.ApiKeys) -> None:
        self._by_digest: Mapping[str, wire.ApiKey] = {key.sha256: key for key in keys.keys}
        self._gateways = keys.gateways

    def __len__(self) -> int:
        return len(self._by_digest) + len(self._gateways)

    def find(self, key: str) -> wire.ApiKey | None:
        # The dict is keyed by a digest that the caller cannot steer, so where it stops comparing tells nothing.
        digest = _digest(key)
        found = self._by_digest.get(digest)
        if found is None or not hmac.compare_digest(found.sha256, digest):
            return None
        return found

    def gateway(self, secret: str) -> wire.GatewaySecret | None:
        """Every secret is compared, so that the time tells nothing about which one nearly fitted."""
        digest = _digest(secret)
        matches = [each for each in self._gateways if hmac.compare_digest(each.sha256, digest)]
        return matches[0] if matches else None


def identify(
    identity: wire.IdentityType, headers: MultiMapping[str], keys: KeyRing, default_tier: str | None
) -> Caller:
    """The caller behind a request's headers; raises `Unauthorized`, or `BadRequest` for headers of a gateway that make
    no sense. `default_tier` is the pool's: all that a gateway which names no tier can be given.
    """
    match identity:
        case wire.IdentityType.OPEN:
            return OPEN_CALLER
        case wire.IdentityType.API_KEYS:
            return _holder(headers.get("Authorization"), keys)
        case wire.IdentityType.TRUSTED_HEADERS:
            return _vouched_for(headers, keys, default_tier)


def _holder(authorization: str | None, keys: KeyRing) -> Caller:
    scheme, _, key = (authorization or "").strip().partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise Unauthorized("an API key is needed: send it as 'Authorization: Bearer <key>'")
    found = keys.find(key)
    if found is None:
        raise Unauthorized("this API key is not known: check it, or ask the operator of this pool for one")
    return Caller(
        tenant=found.tenant, tiers=frozenset(found.tiers), default_tier=found.default_tier, key_name=found.name
    )


def _vouched_for(headers: MultiMapping[str], keys: KeyRing, default_tier: str | None) -> Caller:
    gateway = keys.gateway(_only(headers, GATEWAY_SECRET) or "")
    if gateway is None:
        raise Unauthorized(
            f"this pool is reached through its gateway, which proves itself with {GATEWAY_SECRET}: call the gateway"
        )
    tenant, _ = _one_of(headers, TENANT)
    tier, said_in = _one_of(headers, TIER)
    # Where the gateway names no tier, a client must not: nobody has said that it may.
    allowed = tier or default_tier
    return Caller(
        tenant=tenant,
        tiers=frozenset() if allowed is None else frozenset({allowed}),
        key_name=gateway.name,
        decided_tier=tier,
        decided_by=said_in,
    )


def _one_of(headers: MultiMapping[str], names: tuple[str, ...]) -> tuple[str | None, str | None]:
    """What a header or its alias says, and which one. Two that disagree mean that one came from somebody else."""
    said = {name: value for name in names if (value := _only(headers, name)) is not None}
    if len(set(said.values())) > 1:
        raise BadRequest(
            f"{' and '.join(said)} disagree: the gateway must set one of them and remove the other", param=names[0]
        )
    for name, value in said.items():
        if len(value) > _LONGEST or not value.isprintable():
            raise BadRequest(f"{name} must be at most {_LONGEST} printable characters", param=name)
        return value, name
    return None, None


def _only(headers: MultiMapping[str], name: str) -> str | None:
    """A header's value; None where it is absent or empty. One that came twice was added to the client's own."""
    values = headers.getall(name, [])
    if len(values) > 1:
        raise BadRequest(f"{name} came {len(values)} times: the gateway must replace what clients send", param=name)
    value = values[0].strip() if values else ""
    return value or None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
