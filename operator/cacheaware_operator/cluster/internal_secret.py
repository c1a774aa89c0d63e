"""The Secret `<pool>-internal`: keys that are made once and kept, and the callers' keys copied from the user's Secret.

A key may have several lines: the first one counts, further ones are older and still accepted (the control token). So a
key is rotated by editing the Secret, and what is there is never made anew.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cacheaware_api import wire
from cacheaware_operator.cluster import names
from cacheaware_operator.cluster.names import KubernetesObject
from cacheaware_operator.plan import Wanted

SALT_KEY, CONTROL_TOKEN, HOP_KEY, API_KEYS = "salt-key", "control-token", "hop-key", "api-keys.json"


def fresh_key() -> str:
    """256 random bits, as text."""
    return secrets.token_hex(32)


@dataclass(frozen=True, slots=True, repr=False)
class InternalSecret:
    """The keys of one pool, as text."""

    salt_key: str
    control_token: str
    hop_key: str

    @classmethod
    def completed(cls, data: Mapping[str, str] | None, fresh: Callable[[], str] = fresh_key) -> InternalSecret:
        """The keys in the `data` of the Secret that is there, with new ones where a key is missing, blank or no text.

        `data` is as the API server gives it (base64); None where there is no Secret yet.
        """
        return cls(
            salt_key=_text(data, SALT_KEY) or fresh(),
            control_token=_text(data, CONTROL_TOKEN) or fresh(),
            hop_key=_text(data, HOP_KEY) or fresh(),
        )

    @property
    def bearer(self) -> str:
        """What the operator sends to the control side."""
        return next(line.strip() for line in self.control_token.splitlines() if line.strip())

    def __repr__(self) -> str:
        return "InternalSecret(…)"  # it ends up in logs and tracebacks otherwise


def build_internal_secret(wanted: Wanted, internal: InternalSecret, keys: wire.ApiKeys) -> KubernetesObject:
    texts = {
        SALT_KEY: internal.salt_key,
        CONTROL_TOKEN: internal.control_token,
        HOP_KEY: internal.hop_key,
        API_KEYS: json.dumps(wire.to_json(keys), indent=1, sort_keys=True),
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": names.metadata(wanted, names.internal_secret(wanted.name)),
        "type": "Opaque",
        # not stringData: the server never shows it again, so every later apply would look like a change
        "data": {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()},
    }


def _text(data: Mapping[str, str] | None, key: str) -> str | None:
    """The entry's text; None where it holds no key."""
    try:
        text = base64.b64decode((data or {}).get(key, ""), validate=True).decode()
    except ValueError:  # neither base64 nor UTF-8: somebody's accident, and nothing that a sidecar could use
        return None
    return text if text.strip() else None
