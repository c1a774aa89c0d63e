"""How an unmodified vLLM is started: its own server, with what the pool decides as flags. Pure.

Order of waiting requests and prefix caching are what the sidecar relies on; usage with cached tokens is how it learns
what a prefix was worth. Names are those of vLLM 0.32.
"""

from __future__ import annotations

from cacheaware_api.v1alpha1 import KVCacheDtype
from cacheaware_operator.plan import EnginePlan
from cacheaware_operator.ports import LOOPBACK

_KV_CACHE_DTYPE = {KVCacheDtype.AUTO: "auto", KVCacheDtype.FP8: "fp8", KVCacheDtype.INT8: "int8_per_token_head"}


def vllm_flags(engine: EnginePlan, port: int, revision: str | None = None) -> tuple[str, ...]:
    """`revision`: of a model that vLLM fetches itself."""
    flags = [
        f"--model={engine.model}",
        f"--served-model-name={engine.served_model_name}",
        f"--host={LOOPBACK}",
        f"--port={port}",
        f"--kv-cache-dtype={_KV_CACHE_DTYPE[engine.kv_cache_dtype]}",
        "--scheduling-policy=priority",
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
    ]
    if revision is not None:
        flags.append(f"--revision={revision}")
    if engine.block_size is not None:  # its own default is what its device can do
        flags.append(f"--block-size={engine.block_size}")
    if engine.kv_cache_memory is not None:
        flags.append(f"--kv-cache-memory-bytes={engine.kv_cache_memory}")
    if engine.max_model_len is not None:
        flags.append(f"--max-model-len={engine.max_model_len}")
    return (*flags, *engine.arguments)
