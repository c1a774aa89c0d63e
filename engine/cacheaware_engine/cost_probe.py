"""Measures what attention costs on this device, by attending to blocks that nobody uses yet.

On a CPU one thread measures, in its own processor time: what else the machine does at that moment does not count, and
costs relate to each other as they do on several threads.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from cacheaware_engine.attention import Kernel, PagedAttention
from cacheaware_engine.attention_costs import SEPARATELY, AttentionCosts, Reading, measure
from cacheaware_engine.kv_reads import Run
from cacheaware_engine.kv_store import KvStore
from cacheaware_engine.native_attention import NativeAttention
from cacheaware_engine.paged_reads import Stretch, paged_reads
from cacheaware_engine.step_plan import DecodeBucket, Reads, Segment, StepPlan

LONG: Final = 2048
LEAST: Final = 256
CALLS: Final = 3  # layers in one reading: few, so that some readings are not disturbed


@torch.inference_mode()
def measured_costs(store: KvStore, kernel: Kernel, heads: int, native: NativeAttention | None = None) -> AttentionCosts:
    """Costs for this store's layout, and for the native library if there is one. A store of a few hundred tokens has no
    prefix that is worth a call of its own."""
    long = min(LONG, store.num_blocks * store.block_size)
    if long < LEAST:
        return SEPARATELY
    rows = torch.randn(long, 2, store.kv_heads, store.head_dim, dtype=store.format.compute, device=store.device)
    everywhere = torch.arange(long, device=store.device)
    for layer in range(store.num_layers):  # memory that was never written is no memory yet, and reads too fast
        store.write(layer, everywhere, rows)
    layers = itertools.cycle(range(store.num_layers))  # another one each time, as in a step: caches do not help
    nothing = everywhere[:0]

    @functools.cache
    def plan_of(reading: Reading) -> StepPlan:
        reads = _by_pieces(reading, store) if native is not None else _by_operations(reading, everywhere)
        return StepPlan(nothing, nothing, nothing, nothing, {None: reads}, ())

    def attend(reading: Reading) -> None:
        q = rows[: reading.members, :1, :1].expand(-1, 1, heads, -1)[:, 0].contiguous()
        attention = PagedAttention(plan_of(reading), store, kernel, [None] * store.num_layers, native=native)
        for _ in range(CALLS):
            attention(next(layers), q, rows[:0])
        if store.device.type == "cuda":
            torch.cuda.synchronize(store.device)

    if store.device.type != "cpu":
        return measure(attend, long, calls=CALLS)
    with _one_thread():
        return measure(attend, long, calls=CALLS, clock=time.thread_time)


def _by_operations(reading: Reading, everywhere: Tensor) -> Reads:
    members = reading.members
    slots = everywhere[torch.arange(members * reading.own, device=everywhere.device) % len(everywhere)]
    bucket = DecodeBucket(0, members, slots, reading.own, None)
    rounds = ((Segment(0, members, Run(0, reading.shared)),),) if reading.shared else ()
    return Reads(None, (bucket,), (), rounds, 0, 0, 0)


def _by_pieces(reading: Reading, store: KvStore) -> Reads:
    table = torch.arange(store.num_blocks, dtype=torch.int32)
    last_start = store.num_blocks * store.block_size - reading.own
    starts = [member * reading.own % (last_start + 1) for member in range(reading.members)]
    stretches = [Stretch(row, row + 1, 0, first, first + reading.own) for row, first in enumerate(starts)]
    if reading.shared:
        stretches.append(Stretch(0, reading.members, 0, 0, reading.shared))
    return Reads(paged_reads(stretches, [table], store.kv_heads, 1), (), (), (), 0, 0, 0)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
