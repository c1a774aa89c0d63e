"""The shape of a model: read from `config.json`, or refused by the name of what is not supported.

Everything that has to be known before weights are read, and nothing about tensors. A model is accepted only if every
feature that its configuration turns on is computed exactly; a feature that would be silently ignored is a refusal,
never a warning. Models with the Llama block are `llama.py`'s; any other decoder goes to `foreign.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from cacheaware_engine.errors import ContextTooLong, ModelNotFound, ModelUnreadable, ModelUnsupported


class Architecture(StrEnum):
    """Architectures with the Llama block: RMS norm, rotary grouped-query attention, gated SiLU MLP."""

    LLAMA = "LlamaForCausalLM"
    MISTRAL = "MistralForCausalLM"
    QWEN2 = "Qwen2ForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"


class RopeType(StrEnum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequencies with long wavelengths are divided by the factor, short ones kept, those between blended."""

    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding. `factor` divides frequencies (1 for the default type)."""

    theta: float
    type: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    llama3: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What has to be known of any decoder before its weights are read."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    tied_embeddings: bool
    eos_token_ids: frozenset[int]
    windows: tuple[int | None, ...]
    """Of each layer: how many tokens, itself included, a token attends to; None: all before it."""

    def kv_bytes_per_token(self, item_bytes: int) -> int:
        """Bytes that one token's keys and values take over all layers, at `item_bytes` a number."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * item_bytes

    def context(self, asked: int | None) -> int:
        """The context to serve: what was asked for, or all the model has."""
        if asked is not None and asked > self.max_positions:
            raise ContextTooLong(asked, self.max_positions)
        return self.max_positions if asked is None else asked


@dataclass(frozen=True, slots=True)
class ModelConfig(DecoderConfig):
    """A model with the Llama block, which `llama.py` computes."""

    intermediate_size: int
    rms_norm_eps: float
    rope: Rope
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool


# Settings of other attention and MLP kinds that some checkpoints put under a familiar architecture's name.
_FOREIGN_FEATURES = {
    "attn_logit_softcapping": "attention logit soft-capping",
    "final_logit_softcapping": "final logit soft-capping",
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "kv_lora_rank": "multi-head latent attention",
    "attention_chunk_size": "chunked attention",
    "attention_multiplier": "a custom attention scale",
    "query_pre_attn_scalar": "a custom attention scale",
    "residual_multiplier": "scaled residuals",
    "logits_scaling": "scaled logits",
    "embedding_multiplier": "scaled embeddings",
}


