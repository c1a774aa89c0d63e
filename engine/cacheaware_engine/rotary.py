"""Rotary position embedding on interleaved pairs.

Checkpoints rotate element i together with element i + head_dim/2. The loader permutes the rows that produce queries and
keys (`interleave`), so that partners lie side by side and one complex product rotates all heads; dot products between
queries and keys do not change.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cacheaware_engine.model_config import Llama3Scaling, Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each pair. [head_dim / 2], fp32"""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.llama3 is not None:
        return _llama3(frequencies, rope.factor, rope.llama3)
    return frequencies / rope.factor


def _llama3(frequencies: Tensor, factor: float, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # over the context of the first training
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)  # 1: a short wavelength, left alone; 0: a long one, stretched by the factor
    return frequencies * (kept + (1.0 - kept) / factor)


def rotations(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Unit complex numbers that turn each pair. positions [tokens] -> [tokens, 1, head_dim / 2] complex64"""
    angles = positions.to(torch.float32)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)[:, None]


def rotate_(heads: Tensor, turn: Tensor) -> None:
    """Rotate `heads` [tokens, heads, head_dim] in place."""
    if heads.dtype == torch.float32:
        torch.view_as_complex(_as_pairs(heads)).mul_(turn)
    else:  # there is no complex number of two bfloat16
        wide = torch.view_as_complex(_as_pairs(heads.float())).mul_(turn)
        heads.copy_(torch.view_as_real(wide).flatten(-2))


def _as_pairs(heads: Tensor) -> Tensor:
    return heads.view(*heads.shape[:-1], -1, 2)


def interleave(rows: Tensor, head_dim: int) -> Tensor:
    """Bring rotation partners side by side in the first dimension. [heads · head_dim, …], same shape"""
    paired = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)
