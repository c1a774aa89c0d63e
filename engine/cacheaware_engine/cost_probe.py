"""Measures what attention costs on this device, by attending to blocks that nobody uses yet.

On a CPU one thread measures, in its own processor time: what else the machine does at that moment does not count, and
costs relate to each other as they do on several threads.
"""

from __future__ import annotations

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
from cacheaware_engine.step_plan import Comb, DecodeBucket, PlacedBucket, Reads, Segment, StepPlan

LONG: Final = 2048
LEAST: Final = 256
CALLS: Final = 3  # layers in one reading: few, so that some readings are not disturbed


@torch.inference_mode()
def measured_costs(store: KvStore, kernel: Kernel, heads: int) -> AttentionCosts:
    """Costs for this store's layout. A store of a few hundred tokens has no prefix that is worth a call of its own."""
    long = min(LONG, store.num_blocks * store.block_size)
    if long < LEAST:
        return SEPARATELY
    rows = torch.randn(long, 2, store.kv_heads, store.head_dim, dtype=store.format.compute, device=store.device)
    everywhere = torch.arange(long, device=store.device)
    for layer in range(store.num_layers):  # memory that was never written is no memory yet, and reads too fast
        store.write(layer, everywhere, rows)
    layers = itertools.cycle(range(store.num_layers))  # another one each time, as in a step: caches do not help
    nothing = everywhere[:0]

    def attend(reading: Reading) -> None:
        if store.format.quantised and reading.placed:  # what has to be widened is not read in place
            reading = Reading(reading.members, reading.placed)
        bucket = _bucket(reading, everywhere)
        rounds = ((Segment(0, reading.members, Run(0, reading.in_place)),),) if reading.in_place else ()
        plan = StepPlan(nothing, nothing, nothing, nothing, {None: Reads((bucket,), (), rounds, 0, 0, 0)}, ())
        q = rows[: reading.members, :1, :1].expand(-1, 1, heads, -1)[:, 0].contiguous()
        attention = PagedAttention(plan, store, kernel, [None] * store.num_layers)
        for _ in range(CALLS):
            attention(next(layers), q, rows[:0])
        if store.device.type == "cuda":
            torch.cuda.synchronize(store.device)

    if store.device.type != "cpu":
        return measure(attend, long, calls=CALLS)
    with _one_thread():
        return measure(attend, long, calls=CALLS, clock=time.thread_time)


def _bucket(reading: Reading, everywhere: Tensor) -> DecodeBucket | PlacedBucket:
    members = reading.members
    if reading.placed:
        combs = (Comb(members, 0, min(reading.placed, (len(everywhere) - reading.placed) // max(1, members - 1))),)
        return PlacedBucket(0, members, reading.placed, combs, None, None, None, None)
    slots = everywhere[torch.arange(members * reading.gathered, device=everywhere.device) % len(everywhere)]
    return DecodeBucket(0, members, slots, reading.gathered, None)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