def read_config(folder: Path) -> DecoderConfig:
    """The configuration of the Hugging Face folder `folder`: a `ModelConfig` if `llama.py` computes it."""
    raw = _raw(folder)
    name = _architecture(raw)
    if name in set(Architecture):
        return read_llama_config(folder)
    if not name.endswith("ForCausalLM"):
        raise ModelUnsupported(
            f"its architecture is {name}; only decoders that continue text (…ForCausalLM) are served"
        )
    full = _with_defaults(folder)
    heads = _count(full, "num_attention_heads")
    kv_heads = _count(full, "num_key_value_heads") if full.get("num_key_value_heads") is not None else heads
    hidden = _count(full, "hidden_size")
    return DecoderConfig(
        architecture=name,
        vocab_size=_count(full, "vocab_size"),
        hidden_size=hidden,
        num_layers=_count(full, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_count(full, "head_dim") if full.get("head_dim") is not None else hidden // heads,
        max_positions=_count(full, "max_position_embeddings"),
        tied_embeddings=bool(full.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_token_ids(folder, full),
        windows=_windows(full, sliding="layer_types" in full or full.get("sliding_window") is not None),
    )


def _raw(folder: Path) -> dict[str, Any]:
    """config.json as it is, once it is plain that no weight is quantised."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFound(f"{folder} holds no config.json, so it is not a Hugging Face model folder")
    raw = _read_object(path)
    _architecture(raw)
    if raw.get("quantization_config"):
        method = _section(raw, "quantization_config").get("quant_method", "unknown")
        raise ModelUnsupported(f"its weights are quantised ({method}); use a float16, bfloat16 or float32 checkpoint")
    return raw


def read_llama_config(folder: Path) -> ModelConfig:
    """The configuration of a model with the Llama block; what that block does not compute is refused by name."""
    path = folder / "config.json"
    raw = _raw(folder)
    architecture = Architecture(_architecture(raw))
    for name, feature in _FOREIGN_FEATURES.items():
        if raw.get(name) is not None:
            raise ModelUnsupported(f"it uses {feature} ({name}={raw[name]!r})")
    full = _with_defaults(folder)
    if full["hidden_act"] != "silu":
        raise ModelUnsupported(f"its MLP uses hidden_act={full['hidden_act']!r}; only 'silu' is built")
    heads = _count(full, "num_attention_heads")
    kv_heads = _count(full, "num_key_value_heads") if full.get("num_key_value_heads") is not None else heads
    if heads % kv_heads:
        raise ModelUnreadable(
            f"{path}: num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})"
        )
    hidden = _count(full, "hidden_size")
    head_dim = _count(full, "head_dim") if full.get("head_dim") is not None else hidden // heads
    if head_dim % 2:
        raise ModelUnreadable(f"{path}: rotary embeddings need an even head size, and head_dim is {head_dim}")
    attention_bias = bool(full.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_count(full, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(full, "intermediate_size"),
        num_layers=_count(full, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(full["rms_norm_eps"]),
        max_positions=_count(full, "max_position_embeddings"),
        rope=_rope(full),
        qkv_bias=architecture is Architecture.QWEN2 or attention_bias,
        output_bias=attention_bias and architecture is not Architecture.QWEN2,
        mlp_bias=bool(full.get("mlp_bias", False)) and architecture is Architecture.LLAMA,
        qk_norm=architecture is Architecture.QWEN3,
        tied_embeddings=bool(full["tie_word_embeddings"]),
        eos_token_ids=_eos_token_ids(folder, full),
        windows=_windows(full, sliding=bool(full.get("use_sliding_window", architecture is Architecture.MISTRAL))),
    )


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1:
        raise ModelUnsupported(f"config.json must name one architecture, and names {names!r}")
    return str(names[0])


def _with_defaults(folder: Path) -> dict[str, Any]:
    """The configuration with the defaults of its class filled in, which config.json may leave out."""
    from transformers import AutoConfig  # seconds to import: only once a supported architecture is known

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # it raises whatever its validators raise; all of it means a bad config.json
        raise ModelUnreadable(f"{folder / 'config.json'}: {error}") from error
    full: dict[str, Any] = config.to_dict()
    return full


def _windows(full: Mapping[str, Any], *, sliding: bool) -> tuple[int | None, ...]:
    """`sliding` says whether layers slide where nothing says which do."""
    layers = _count(full, "num_hidden_layers")
    window = full.get("sliding_window")
    uses_window = window is not None and sliding
    kinds = full.get("layer_types") or ["sliding_attention" if uses_window else "full_attention"] * layers
    if len(kinds) != layers:
        raise ModelUnreadable(f"config.json: layer_types has {len(kinds)} entries for {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelUnsupported(
                f"it has layers of the kind {kind!r} (layer_types); built are full and sliding attention"
            )
    if "sliding_attention" in kinds and (not isinstance(window, int) or window < 1):
        raise ModelUnreadable(f"config.json: sliding_window must be a positive integer, and is {window!r}")
    if window is not None and window >= _count(full, "max_position_embeddings"):
        window = None  # it reaches everything
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(full: Mapping[str, Any]) -> Rope:
    parameters = _section(full, "rope_parameters")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelUnsupported("it rotates only a part of each head (partial_rotary_factor)")
    name = parameters.get("rope_type", parameters.get("type", "default"))
    try:
        kind = RopeType(name)
    except ValueError:
        raise ModelUnsupported(f"its rope scaling is {name!r}; built are {', '.join(RopeType)}") from None
    try:
        theta = float(parameters["rope_theta"])
        factor = 1.0 if kind is RopeType.DEFAULT else float(parameters["factor"])
        llama3 = None
        if kind is RopeType.LLAMA3:
            llama3 = Llama3Scaling(
                low_freq_factor=float(parameters["low_freq_factor"]),
                high_freq_factor=float(parameters["high_freq_factor"]),
                original_max_positions=int(parameters["original_max_position_embeddings"]),
            )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelUnreadable(f"config.json: rope_parameters of type {kind} lack or garble {error}") from error
    return Rope(theta=theta, type=kind, factor=factor, llama3=llama3)


def _eos_token_ids(folder: Path, full: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end a text: those of generation_config.json, which chat models extend, else the model's own."""
    path = folder / "generation_config.json"
    ids = _read_object(path).get("eos_token_id") if path.is_file() else None
    if ids is None:
        ids = full.get("eos_token_id")
    if ids is None:
        return frozenset()
    listed = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(item, int) for item in listed):
        raise ModelUnreadable(f"{folder}: eos_token_id must be an integer or a list of integers, and is {ids!r}")
    return frozenset(listed)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnreadable(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelUnreadable(f"{path} must hold a JSON object")
    return data


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name) or {}
    if not isinstance(section, Mapping):
        raise ModelUnreadable(f"config.json: {name} must be an object, and is {section!r}")
    return section


def _count(full: Mapping[str, Any], name: str) -> int:
    value = full.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelUnreadable(f"config.json: {name} must be a positive integer, and is {value!r}")
    return value
