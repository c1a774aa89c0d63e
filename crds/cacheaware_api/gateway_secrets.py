"""The user's Secret of gateways: each entry is a secret by which one gateway proves itself.

An entry's name is a label for people; its value is the secret, as the gateway sends it in a header. All entries count,
so a secret is rotated by adding the new one, changing the gateway, and removing the old one. What is kept is a hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from cacheaware_api import wire
from cacheaware_api.errors import ObjectInvalid, Problem

LEAST_CHARACTERS, MOST_CHARACTERS = 32, 1024
_FIX = "make one with: openssl rand -hex 32"


def read_gateway_secrets(secret: str, entries: Mapping[str, bytes]) -> tuple[wire.GatewaySecret, ...]:
    """The gateways in the entries of the Secret named `secret`; raises `ObjectInvalid` with everything that is wrong.

    No entries are no gateways: nobody is let in.
    """
    gateways: list[wire.GatewaySecret] = []
    problems: list[Problem] = []
    for name, value in sorted(entries.items()):
        where = f"Secret {secret}: {name}"
        text = value.removesuffix(b"\n")  # what an editor and `kubectl create secret --from-file` leave there
        if not LEAST_CHARACTERS <= len(text) <= MOST_CHARACTERS:
            problems.append(Problem(where, f"must have {LEAST_CHARACTERS} to {MOST_CHARACTERS} characters", _FIX))
        elif not all(0x21 <= byte <= 0x7E for byte in text):
            problems.append(Problem(where, "must be printable ASCII without spaces, to be sent in a header", _FIX))
        else:
            gateways.append(wire.GatewaySecret(name, hashlib.sha256(text).hexdigest()))
    if problems:
        raise ObjectInvalid(problems)
    return tuple(gateways)
