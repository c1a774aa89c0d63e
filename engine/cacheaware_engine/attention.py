"""Exact attention over paged keys and values, for one layer at a time.

Every row attends in parts, each of different keys, and the parts are merged by their log-sum-exp: a decode to what is
its own, gathered with that of others, a chunk causally to itself, and rows of any kind to segments that they read
together or in place. Where the native library is there, it does all of that in one call. What is read how is decided in
`step_reads.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from cacheaware_engine.kv_reads import Run
from cacheaware_engine.kv_store import KvStore
from cacheaware_engine.native_attention import NativeAttention
from cacheaware_engine.step_plan import (
    LEAST_SPLIT,
    DecodeBucket,
    PrefillChunk,
    Reads,
    Segment,
    StepPlan,
    Window,
)


class Kernel(Protocol):
    """softmax(q · kᵗ · scale + mask) · v, and the log-sum-exp of the scores.

    q: [batch, heads, queries, head_dim], k and v: [batch, kv_heads, keys, head_dim] with contiguous last dimension;
    each key head serves heads / kv_heads consecutive query heads. There is at least one key, and no query has all
    its keys masked. `causal` needs as many keys as queries. `scale` is 1 / √head_dim if it is not given.
    -> out [batch, heads, queries, head_dim], lse [batch, heads, queries] fp32
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]: ...


