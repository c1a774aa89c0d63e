"""Flags of the engines that a pool sets itself, so that `engine.args` may not: ports, sockets, keys, the cache, order.

Both engines parse flags with argparse, which takes an unambiguous beginning for the whole flag (`--api` for
`--api-key`) and, in vLLM, `_` for `-`: what could mean an owned flag is refused as that flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class EngineType(StrEnum):
    TORCH = "Torch"
    VLLM = "VLLM"


_MODEL = {
    "--model": "spec.model.source",
    "--served-model-name": "spec.model.name",
    "--max-model-len": "spec.model.maxModelLen",
}
_CACHE = {
    "--block-size": "spec.engine.kvCache.blockSize",
    "--kv-cache-dtype": "spec.engine.kvCache.dtype",
}
_ADDRESS = {"--host": None, "--port": None}

OWNED: Mapping[EngineType, Mapping[str, str | None]] = {
    EngineType.TORCH: {
        **_MODEL,
        **_CACHE,
        **_ADDRESS,
        "--kv-socket": None,
        "--kv-cache-memory": "spec.engine.kvCache.memory",
        "--num-kv-blocks": "spec.engine.kvCache.memory",
    },
    EngineType.VLLM: {
        **_MODEL,
        **_CACHE,
        **_ADDRESS,
        "--uds": None,
        "--root-path": None,
        "--api-key": "spec.identity",
        "--middleware": None,
        "--ssl-keyfile": None,
        "--ssl-certfile": None,
        "--ssl-ca-certs": None,
        "--headless": None,
        "--api-server-count": None,
        "--config": None,  # a file of flags would pass this list by
        "--scheduler-cls": "spec.tiers",
        "--scheduling-policy": "spec.tiers",
        "--enable-prefix-caching": None,
        "--no-enable-prefix-caching": None,
        "--enable-prompt-tokens-details": None,
        "--no-enable-prompt-tokens-details": None,
        "--kv-cache-memory-bytes": "spec.engine.kvCache.memory",
        "--num-gpu-blocks-override": "spec.engine.kvCache.memory",
        "--kv-transfer-config": None,
        "--data-parallel-size": "spec.replicas",
        "-dp": "spec.replicas",
    },
}
"""By engine, each owned flag and the field to set instead (None: there is nothing to set)."""

FREE: Mapping[EngineType, frozenset[str]] = {
    EngineType.TORCH: frozenset(
        {"--max-num-seqs", "--max-num-batched-tokens", "--dtype", "--threads", "--log-level", "--log-format"}
    ),
    EngineType.VLLM: frozenset(),
}
"""Flags that an author may set although an owned one begins like them."""


def owned_flag(engine: EngineType, argument: str) -> str | None:
    """The owned flag that `argument` means or may be short for; None where there is none."""
    if not argument.startswith("-"):
        return None
    flag = argument.split("=", 1)[0]
    if engine is EngineType.VLLM and flag.startswith("--"):
        flag = "--" + flag.removeprefix("--").split(".", 1)[0].replace("_", "-")  # --flag.key=value sets part of a flag
    owned = OWNED[engine]
    if flag in owned:
        return flag
    if not flag.startswith("--") or flag in FREE[engine]:
        return None
    return next((name for name in owned if name.startswith(flag)), None)
