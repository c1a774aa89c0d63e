"""The private folder of a local pool: sockets, view files and secrets, where a pod has mounts.

    <folder>/                      0700, in the system's temporary folder (socket paths must stay short)
        secrets/                   salt-key, control-token, hop-key, api-keys.json; 0600
        0/kv.sock                  replica 0: the engine's /kv/*
        0/view.json                           the wanted view

Replicas go by number here, because a socket's path may not pass 107 bytes and a pool's name may. Files are replaced
whole, so a reader never sees half of one.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cacheaware_api import wire

_LONGEST_PARENT = 70  # bytes; leaves room for our own part of a socket's path
_GENERATED = ("salt-key", "control-token", "hop-key")


@dataclass(frozen=True, slots=True)
class LocalFolder:
    path: Path

    @classmethod
    def create(cls, parent: Path | None = None) -> LocalFolder:
        """A new folder with fresh keys, for its owner alone; by default where the system keeps temporary ones."""
        parent = parent or Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) > _LONGEST_PARENT:
            parent = Path("/tmp")
        folder = cls(Path(tempfile.mkdtemp(prefix="cacheaware-", dir=parent)))
        folder.secrets.mkdir(mode=0o700)
        for name in _GENERATED:
            replace_file(folder.secrets / name, secrets.token_hex(32))
        folder.write_api_keys(wire.ApiKeys(()))
        return folder

    @property
    def secrets(self) -> Path:
        return self.path / "secrets"

    @property
    def control_token(self) -> str:
        return (self.secrets / "control-token").read_text()

    def replica(self, number: int) -> Path:
        folder = self.path / str(number)
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def kv_socket(self, replica: int) -> Path:
        return self.replica(replica) / "kv.sock"

    def view_file(self, replica: int) -> Path:
        return self.replica(replica) / "view.json"

    def write_view(self, replica: int, view: wire.View) -> None:
        replace_file(self.view_file(replica), json.dumps(wire.to_json(view), indent=1))

    def write_api_keys(self, keys: wire.ApiKeys) -> None:
        replace_file(self.secrets / "api-keys.json", json.dumps(wire.to_json(keys), indent=1))

    def remove_replica(self, replica: int) -> None:
        shutil.rmtree(self.path / str(replica), ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def replace_file(path: Path, text: str, mode: int = 0o600) -> None:
    """Write `path` as one step; the file has its final mode before it has content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)
