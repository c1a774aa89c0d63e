"""Cache isolation: the salt under which a request's blocks are hashed. Pure.

Two scopes never share a block, a group, hit credit or a timing signal. The scope is decided by the pool's `sharing` and
the caller's identity; a salt that a client sends never gets this far. The key is the pool's own, so a scope's salt
cannot be guessed from its name.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
from typing import assert_never

from cacheaware_api.wire import Sharing


def scope_kind(sharing: Sharing, tenant: str | None) -> str:
    """Among whom a request's blocks are shared: `pool`, `tier`, `tenant`, or `request` where it is among nobody."""
    return _scope(sharing, "", tenant, "").partition("\0")[0]


def cache_salt(salt_key: bytes, sharing: Sharing, *, tier: str, tenant: str | None, request_id: str) -> str:
    """The salt of one request, 43 characters. `request_id` must be ours, never the caller's."""
    scope = _scope(sharing, tier, tenant, request_id)
    return _salt(salt_key, scope) if scope.startswith("request") else _kept_salt(salt_key, scope)


def _salt(salt_key: bytes, scope: str) -> str:
    digest = hmac.digest(salt_key, scope.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


_kept_salt = functools.lru_cache(maxsize=4096)(_salt)  # tiers and tenants come back; a request's own scope never does


def _scope(sharing: Sharing, tier: str, tenant: str | None, request_id: str) -> str:
    # Each scope starts with its own word, so that a tenant called like a tier does not meet it.
    match sharing:
        case Sharing.POOL:
            return "pool"
        case Sharing.TIER:
            return f"tier\0{tier}"
        case Sharing.TENANT if tenant is not None:
            return f"tenant\0{tenant}"
        case Sharing.TENANT | Sharing.NONE:  # nobody is known: nothing may be shared with anybody
            return f"request\0{request_id}"
        case _:
            assert_never(sharing)
