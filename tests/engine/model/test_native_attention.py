"""The native library against the definition: all forms of keys and values, any head and block size, any company."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cacheaware_engine.attention import PagedAttention, matmul_attention
from cacheaware_engine.attention_costs import SEPARATELY, TOGETHER
from cacheaware_engine.cost_probe import measured_costs
from cacheaware_engine.errors import NoNativeAttention
from cacheaware_engine.kv_format import KvFormat, kv_format
from cacheaware_engine.kv_store import KvStore
from cacheaware_engine.native_attention import NativeAttention
from cacheaware_engine.settings import KvDtype
from cacheaware_engine.step_plan import SequenceWork
from cacheaware_engine.step_planner import StepPlanner
from cacheaware_engine.step_reads import Native


@dataclass(frozen=True, slots=True)
class Case:
    form: tuple[KvDtype, torch.dtype]
    heads: tuple[int, int]  # of keys, and of queries for each of them
    head_dim: int
    block_size: int
    prefix: int  # blocks that all share
    own: tuple[tuple[int, int], ...]  # of each sequence: tokens behind the prefix, and how many more the step adds
    chunks: bool  # prompts too
    window: int | None
    threads: int
    scale: float | None
    seed: int


FLOATS = kv_format(KvDtype.AUTO, torch.float32)
FORMS = [
    (KvDtype.AUTO, torch.float32),
    (KvDtype.AUTO, torch.bfloat16),
    (KvDtype.INT8, torch.float32),
    (KvDtype.INT8, torch.bfloat16),
    (KvDtype.FP8, torch.float32),
]


def store_of(
    *,
    blocks: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    form: KvFormat = FLOATS,
    layers: int = 1,
    device: str = "cpu",
) -> KvStore:
    return KvStore(
        num_layers=layers,
        num_blocks=blocks,
        block_size=block_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        kv_format=form,
        device=torch.device(device),
    )


own = st.tuples(st.integers(0, 200), st.sampled_from([1, 1, 2, 66, 150]))
cases = st.builds(
    Case,
    form=st.sampled_from(FORMS),
    heads=st.sampled_from([(1, 1), (2, 2), (1, 8), (3, 3), (2, 7)]),
    head_dim=st.sampled_from([1, 6, 8, 16, 20, 40, 64, 80, 128, 256]),
    block_size=st.sampled_from([1, 3, 16]),
    prefix=st.sampled_from([0, 0, 1, 9]),
    own=st.lists(own, min_size=1, max_size=6).map(tuple),
    chunks=st.booleans(),
    window=st.sampled_from([None, None, 1, 5, 70]),
    threads=st.sampled_from([1, 2, 3]),
    scale=st.sampled_from([None, 0.1]),
    seed=st.integers(0, 99),
)


@settings(max_examples=60, deadline=None)
@given(case=cases, sharing=st.booleans())
def test_computes_the_definition(native: NativeAttention, case: Case, sharing: bool) -> None:
    random = torch.Generator().manual_seed(case.seed)
    kv_heads, group = case.heads
    size, compute = case.block_size, case.form[1]
    starts = [case.prefix * size + own for own, _ in case.own]
    ends = [start + added for start, (_, added) in zip(starts, case.own, strict=True)]
    store, tables = stored(case, ends, random)
    rows = sum(added for _, added in case.own)
    q = torch.randn(rows, kv_heads * group, case.head_dim, generator=random).to(compute)
    newest = torch.randn(rows, 2, kv_heads, case.head_dim, generator=random).to(compute)
    work = [
        SequenceWork([0] * (end - start), start, table, True)
        for start, end, table in zip(starts, ends, tables, strict=True)
    ]
    costs = TOGETHER if sharing else SEPARATELY
    chunks = case.chunks or store.format.quantised  # torch's operations take what a prompt adds as it was computed
    planner = StepPlanner(store, compute, costs, [case.window], native=Native(case.threads, chunks))
    plan = planner.plan(work)
    threads = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    try:
        attention = PagedAttention(plan, store, matmul_attention, [case.window], native=native)
        out = attention(0, q, newest, case.scale)
    finally:
        torch.set_num_threads(threads)
    numbers, scales = store.stored(0)
    kept = numbers.view(store.format.storage).double() * (1.0 if scales is None else scales.double())
    row_of = {int(slot): row for row, slot in enumerate(plan.slots)}
    near, rounding = 5e-5, 0.0
    if compute is torch.bfloat16:  # the result is rounded, and torch's operations round the parts that they merge
        near, rounding = (5e-5, 2**-8) if chunks else (2e-2, 2**-6)
    for table, start, end in zip(tables, starts, ends, strict=True):
        slots = [table[token // size] * size + token % size for token in range(end)]
        for token in range(start, end):
            low = 0 if case.window is None else max(0, token + 1 - case.window)
            pairs = kept[slots[low : token + 1]].view(-1, 2, kv_heads, case.head_dim)
            row = row_of[slots[token]]
            expected = defined(q[row], pairs, case.scale)
            torch.testing.assert_close(out[row].double(), expected, atol=near, rtol=rounding)


def stored(case: Case, lengths: list[int], random: torch.Generator) -> tuple[KvStore, list[list[int]]]:
    """A store whose every slot holds something, NaN where no sequence has stored yet, and tables all over it."""
    size, kv_heads = case.block_size, case.heads[0]
    needed = [-(-length // size) - case.prefix for length in lengths]
    blocks = torch.randperm(case.prefix + sum(needed), generator=random).tolist()
    store = store_of(
        blocks=len(blocks), block_size=size, kv_heads=kv_heads, head_dim=case.head_dim, form=kv_format(*case.form)
    )
    numbers, _ = store.stored(0)
    if numbers.dtype.is_floating_point:
        numbers.fill_(float("nan"))
    prefix = [blocks.pop() for _ in range(case.prefix)]
    tables = [[*prefix, *(blocks.pop() for _ in range(count))] for count in needed]
    for table, length in zip(tables, lengths, strict=True):
        slots = torch.tensor([table[token // size] * size + token % size for token in range(length)])
        pairs = 2 * torch.randn(length, 2, kv_heads, case.head_dim, generator=random).to(store.format.compute)
        store.write(0, slots, pairs)
    return store, tables


def defined(q: Tensor, pairs: Tensor, scale: float | None) -> Tensor:
    """Of one query, in fp64. q: [heads, head_dim], pairs: [tokens, 2, kv_heads, head_dim], in fp64"""
    group = len(q) // pairs.shape[2]
    keys, values = (pairs[:, index].repeat_interleave(group, 1) for index in (0, 1))
    scores = torch.einsum("hd,thd->ht", q.double(), keys) * (scale if scale is not None else 1 / math.sqrt(q.shape[1]))
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values)


def test_scores_far_apart_leave_no_trace_but_the_largest(native: NativeAttention) -> None:
    """A key that fits a thousand times better: everything else weighs nothing, and nothing overflows."""
    store = store_of(blocks=30, block_size=4, kv_heads=1, head_dim=16)
    pairs = torch.full((100, 2, 1, 16), -300.0)
    pairs[37] = 300.0
    store.write(0, torch.arange(100), pairs)
    work = [SequenceWork([0], 99, range(25), True)]
    plan = StepPlanner(store, torch.float32, SEPARATELY, native=Native(1, chunks=True)).plan(work)
    attention = PagedAttention(plan, store, matmul_attention, [None], native=native)
    out = attention(0, torch.full((1, 2, 16), 100.0), pairs[99:])
    torch.testing.assert_close(out, torch.full((1, 2, 16), 300.0))


def test_queries_may_lie_between_other_numbers(native: NativeAttention) -> None:
    """As they do: queries, keys and values of a token are one row of a product."""
    store = store_of(blocks=8, block_size=4, kv_heads=2, head_dim=8)
    store.write(0, torch.arange(32), torch.randn(32, 2, 2, 8))
    work = [SequenceWork([0], 9, range(3), True), SequenceWork([0], 6, [5, 4], True)]
    row = torch.randn(2, 4 + 4, 8)
    plan = StepPlanner(store, torch.float32, SEPARATELY, native=Native(1, chunks=True)).plan(work)
    pairs = row[:, 4:].view(2, 2, 2, 8)
    attention = PagedAttention(plan, store, matmul_attention, [None], native=native)
    torch.testing.assert_close(attention(0, row[:, :4], pairs), attention(0, row[:, :4].clone(), pairs), rtol=0, atol=0)


@pytest.mark.parametrize("kv_dtype", list(KvDtype))
def test_costs_of_reading_can_be_measured(native: NativeAttention, kv_dtype: KvDtype) -> None:
    form = kv_format(kv_dtype, torch.float32)
    store = store_of(blocks=64, block_size=16, kv_heads=2, head_dim=16, form=form, layers=2)
    costs = measured_costs(store, matmul_attention, 4, native)
    assert all(math.isfinite(cost) and cost >= 0 for cost in (costs.own_token, costs.call, costs.token, costs.row))


def test_a_store_elsewhere_is_not_read(native: NativeAttention) -> None:
    elsewhere = store_of(blocks=2, block_size=4, kv_heads=1, head_dim=8, device="meta")
    assert not native.can_read(elsewhere)


@pytest.mark.parametrize(
    "content", [pytest.param(b"", id="empty"), pytest.param(b"\x7fELF" + b"\0" * 60, id="damaged")]
)
def test_a_file_that_is_no_library_is_refused_by_name(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("library") / "paged-attention.so"
    path.write_bytes(content)
    with pytest.raises(NoNativeAttention, match=r"paged-attention\.so"):
        NativeAttention(path)
