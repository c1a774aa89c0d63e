"""How an unmodified vLLM is started: its own server, with what the pool decides as flags.

Order of waiting requests and prefix caching are what the sidecar relies on; usage with cached tokens is how it learns
what a prefix was worth. Names are those of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Sequence

from cacheaware_api.v1alpha1 import KVCacheDtype
from cacheaware_operator.cluster import names
from cacheaware_operator.cluster.model_volume import ModelFiles
from cacheaware_operator.plan import EnginePlan
from cacheaware_operator.ports import LOOPBACK

# Not the image's own entry point: that has changed between releases, this module has not.
COMMAND = ("python3", "-m", "vllm.entrypoints.openai.api_server")

_SEQUENCES_FLAG = "--max-num-seqs"
DEFAULT_SEQUENCES = 256  # vLLM's own depends on the GPU, and the sidecar must know it

_KV_CACHE_DTYPE = {KVCacheDtype.AUTO: "auto", KVCacheDtype.FP8: "fp8", KVCacheDtype.INT8: "int8_per_token_head"}


def vllm_arguments(engine: EnginePlan, model: ModelFiles) -> tuple[str, ...]:
    arguments = [
        f"--model={model.argument}",
        f"--served-model-name={engine.served_model_name}",
        f"--host={LOOPBACK}",
        f"--port={names.ENGINE_PORT}",
        f"--block-size={engine.block_size}",
        f"--kv-cache-dtype={_KV_CACHE_DTYPE[engine.kv_cache_dtype]}",
        "--scheduling-policy=priority",
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
    ]
    if model.revision is not None:
        arguments.append(f"--revision={model.revision}")
    if engine.kv_cache_memory is not None:
        arguments.append(f"--kv-cache-memory-bytes={engine.kv_cache_memory}")
    if engine.max_model_len is not None:
        arguments.append(f"--max-model-len={engine.max_model_len}")
    return (*arguments, f"{_SEQUENCES_FLAG}={DEFAULT_SEQUENCES}", *engine.arguments)  # of two the last one counts


def most_sequences(arguments: Sequence[str]) -> int:
    """How many the engine runs at once with these arguments of the pool: the sidecar sends it no more."""
    most = DEFAULT_SEQUENCES
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=False):
        flag, equals, value = argument.partition("=")
        text = value if equals else following
        if flag.replace("_", "-") == _SEQUENCES_FLAG and text.isascii() and text.isdigit() and int(text) > 0:
            most = int(text)
    return most
