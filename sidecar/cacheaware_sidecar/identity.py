"""Who is calling: the Authorization header and the key file become a `Caller`. Pure; leaves the tier to `tiers.py`.

Only the bearer key counts. Headers that name a tier or a tenant (`x-cacheaware-tier`, `x-cacheaware-tenant`,
`x-llm-d-inference-objective`, `x-llm-d-inference-fairness-id`) would need proof of a trusted gateway, which no identity
type built so far can give, so nothing here reads them and none is forwarded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from collections.abc import Mapping

from cacheaware_api import wire
from cacheaware_sidecar.errors import Unauthorized

ANONYMOUS = ""  # the tenant of an open pool: fairness has one queue, and sharing by tenant isolates every request


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """A known caller, or nobody in particular (`Open`)."""

    tenant: str | None  # None: nobody is known
    tiers: frozenset[str] | None  # None: any tier of the view
    default_tier: str | None = None
    key_name: str | None = None  # label of the key, for logs

    @property
    def fair_share(self) -> str:
        return ANONYMOUS if self.tenant is None else self.tenant


OPEN_CALLER = Caller(tenant=None, tiers=None)


class KeyRing:
    """The API keys by their SHA-256. Looking a key up takes the same time for every key of the ring."""

    def __init__(self, keys: wire.ApiKeys) -> None:
        self._by_digest: Mapping[str, wire.ApiKey] = {key.sha256: key for key in keys.keys}

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, key: str) -> wire.ApiKey | None:
        # The dict is keyed by a digest that the caller cannot steer, so where it stops comparing tells nothing.
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        found = self._by_digest.get(digest)
        if found is None or not hmac.compare_digest(found.sha256, digest):
            return None
        return found


def identify(identity: wire.IdentityType, authorization: str | None, keys: KeyRing) -> Caller:
    """The caller behind an Authorization header; raises `Unauthorized`."""
    if identity is wire.IdentityType.OPEN:
        return OPEN_CALLER
    if identity is not wire.IdentityType.API_KEYS:
        raise Unauthorized(f"identity.type {identity} is not supported: ask the operator of this pool for APIKeys")
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
