"""What the plugin is told: by environment variables, because vLLM's flags are vLLM's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KV_SOCKET = "CACHEAWARE_KV_SOCKET"
CHECK = "CACHEAWARE_CHECK"


@dataclass(frozen=True, slots=True)
class Settings:
    kv_socket: Path | None  # where `/kv/*` is served; None: nowhere
    check_every_step: bool  # compare the pool's accounts with vLLM's blocks after every step: for tests, O(blocks)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        socket = environment.get(KV_SOCKET)
        check = environment.get(CHECK, "0")
        if check not in ("0", "1"):
            raise ValueError(f"{CHECK}: expected 0 or 1, got {check[:20]!r}")
        return cls(Path(socket) if socket else None, check == "1")