def cpu_flash(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """torch's fused attention on a CPU, by the operator that also returns the log-sum-exp."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse


def matmul_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, on any device, with the scores in fp32."""
    batch, heads, queries, head_dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads * queries, head_dim)
    scores = torch.matmul(grouped.float(), k.float().transpose(-1, -2)) * (
        scale if scale is not None else 1 / math.sqrt(head_dim)
    )
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

    def __init__(
        self,
        plan: StepPlan,
        store: KvStore,
        kernel: Kernel,
        windows: Sequence[Window],
        tasks: int = 1,
        native: NativeAttention | None = None,
    ) -> None:
        """`windows` are those of the layers; `tasks` is how many calls' worth of work the device does at once.
        `native` reads what the plan says."""
        self._plan = plan
        self._store = store
        self._kernel = kernel
        self._windows = windows
        self._tasks = tasks
        self._native = native

    def __call__(self, layer: int, q: Tensor, pairs: Tensor, scale: float | None = None) -> Tensor:
        """Rotated q: [tokens, heads, head_dim], pairs: [tokens, 2, kv_heads, head_dim] -> [tokens, heads, head_dim]"""
        self._store.write(layer, self._plan.slots, pairs)
        reads = self._plan.reads[self._windows[layer]]
        if reads.paged is None:
            return self._in_parts(layer, reads, 0, q, pairs, scale)
        assert self._native is not None, "this step was planned for the native library"
        first_rest = reads.paged.rows
        out = torch.empty(q.shape, dtype=torch.float32)
        self._native(layer, reads.paged, self._store, q, out, scale)
        out = out.to(q.dtype)
        if first_rest < len(q):
            out[first_rest:] = self._in_parts(layer, reads, first_rest, q[first_rest:], pairs[first_rest:], scale)
        return out

    def _in_parts(
        self, layer: int, reads: Reads, first_row: int, q: Tensor, pairs: Tensor, scale: float | None
    ) -> Tensor:
        """All rows from `first_row` on, which is the first of `q` and `pairs`."""
        # The query heads that share a key head are rows of one product, so that keys are read once for all.
        grouped = q.view(len(q), self._store.kv_heads, -1, q.shape[-1])  # [rows, kv_heads, group, head_dim]

        def rows(first: int, last: int) -> slice:
            return slice(first - first_row, last - first_row)

        parts = [
            self._decode(layer, bucket, grouped[rows(bucket.first, bucket.last)], scale) for bucket in reads.buckets
        ]
        for chunk in reads.chunks:
            own = rows(chunk.first, chunk.last)
            parts.append(self._chunk(layer, chunk, q[own], pairs[own], scale))
        out, lse = _joined(parts)
        for number, segments in enumerate(reads.rounds):
            own = rows(segments[0].first, segments[-1].last)
            other, other_lse = self._round(layer, segments, grouped[own], scale)
            before = lse[own]
            out[own] = merge(out[own], before, other, other_lse)
            if number + 1 < len(reads.rounds):
                lse[own] = torch.logaddexp(before, other_lse)
        return out.flatten(1, 2)

    def _decode(self, layer: int, bucket: DecodeBucket, q: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        if len(q) == 1:
            return self._together(layer, bucket.slots, q, scale)
        stored = self._store.gather(layer, bucket.slots)
        pairs = stored.view(len(q), bucket.longest, *stored.shape[1:])
        return self._kernel(q, *_heads_first(pairs), mask=bucket.mask, scale=scale)

    def _chunk(
        self, layer: int, chunk: PrefillChunk, q: Tensor, pairs: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        queries = q.transpose(0, 1)[None]  # [1, heads, queries, head_dim]
        if chunk.before is not None:
            pairs = torch.cat([self._store.gather(layer, chunk.before), pairs])
        causal = chunk.mask is None
        out, lse = self._kernel(queries, *_heads_first(pairs[None]), causal=causal, mask=chunk.mask, scale=scale)
        heads = (len(q), self._store.kv_heads, -1)
        return out[0].transpose(0, 1).reshape(*heads, q.shape[-1]), lse[0].transpose(0, 1).reshape(heads)

    def _round(self, layer: int, segments: Sequence[Segment], q: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """What the segments' rows, and those between them, attend to in this round; nothing weighs nothing. The first
        row of `q` is that of the first segment."""
        if len(segments) == 1:
            return self._together(layer, segments[0].part, q, scale)
        first = segments[0].first
        out = q.new_zeros(q.shape)
        lse = q.new_full(out.shape[:-1], float("-inf"), dtype=torch.float32)
        for segment in segments:
            rows = slice(segment.first - first, segment.last - first)
            out[rows], lse[rows] = self._together(layer, segment.part, q[rows], scale)
        return out, lse

    def _together(self, layer: int, part: Run | Tensor, q: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """All rows of `q` as one block of queries, so that the part's keys are read once for each of their heads."""
        rows = q.transpose(0, 1)  # [kv_heads, rows, group, head_dim]
        queries = rows.flatten(1, 2)[None]
        found: list[tuple[Tensor, Tensor]] = []
        for pairs in self._store.pieces(layer, part):
            splits = self._splits(len(pairs))
            split = pairs.view(splits, -1, *pairs.shape[1:])
            found.append(self._kernel(queries.expand(splits, -1, -1, -1), *_heads_first(split), scale=scale))
        out, lse = _joined(found)
        if len(out) > 1:
            out = (out * torch.softmax(lse, 0)[..., None].to(out.dtype)).sum(0, keepdim=True)
            lse = torch.logsumexp(lse, 0, keepdim=True)
        return out[0].reshape(rows.shape).transpose(0, 1), lse[0].reshape(rows.shape[:-1]).transpose(0, 1)

    def _splits(self, keys: int) -> int:
        """Into how many tasks to divide a segment, so that its key heads spread evenly over the device."""
        splits = 1
        while (
            self._tasks > 1
            and splits * self._store.kv_heads < 4 * self._tasks
            and keys % (2 * splits) == 0
            and keys // (2 * splits) >= LEAST_SPLIT
        ):
            splits *= 2
        return splits


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of several calls, one after the other."""
    if len(parts) == 1:
        return parts[0]
    outs, sums = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(sums)


def _heads_first(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """[batch, tokens, 2, kv_heads, head_dim] -> keys and values, each [batch, kv_heads, tokens, head_dim]"""
    return pairs[:, :, 0].transpose(1, 2), pairs[:, :, 1].transpose(1, 2)
