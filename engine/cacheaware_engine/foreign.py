"""Every decoder that transformers computes through its attention interface, over our keys and values.

transformers' own modelling code runs the network; where it attends, it calls back into the step's `Attend`. Slower than
`llama.py` by 15 to 30 % a step, and exact for kinds that file does not know: Gemma, Phi and others. A model whose
attention asks for more than causal attention with a scale and windows is refused by the name of what it asks for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from cacheaware_engine.errors import ModelUnreadable, ModelUnsupported
from cacheaware_engine.model_config import DecoderConfig
from cacheaware_engine.network import Attend, AttentionShape

INTERFACE: Final = "cacheaware_paged"

# What a modelling file may hand to its attention beyond what is built. Anything but None or a neutral value is refused.
REFUSED: Final = {
    "softcap": "attention logit soft-capping",
    "s_aux": "attention sinks",
    "position_bias": "a position bias in attention",
    "alibi": "a position bias in attention",
    "cross_attention_states": "cross-attention",
    "encoder_hidden_states": "cross-attention",
}


class ForeignNetwork:
    """A transformers model as a network of ours."""

    def __init__(self, model: Any, shape: AttentionShape, vocab_size: int) -> None:
        self._model = model
        self.shape = shape
        self.vocab_size = vocab_size

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.dtype
        return dtype

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor) -> Tensor:
        output = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            cacheaware_attend=attend,
        )
        logits: Tensor = output.logits[0].float()
        return logits


def paged_attention(
    module: Any,
    query: Tensor,  # [1, heads, tokens, head_dim], rotated, as are keys
    key: Tensor,  # [1, kv_heads, tokens, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cacheaware_attend: Attend,
    scaling: float | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """What a modelling file calls instead of its own attention. -> [1, tokens, heads, head_dim]"""
    for name, feature in REFUSED.items():
        if asked.get(name) is not None:
            raise ModelUnsupported(f"it uses {feature} ({name})")
    pairs = torch.stack([key[0], value[0]]).permute(2, 0, 1, 3)  # [tokens, 2, kv_heads, head_dim]
    out = cacheaware_attend(module.layer_idx, query[0].transpose(0, 1), pairs, scale=scaling)
    return out[None], None


def load_foreign(folder: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> ForeignNetwork:
    """The model in `folder`. That it attends as its configuration says is tried before anyone relies on it."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(INTERFACE, paged_attention)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation=INTERFACE,
            local_files_only=True,
            trust_remote_code=False,
        )
    except ValueError as error:
        raise ModelUnsupported(f"transformers cannot load it with paged attention: {error}") from error
    except Exception as error:  # it raises whatever a checkpoint provokes; all of it means unusable files
        raise ModelUnreadable(f"{folder} cannot be loaded: {error}") from error
    model = model.to(device).eval()
    shape = AttentionShape(config.windows, config.num_heads, config.num_kv_heads, config.head_dim)
    network = ForeignNetwork(model, shape, config.vocab_size)
    _try(network, device)
    return network


@torch.inference_mode()
def _try(network: ForeignNetwork, device: torch.device) -> None:
    """One token through all layers: a model that attends otherwise than its configuration says is found out here."""
    shape, seen = network.shape, list[int]()

    def attend(layer: int, q: Tensor, pairs: Tensor, scale: float | None = None) -> Tensor:
        wanted = (2, shape.kv_heads, shape.head_dim)
        if tuple(pairs.shape[1:]) != wanted or q.shape[1] != shape.heads:
            raise ModelUnsupported(
                f"layer {layer} attends with other heads ({tuple(q.shape[1:])}, {tuple(pairs.shape[1:])}) than its "
                f"configuration says ({shape.heads} and {wanted})"
            )
        seen.append(layer)
        return pairs[:, 1].repeat_interleave(shape.heads // shape.kv_heads, 1)  # of one token, attention is its value

    token = torch.zeros(1, dtype=torch.long, device=device)
    try:
        logits = network.forward(token, token, attend, token)
    except (TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ModelUnsupported(f"it does not attend through transformers' attention interface: {error}") from error
    if seen != list(range(len(shape.windows))):
        raise ModelUnsupported(
            f"it has {len(shape.windows)} layers, and {len(seen)} of them attend through transformers' interface"
        )
    if logits.shape != (1, network.vocab_size):
        raise ModelUnsupported(
            f"it gives logits of shape {tuple(logits.shape)}, not of its {network.vocab_size} tokens"
        )
