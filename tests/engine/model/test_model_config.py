"""A configuration is understood exactly or refused by the name of what is not built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cacheaware_engine.errors import ContextTooLong, ModelNotFound, ModelUnreadable, ModelUnsupported
from cacheaware_engine.model_config import Architecture, ModelConfig, RopeType, read_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 7,
}

Write = Callable[..., Path]

MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 64}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a Llama's config.json with changes; None takes a field away."""

    def write_config(**changes: Any) -> Path:
        fields = {name: value for name, value in {**LLAMA, **changes}.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return tmp_path

    return write_config


def llama_config(folder: Path) -> ModelConfig:
    config = read_config(folder)
    assert isinstance(config, ModelConfig)
    return config


def test_a_plain_llama_is_read(write: Write) -> None:
    config = llama_config(write())
    assert config.architecture is Architecture.LLAMA
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.max_positions == 256
    assert config.rope.type is RopeType.DEFAULT
    assert config.eos_token_ids == {7}
    assert not config.qkv_bias
    assert not config.qk_norm
    assert not config.tied_embeddings


def test_fields_that_may_be_left_out_have_the_values_of_the_family(write: Write) -> None:
    config = llama_config(write(num_key_value_heads=None))
    assert config.num_kv_heads == config.num_heads


def test_the_rope_of_older_files_is_read(write: Write) -> None:
    scaled = {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = llama_config(write(rope_theta=5000.0, rope_scaling=scaled))
    assert config.rope.theta == 5000.0
    assert config.rope.factor == 8.0
    assert config.rope.llama3 is not None
    assert config.rope.llama3.original_max_positions == 64


@pytest.mark.parametrize(
    ("model_type", "architecture", "extra", "qkv_bias", "qk_norm"),
    [
        ("qwen2", "Qwen2ForCausalLM", {}, True, False),
        ("qwen2", "Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 32}, True, False),
        ("qwen3", "Qwen3ForCausalLM", {}, False, True),
        ("mistral", "MistralForCausalLM", {"sliding_window": 256}, False, False),
        ("llama", "LlamaForCausalLM", {"attention_bias": True}, True, False),
    ],
)
def test_the_families_differ_where_they_do(
    write: Write, model_type: str, architecture: str, extra: dict[str, Any], qkv_bias: bool, qk_norm: bool
) -> None:
    config = llama_config(write(model_type=model_type, architectures=[architecture], **extra))
    assert config.architecture == architecture
    assert config.qkv_bias is qkv_bias
    assert config.qk_norm is qk_norm


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param({"architectures": ["BertModel"]}, "BertModel", id="not-a-language-model"),
        pytest.param({"architectures": None}, "must name one architecture", id="no-architecture"),
        pytest.param({"num_local_experts": 8}, "mixture of experts", id="experts"),
        pytest.param({"attn_logit_softcapping": 50.0}, "soft-capping", id="soft-capping"),
        pytest.param({"final_logit_softcapping": 30.0}, "soft-capping", id="final-soft-capping"),
        pytest.param({"kv_lora_rank": 512}, "multi-head latent attention", id="latent-attention"),
        pytest.param({"residual_multiplier": 0.2}, "scaled residuals", id="scaled-residuals"),
        pytest.param({"hidden_act": "gelu"}, "hidden_act='gelu'", id="another-activation"),
        pytest.param({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1e4}, "'yarn'", id="yarn"),
        pytest.param(
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "rope_theta": 1e4}, "'dynamic'", id="dynamic-rope"
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
            id="partial-rotation",
        ),
        pytest.param({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised .awq.", id="quantised"),
    ],
)
def test_what_is_not_built_is_refused_by_name(write: Write, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelUnsupported, match=named) as caught:
        read_config(write(**changes))
    assert caught.value.reason in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        pytest.param({}, [None] * 2, id="none"),
        pytest.param(MISTRAL | {"sliding_window": 128}, [128] * 2, id="every-layer-of-mistral"),
        pytest.param(MISTRAL | {"sliding_window": 256}, [None] * 2, id="one-that-reaches-everything"),
        pytest.param(QWEN2 | {"use_sliding_window": True, "max_window_layers": 1}, [None, 64], id="some-of-qwen"),
        pytest.param(QWEN2 | {"use_sliding_window": False}, [None] * 2, id="turned-off"),
    ],
)
def test_layers_have_their_windows(write: Write, changes: dict[str, Any], windows: list[int | None]) -> None:
    assert list(read_config(write(**changes)).windows) == windows


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param({"num_hidden_layers": 0}, "num_hidden_layers", id="no-layers"),
        pytest.param({"hidden_size": "big"}, "hidden_size", id="not-a-number"),
        pytest.param(
            {"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads", id="heads-do-not-divide"
        ),
        pytest.param({"head_dim": 15}, "head_dim", id="a-head-that-cannot-rotate"),
        pytest.param({"eos_token_id": "</s>"}, "eos_token_id", id="eos-is-no-id"),
    ],
)
def test_nonsense_is_refused_by_the_name_of_its_field(write: Write, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelUnreadable, match=named):
        read_config(write(**changes))


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"architectures": "\xff"}'])
def test_a_broken_file_is_refused_with_its_path(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelUnreadable, match=r"config\.json"):
        read_config(tmp_path)


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        read_config(tmp_path)


def test_the_ids_of_the_generation_configuration_end_a_text(write: Write) -> None:
    folder = write()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert read_config(folder).eos_token_ids == {7, 9}


def test_a_context_longer_than_the_models_is_refused_with_both_numbers(write: Write) -> None:
    config = llama_config(write())
    assert config.context(None) == 256
    assert config.context(100) == 100
    with pytest.raises(ContextTooLong, match=r"--max-model-len 257 .* 256"):
        config.context(257)
