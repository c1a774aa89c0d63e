"""Keys and values of all blocks: tensors, slots, and nothing about whose they are.

Token t of a sequence lies in slot `table[t // block_size] * block_size + t % block_size`, in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from cacheaware_engine.kv_format import KvFormat, bytes_per_token
from cacheaware_engine.kv_reads import Run

COPIED_BYTES: Final = 2 * 2**20
"""What is copied, or widened, before it is read goes in pieces of at most so many bytes: about what a core's cache
keeps in between. Measured with 1,536 bytes a token: pieces of 12 MB take half as long again as pieces of 1.5 MB."""

GATHERED_BYTES: Final = 8 * 2**20
"""What is gathered for several sequences at once: a call for each costs more than what stays in the cache saves."""


class KvStore:
    """Paged keys and values: one tensor [slots, 2 (key, value) · kv_heads, head_dim] a layer, and scales if quantised.

    What `read` and `gather` return is valid until the next call of either.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        kv_format: KvFormat,
        device: torch.device,
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.format = kv_format
        self.device = device
        slots, rows = num_blocks * block_size, 2 * kv_heads
        # Bytes are moved as integers of their size: not every operator knows every eight-bit float.
        self._stored_as = torch.int8 if kv_format.quantised else kv_format.storage
        self._layers = [
            torch.zeros((slots, rows, head_dim), dtype=self._stored_as, device=device) for _ in range(num_layers)
        ]
        self._scales = [
            torch.zeros((slots, rows, 1), device=device) for _ in range(num_layers if kv_format.quantised else 0)
        ]
        # Copies go into these buffers again and again: fresh memory for each would cost three times the copy itself.
        self._raw = torch.empty((0, rows, head_dim), dtype=self._stored_as, device=device)
        self._wide = torch.empty((0, rows, head_dim), dtype=kv_format.compute, device=device)
        # Other devices have caches that do not care, and calls that cost more.
        token_bytes = rows * head_dim * kv_format.compute.itemsize
        most, at_once = (
            (COPIED_BYTES // token_bytes, GATHERED_BYTES // token_bytes) if device.type == "cpu" else (8192, 8192)
        )
        self.copied_slots = max(256, 1 << (most.bit_length() - 1))
        self.gathered_slots = max(256, 1 << (at_once.bit_length() - 1))

    @property
    def bytes_per_token(self) -> int:
        """Over all layers."""
        return bytes_per_token(self.num_layers, self.kv_heads, self.head_dim, self.format)

    def stored(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """As kept: numbers [slots, 2 · kv_heads, head_dim], and scales [slots, 2 · kv_heads, 1] if quantised."""
        return self._layers[layer], self._scales[layer] if self.format.quantised else None

    def write(self, layer: int, slots: Tensor, pairs: Tensor) -> None:
        """Store keys and values. slots: [tokens], pairs: [tokens, 2, kv_heads, head_dim]"""
        rows = pairs.reshape(-1, 2 * self.kv_heads, self.head_dim)
        if self.format.quantised:
            numbers, scales = self.format.quantise(rows)
            self._layers[layer].index_copy_(0, slots, numbers.view(self._stored_as))
            self._scales[layer].index_copy_(0, slots, scales)
        else:
            self._layers[layer].index_copy_(0, slots, rows)

    def read(self, layer: int, run: Run) -> Tensor:
        """Neighbouring slots, without a copy where they are stored as computed. [tokens, 2, kv_heads, head_dim]"""
        stored = self._layers[layer][run.first : run.last]
        if self.format.quantised:
            stored = self._widened(stored, self._scales[layer][run.first : run.last])
        return stored.view(len(run), 2, self.kv_heads, self.head_dim)

    def pieces(self, layer: int, part: Run | Tensor) -> Iterator[Tensor]:
        """All of `part`, piece by piece where it is copied; each piece is valid until the next is asked for."""
        # Widening passes over a piece twice before it is read, so half as much should stay in the cache.
        most = max(1, self.copied_slots // (2 if self.format.quantised else 1))
        if isinstance(part, Tensor):
            for first in range(0, len(part), most):
                yield self.gather(layer, part[first : first + most])
        elif self.format.quantised:
            for first in range(part.first, part.last, most):
                yield self.read(layer, Run(first, min(first + most, part.last)))
        else:
            yield self.read(layer, part)

    def gather(self, layer: int, slots: Tensor) -> Tensor:
        """Any slots, copied. slots: [tokens] -> [tokens, 2, kv_heads, head_dim]"""
        tokens = slots.shape[0]
        self._raw = _at_least(self._raw, tokens)
        stored = torch.index_select(self._layers[layer], 0, slots, out=self._raw[:tokens])
        if self.format.quantised:
            stored = self._widened(stored, self._scales[layer].index_select(0, slots))
        return stored.view(tokens, 2, self.kv_heads, self.head_dim)

    def _widened(self, stored: Tensor, scales: Tensor) -> Tensor:
        tokens = stored.shape[0]
        self._wide = _at_least(self._wide, tokens)
        wide = self._wide[:tokens]
        wide.copy_(stored.view(self.format.storage))
        return wide.mul_(scales)

    def copy_block(self, source: int, target: int) -> None:
        """Give `target` the contents of `source`, in every layer."""
        size = self.block_size
        for tensor in (*self._layers, *self._scales):
            tensor[target * size : (target + 1) * size] = tensor[source * size : (source + 1) * size]


def _at_least(buffer: Tensor, tokens: int) -> Tensor:
    """The buffer, or a larger one. What it held is not needed."""
    if buffer.shape[0] >= tokens:
        return buffer
    return torch.empty((tokens, *buffer.shape[1:]), dtype=buffer.dtype, device=buffer.device)
