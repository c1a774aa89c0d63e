"""The network of the Llama and Qwen families: one step's tokens in, logits out.

It knows weights and arithmetic. Where keys and values are kept and who attends to what is the caller's `Attend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cacheaware_engine.linear import Linear
from cacheaware_engine.model_config import ModelConfig
from cacheaware_engine.network import Attend, AttentionShape
from cacheaware_engine.rotary import rotate_, rotations


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one block. Rows of queries and keys, and the head norms, are interleaved for `rotary`."""

    attention_norm: Tensor  # [hidden]
    qkv: Linear  # hidden -> (heads + 2 · kv_heads) · head_dim: queries, keys, values
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Linear
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 · intermediate: gate, up
    down: Linear


@dataclass(frozen=True, slots=True)
class Llama:
    config: ModelConfig
    embedding: Tensor  # [vocab, hidden]
    layers: Sequence[Layer]
    norm: Tensor  # [hidden]
    head: Linear  # hidden -> vocab
    frequencies: Tensor  # [head_dim / 2] radians per position
    epsilon: Tensor  # [] fp32, of the norms

    @property
    def shape(self) -> AttentionShape:
        config = self.config
        return AttentionShape(config.windows, config.num_heads, config.num_kv_heads, config.head_dim)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor) -> Tensor:
        """Logits after the tokens at `rows`. tokens, positions: [tokens], rows: [sampled] -> [sampled, vocab] fp32"""
        config = self.config
        rotated = config.num_heads + config.num_kv_heads
        turn = rotations(positions, self.frequencies)
        x = self.embedding[tokens]
        for index, layer in enumerate(self.layers):
            heads = layer.qkv(self._normed(x, layer.attention_norm)).view(len(tokens), -1, config.head_dim)
            q, k = heads[:, : config.num_heads], heads[:, config.num_heads : rotated]
            if layer.q_norm is not None and layer.k_norm is not None:
                q.copy_(self._normed(q, layer.q_norm))
                k.copy_(self._normed(k, layer.k_norm))
            rotate_(heads[:, :rotated], turn)
            pairs = heads[:, config.num_heads :].view(len(tokens), 2, config.num_kv_heads, config.head_dim)
            x = layer.output.onto(x, attend(index, q, pairs).flatten(1))
            gate, up = layer.gate_up(self._normed(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = layer.down.onto(x, functional.silu(gate).mul_(up))
        return self.head(self._normed(x[rows], self.norm)).float()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)
        # On a CPU torch's own takes twice as long for one row and fifteen times as long for 512.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self.epsilon, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight)
