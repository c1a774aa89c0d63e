"""Set-ups of vLLM in which quotas cannot be kept: refused at start, each with what to change. Pure."""

from __future__ import annotations

from typing import Any

_FULL_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")


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
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        reasons.append("--prefill-context-parallel-size: a step would compute parts of a prompt apart; leave it out")
    if config.model_config.runner_type != "generate":
        reasons.append(f"the model is run as {config.model_config.runner_type!r}, not to generate text")
    if getattr(config.model_config, "is_diffusion", False):
        reasons.append("a diffusion model rewrites tokens that it has written; only what goes on from them is known")
    if config.model_config.is_encoder_decoder:
        reasons.append("an encoder-decoder model has a second cache that is not accounted for")
    groups = kv_cache.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        reasons.append(f"the model has {len(groups)} kinds of KV cache ({kinds}), and the accounts know one")
    elif not _keeps_all(spec := groups[0].kv_cache_spec):
        reasons.append(
            f"the model's KV cache ({type(spec).__name__}) is not one block for so many tokens, kept until a request "
            f"ends; only full attention is known"
        )
    return reasons


def _keeps_all(spec: Any) -> bool:
    """Full attention: a request keeps each of its blocks until it ends, and has no others. Kinds derived from it have
    windows, sinks or replays, so it is the names that count.
    """
    windowed = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return type(spec).__name__ in _FULL_ATTENTION and not windowed and not getattr(spec, "prefix_replay_tokens", 0)
