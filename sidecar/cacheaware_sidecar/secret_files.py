"""The pool's secrets, as files that are mounted or written beside the process, and read again when they change.

    salt-key        text; changing it empties the cache (its first line counts)
    control-token   text; the bearer token of the control port. More lines are older tokens that still count
    api-keys.json   `wire.ApiKeys`: hashes of callers' keys, or of gateways' secrets; absent where the pool is open

A file that cannot be read, or is wrong, leaves the last good secrets in force and is reported.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from cacheaware_api import wire
from cacheaware_sidecar.identity import KeyRing

SALT_KEY, CONTROL_TOKEN, API_KEYS = "salt-key", "control-token", "api-keys.json"


class SecretsError(ValueError):
    """A secret is missing or wrong; the message names the file and never shows its content."""


@dataclasses.dataclass(frozen=True, slots=True)
class Secrets:
    salt_key: bytes
    control_tokens: tuple[bytes, ...]
    keys: KeyRing

    def __repr__(self) -> str:
        return f"Secrets({len(self.keys)} API keys)"


def load_secrets(folder: Path) -> Secrets:
    """Read the folder; raises `SecretsError`."""
    return Secrets(
        salt_key=_lines(folder / SALT_KEY)[0],
        control_tokens=_lines(folder / CONTROL_TOKEN),
        keys=_api_keys(folder / API_KEYS),
    )


def _lines(path: Path) -> tuple[bytes, ...]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SecretsError(f"{path}: {error.strerror}; the secrets folder (--secrets-dir) needs this file") from None
    lines = tuple(line.strip() for line in content.splitlines() if line.strip())
    if not lines:
        raise SecretsError(f"{path}: is empty; write a random text of at least 32 characters")
    return lines


def _api_keys(path: Path) -> KeyRing:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return KeyRing(wire.ApiKeys(keys=()))
    except OSError as error:
        raise SecretsError(f"{path}: {error.strerror}") from None
    try:
        return KeyRing(wire.from_json(wire.ApiKeys, json.loads(content)))
    except ValueError as error:  # also WireError, which names the field
        problem = str(error) if isinstance(error, wire.WireError) else "is not JSON"
        raise SecretsError(f"{path}: {problem}") from None
