"""What the runner needs of a model: the shape of its attention, and a forward over one step's tokens.

`llama.py` is such a network for the common kinds, `foreign.py` for every other one that transformers can compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cacheaware_engine.step_plan import Window


class Attend(Protocol):
    """Stores a layer's keys and values and attends to all that each token may see."""

    def __call__(self, layer: int, q: Tensor, pairs: Tensor, scale: float | None = None) -> Tensor:
        """q: [tokens, heads, head_dim], pairs: [tokens, 2, kv_heads, head_dim] -> [tokens, heads, head_dim]

        `scale` multiplies scores; 1 / √head_dim if it is not given.
        """


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads, and for each layer how far back a token of it attends."""

    windows: tuple[Window, ...]
    heads: int
    kv_heads: int
    head_dim: int


class Network(Protocol):
    """A model's arithmetic. Where keys and values are kept and who attends to what is the caller's `Attend`."""

    @property
    def shape(self) -> AttentionShape: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype:
        """In which it computes."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor) -> Tensor:
        """Logits after the tokens at `rows`. tokens, positions: [tokens], rows: [sampled] -> [sampled, vocab] fp32"""
