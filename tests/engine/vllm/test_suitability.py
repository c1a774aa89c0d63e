"""Which set-ups of vLLM are refused at start, and that each reason says what to change."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from cacheaware_engine.vllm_plugin.suitability import reasons_against

# What the check reads of vLLM's configuration; specifications of caches go by their names.


@dataclass
class FullAttentionSpec:
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    prefix_replay_tokens: int = 0


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SinkFullAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec:
    pass


def found(*specs: Any, **changed: Any) -> list[str]:
    """`changed`: fields of vLLM's configuration by path, with `__` for a dot."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=SimpleNamespace(
            data_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        model_config=SimpleNamespace(runner_type="generate", is_encoder_decoder=False, is_diffusion=False),
        kv_transfer_config=None,
        ec_transfer_config=None,
        speculative_config=None,
    )
    for path, value in changed.items():
        *parents, name = path.split("__")
        target = config
        for parent in parents:
            target = getattr(target, parent)
        assert hasattr(target, name), path
        setattr(target, name, value)
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs or (FullAttentionSpec(),)]
    return reasons_against(config, SimpleNamespace(kv_cache_groups=groups))


@pytest.mark.parametrize("spec", [FullAttentionSpec(), MLAAttentionSpec()], ids=lambda spec: type(spec).__name__)
def test_full_attention_is_what_the_accounts_know(spec: Any) -> None:
    assert found(spec) == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        pytest.param({"cache_config__enable_prefix_caching": False}, "--no-enable-prefix-caching", id="no cache"),
        pytest.param({"kv_transfer_config": object()}, "leave out --kv-transfer-config", id="KV connector"),
        pytest.param({"ec_transfer_config": object()}, "leave out --ec-transfer-config", id="encoder connector"),
        pytest.param({"speculative_config": object()}, "leave out --speculative-config", id="speculation"),
        pytest.param({"parallel_config__data_parallel_size": 2}, "run replicas of the pool", id="data parallel"),
        pytest.param(
            {"parallel_config__decode_context_parallel_size": 2}, "--decode-context-parallel-size", id="decode contexts"
        ),
        pytest.param(
            {"parallel_config__prefill_context_parallel_size": 2}, "--prefill-context-parallel-size", id="prefills"
        ),
        pytest.param({"model_config__runner_type": "pooling"}, "run as 'pooling'", id="embeddings"),
        pytest.param({"model_config__is_diffusion": True}, "a diffusion model", id="diffusion"),
        pytest.param({"model_config__is_encoder_decoder": True}, "an encoder-decoder model", id="encoder-decoder"),
    ],
)
def test_a_part_of_the_set_up_is_refused_with_what_to_do(changed: dict[str, Any], reason: str) -> None:
    (sentence,) = found(**changed)
    assert reason in sentence


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        pytest.param(
            [FullAttentionSpec(), MambaSpec()], "2 kinds of KV cache (FullAttentionSpec, MambaSpec)", id="hybrid"
        ),
        pytest.param([MambaSpec()], "KV cache (MambaSpec)", id="state space"),
        pytest.param([FullAttentionSpec(sliding_window=512)], "KV cache (FullAttentionSpec)", id="window"),
        pytest.param([FullAttentionSpec(attention_chunk_size=512)], "KV cache (FullAttentionSpec)", id="chunks"),
        pytest.param([MLAAttentionSpec(prefix_replay_tokens=8)], "KV cache (MLAAttentionSpec)", id="replay of hits"),
        pytest.param([SinkFullAttentionSpec()], "KV cache (SinkFullAttentionSpec)", id="blocks that belong to nobody"),
    ],
)
def test_a_cache_that_is_not_full_attention_is_refused_by_its_kind(specs: list[Any], reason: str) -> None:
    (sentence,) = found(*specs)
    assert reason in sentence


def test_every_reason_is_told_at_once() -> None:
    assert len(found(speculative_config=object(), cache_config__enable_prefix_caching=False)) == 2
