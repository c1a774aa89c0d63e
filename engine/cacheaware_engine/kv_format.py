"""In what form keys and values are stored: the compute dtype, or eight bits a number with a scale for each head.

Quantised, every token's key (and value) of every head has a scale of its own, its largest magnitude over the largest
number of the format. Nothing is calibrated, and a block needs no other block to be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from cacheaware_engine.settings import KvDtype

SCALE_BYTES: Final = 4
_SMALLEST: Final = 1e-12  # a key of zeros: its scale is never zero


@dataclass(frozen=True, slots=True)
class KvFormat:
    storage: torch.dtype  # of one number
    compute: torch.dtype  # what is written and read
    largest: float | None = None  # of the storage dtype; None: stored as computed

    @property
    def name(self) -> str:
        """Under which blocks are kept."""
        return str(self.storage).removeprefix("torch.")

    @property
    def quantised(self) -> bool:
        return self.largest is not None

    def bytes_of(self, head_dim: int) -> int:
        """Bytes of one token's key, or value, of one head."""
        return head_dim * self.storage.itemsize + (SCALE_BYTES if self.quantised else 0)

    def quantise(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, rows, head_dim] -> the same in the storage dtype, and scales [tokens, rows, 1]"""
        assert self.largest is not None
        wide = pairs.float()
        scales = wide.abs().amax(-1, keepdim=True).mul_(1.0 / self.largest).clamp_(min=_SMALLEST)
        numbers = wide / scales
        if not self.storage.is_floating_point:
            numbers.round_()
        return numbers.clamp_(-self.largest, self.largest).to(self.storage), scales


def kv_format(asked: KvDtype, compute: torch.dtype) -> KvFormat:
    match asked:
        case KvDtype.AUTO:
            return KvFormat(compute, compute)
        case KvDtype.INT8:
            return KvFormat(torch.int8, compute, 127.0)
        case KvDtype.FP8:
            return KvFormat(torch.float8_e4m3fn, compute, 448.0)


def bytes_per_token(layers: int, kv_heads: int, head_dim: int, form: KvFormat) -> int:
    """Bytes that one token's keys and values take over all layers, scales included."""
    return layers * 2 * kv_heads * form.bytes_of(head_dim)
