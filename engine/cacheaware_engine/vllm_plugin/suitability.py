"""Set-ups of vLLM in which quotas cannot be kept: refused at start, each with what to change. Pure."""

from __future__ import annotations

from typing import Any


def reasons_against(config: Any, kv_cache: Any) -> list[str]:
    """One sentence for each part of the set-up that does not go together with tier quotas."""
    reasons = []
    parallel, cache = config.parallel_config, config.cache_config
    if not cache.enable_prefix_caching:
        reasons.append("prefix caching is off: leave out --no-enable-prefix-caching")
    if config.kv_transfer_config is not None:
        reasons.append("a KV connector moves blocks past the accounts: leave out --kv-transfer-config")
    if getattr(config, "ec_transfer_config", None) is not None:
        reasons.append("an encoder connector is not supported: leave out --ec-transfer-config")
    if config.speculative_config is not None:
        reasons.append("draft tokens take blocks that no request was let in with: leave out --speculative-config")
    if parallel.data_parallel_size > 1:
        reasons.append(
            f"data parallelism has {parallel.data_parallel_size} caches and one quota: run replicas of the pool instead"
        )
    if parallel.decode_context_parallel_size > 1:
        reasons.append(
            "--decode-context-parallel-size: a block would hold more tokens than its size says; leave it out"
        )
    if config.model_config.runner_type != "generate":
        reasons.append(f"the model is run as {config.model_config.runner_type!r}, not to generate text")
    if config.model_config.is_encoder_decoder:
        reasons.append("an encoder-decoder model has a second cache that is not accounted for")
    groups = kv_cache.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        reasons.append(f"the model has {len(groups)} kinds of KV cache ({kinds}), and the accounts know one")
    elif not _keeps_all(groups[0].kv_cache_spec):
        kind = type(groups[0].kv_cache_spec).__name__
        reasons.append(f"the model's KV cache ({kind}) drops blocks while a request runs; only full attention is known")
    return reasons


def _keeps_all(spec: Any) -> bool:
    """Full attention, of any layout: a request keeps each of its blocks until it ends."""
    names = {cls.__name__ for cls in type(spec).__mro__}
    windowed = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return "FullAttentionSpec" in names and not windowed
