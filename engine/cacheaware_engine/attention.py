"""Exact attention over paged keys and values, for one layer at a time.

A prefill chunk attends to its stored prefix and, causally, to itself; the two parts are merged by their log-sum-exp.
Decodes attend in the buckets of the step's plan. What is read is decided in `step_plan.py`.
"""

from __future__ import annotations

import functools
import math
from typing import Protocol

import torch
from torch import Tensor

from cacheaware_engine.kv_store import KvStore
from cacheaware_engine.step_plan import DecodeBucket, PrefillChunk, StepPlan


class Kernel(Protocol):
    """softmax(q · kᵗ · scale + mask) · v, and the log-sum-exp of the scores.

    q: [batch, heads, queries, head_dim], k and v: [batch, kv_heads, keys, head_dim] with contiguous last dimension;
    each key head serves heads / kv_heads consecutive query heads. There is at least one key, and no query has all
    its keys masked. `causal` needs as many keys as queries.
    -> out [batch, heads, queries, head_dim], lse [batch, heads, queries] fp32
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


def cpu_flash(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """torch's fused attention on a CPU, by the operator that also returns the log-sum-exp."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)
    return out, lse


def matmul_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, on any device, with the scores in fp32."""
    batch, heads, queries, head_dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads * queries, head_dim)
    scores = torch.matmul(grouped.float(), k.float().transpose(-1, -2)) / math.sqrt(head_dim)
    scores = scores.view(batch, heads, queries, keys)
    if causal:
        later = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None]).view(batch, kv_heads, -1, keys)
    out = torch.matmul(weights, v.float()).view(q.shape)
    return out.to(q.dtype), lse


def kernel_for(device: torch.device) -> Kernel:
    return cpu_flash if device.type == "cpu" and flash_works() else matmul_attention


@functools.cache
def flash_works() -> bool:
    """Whether this build of torch has the fused CPU operator with grouped heads; it is not a documented interface."""
    q = torch.linspace(-1.0, 1.0, 4 * 3 * 8).view(1, 4, 3, 8)
    k = torch.linspace(1.0, -1.0, 2 * 3 * 8).view(1, 2, 3, 8)
    try:
        out, lse = cpu_flash(q, k, q[:, :2], causal=True)
    except (AttributeError, RuntimeError, TypeError):
        return False
    expected, expected_lse = matmul_attention(q, k, q[:, :2], causal=True)
    return torch.allclose(out, expected, atol=1e-5) and torch.allclose(lse, expected_lse, atol=1e-5)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Attention over the union of two disjoint sets of keys, from the attention over each."""
    share_of_other = torch.sigmoid(other_lse - lse)[..., None]
    return torch.lerp(out, other, share_of_other.to(out.dtype))


class PagedAttention:
    """Attention of one step: called once a layer with that layer's queries, keys and values."""

    def __init__(self, plan: StepPlan, store: KvStore, kernel: Kernel) -> None:
        self._plan = plan
        self._store = store
        self._kernel = kernel

    def __call__(self, layer: int, q: Tensor, pairs: Tensor) -> Tensor:
        """Rotated q: [tokens, heads, head_dim], pairs: [tokens, 2, kv_heads, head_dim] -> [tokens, heads, head_dim]"""
        self._store.write(layer, self._plan.slots, pairs)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for chunk in self._plan.chunks:
            rows = slice(chunk.first, chunk.last)
            out[rows] = self._prefill(layer, chunk, q[rows], pairs[rows])
        for bucket in self._plan.buckets:
            out.index_copy_(0, bucket.rows, self._decode(layer, bucket, q.index_select(0, bucket.rows)))
        return out

    def _prefill(self, layer: int, chunk: PrefillChunk, q: Tensor, pairs: Tensor) -> Tensor:
        queries = q.transpose(0, 1)[None]  # [1, heads, queries, head_dim]
        out, lse = self._kernel(queries, *_heads_first(pairs[None]), causal=True)
        if chunk.prefix is not None:
            stored = self._store.gather(layer, chunk.prefix)
            out = merge(out, lse, *self._kernel(queries, *_heads_first(stored[None])))
        return out[0].transpose(0, 1)

    def _decode(self, layer: int, bucket: DecodeBucket, q: Tensor) -> Tensor:
        sequences, heads, head_dim = q.shape
        stored = self._store.gather(layer, bucket.slots).view(sequences, bucket.longest, 2, -1, head_dim)
        # The query heads that share a key head are the rows of one small product, so that keys are read once for all.
        queries = q.view(sequences, self._store.kv_heads, -1, head_dim)
        out, _ = self._kernel(queries, *_heads_first(stored), mask=bucket.mask)
        return out.reshape(sequences, heads, head_dim)


def _heads_first(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """[batch, tokens, 2, kv_heads, head_dim] -> keys and values, each [batch, kv_heads, tokens, head_dim]"""
    return pairs[:, :, 0].transpose(1, 2), pairs[:, :, 1].transpose(1, 2)
