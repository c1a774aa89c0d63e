"""Keys and values of all blocks: tensors, slots, and nothing about whose they are.

Token t of a sequence lies in slot `table[t // block_size] * block_size + t % block_size`, in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KvStore:
    """Paged keys and values: one tensor [slots, 2 (key, value), kv_heads, head_dim] a layer."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.device = device
        self._row = 2 * kv_heads * head_dim
        shape = (num_blocks * block_size, self._row)
        self._layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        # Gathers write into this buffer again and again: fresh memory for each would cost three times the copy itself.
        self._gathered = torch.empty((0, self._row), dtype=dtype, device=device)
        self._offsets = torch.arange(block_size, device=device)

    @property
    def bytes_per_token(self) -> int:
        return len(self._layers) * self._row * self._gathered.element_size()

    def slots(self, tables: Sequence[Sequence[int]], tokens: int) -> Tensor:
        """Slots of the first `tokens` tokens of each table. [tables, tokens]

        A table too short for that is continued with its first block: those slots are valid to read, and the caller
        masks them.
        """
        blocks = -(-tokens // self.block_size)
        padded = [[*table[:blocks], *[table[0]] * (blocks - len(table))] for table in tables]
        first = torch.tensor(padded, dtype=torch.long, device=self.device) * self.block_size
        return (first[:, :, None] + self._offsets).view(len(tables), -1)[:, :tokens]

    def write(self, layer: int, slots: Tensor, pairs: Tensor) -> None:
        """Store keys and values. slots: [tokens], pairs: [tokens, 2, kv_heads, head_dim]"""
        self._layers[layer].index_copy_(0, slots, pairs.reshape(-1, self._row))

    def gather(self, layer: int, slots: Tensor) -> Tensor:
        """Copy keys and values together. slots: [tokens] -> [tokens, 2, kv_heads, head_dim]

        The result is valid until the next call.
        """
        tokens = slots.shape[0]
        if self._gathered.shape[0] < tokens:
            self._gathered = torch.empty((tokens, self._row), dtype=self._gathered.dtype, device=self.device)
        out = self._gathered[:tokens]
        torch.index_select(self._layers[layer], 0, slots, out=out)
        return out.view(tokens, 2, self.kv_heads, self.head_dim)

    def copy_block(self, source: int, target: int) -> None:
        """Give `target` the contents of `source`, in every layer."""
        size = self.block_size
        for layer in self._layers:
            layer[target * size : (target + 1) * size] = layer[source * size : (source + 1) * size]
