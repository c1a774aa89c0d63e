"""Every kernel computes the definition of attention; the plan pads little and never lets strangers' slots in."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cacheaware_engine.attention import (
    Kernel,
    PagedAttention,
    cpu_flash,
    flash_works,
    kernel_for,
    matmul_attention,
    merge,
)
from cacheaware_engine.attention_costs import SEPARATELY, TOGETHER, AttentionCosts
from cacheaware_engine.kv_format import kv_format
from cacheaware_engine.kv_store import KvStore
from cacheaware_engine.linear import Linear, packing_works
from cacheaware_engine.settings import KvDtype
from cacheaware_engine.step_plan import SequenceWork
from cacheaware_engine.step_planner import StepPlanner
from cacheaware_engine.step_reads import bucket_sizes

COSTS = [pytest.param(SEPARATELY, id="separately"), pytest.param(TOGETHER, id="together")]

KERNELS = [
    pytest.param(
        cpu_flash, id="cpu-flash", marks=pytest.mark.skipif(not flash_works(), reason="torch lacks the operator")
    ),
    pytest.param(matmul_attention, id="matmul"),
]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def by_definition(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One head, one query at a time, in fp64. `hidden` [queries, keys] tells what a query may not see."""
    out, lse = torch.empty(q.shape), torch.empty(q.shape[:-1])
    group = q.shape[1] // k.shape[1]
    for batch, head, query in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        scores = k[batch, head // group].double() @ q[batch, head, query].double() / math.sqrt(q.shape[-1])
        if hidden is not None:
            scores[hidden[query]] = float("-inf")
        lse[batch, head, query] = torch.logsumexp(scores, 0)
        out[batch, head, query] = torch.softmax(scores, 0) @ v[batch, head // group].double()
    return out, lse


@pytest.mark.parametrize("kernel", KERNELS)
class TestEveryKernel:
    @pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 8), (6, 2, 10), (3, 1, 18), (4, 1, 64)])
    def test_computes_the_definition(self, kernel: Kernel, heads: int, kv_heads: int, head_dim: int) -> None:
        q, k = random(2, heads, 5, head_dim), random(2, kv_heads, 9, head_dim)
        v = random(2, kv_heads, 9, head_dim, seed=1)
        out, lse = kernel(q, k, v)
        expected, expected_lse = by_definition(q, k, v)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=0)

    def test_causal_queries_see_only_what_came_before(self, kernel: Kernel) -> None:
        q, k, v = random(1, 4, 7, 8), random(1, 2, 7, 8), random(1, 2, 7, 8, seed=1)
        out, lse = kernel(q, k, v, causal=True)
        expected, expected_lse = by_definition(q, k, v, torch.ones(7, 7, dtype=torch.bool).triu(1))
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=0)

    def test_masked_keys_do_not_count(self, kernel: Kernel) -> None:
        q, k, v = random(1, 2, 3, 8), random(1, 2, 6, 8), random(1, 2, 6, 8, seed=1)
        mask = torch.zeros(1, 1, 1, 6)
        mask[..., 4:] = float("-inf")
        out, _ = kernel(q, k, v, mask=mask)
        torch.testing.assert_close(out, by_definition(q, k[:, :, :4], v[:, :, :4])[0], atol=1e-5, rtol=0)

    def test_reads_the_layout_of_the_store_in_place(self, kernel: Kernel) -> None:
        pairs = random(11, 2, 3, 8)
        k, v = pairs[None, :, 0].transpose(1, 2), pairs[None, :, 1].transpose(1, 2)
        q = random(1, 3, 2, 8)
        out, _ = kernel(q, k, v)
        torch.testing.assert_close(out, by_definition(q, k, v)[0], atol=1e-5, rtol=0)

    def test_two_parts_merge_into_the_whole(self, kernel: Kernel) -> None:
        q, k, v = random(1, 2, 4, 8), 5 * random(1, 2, 12, 8), random(1, 2, 12, 8, seed=1)
        parts = [kernel(q, k[:, :, part], v[:, :, part]) for part in (slice(0, 3), slice(3, 12))]
        whole, _ = by_definition(q, k, v)
        torch.testing.assert_close(merge(*parts[0], *parts[1]), whole, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("costs", COSTS)
    def test_decodes_and_chunks_over_pages_are_exact(self, kernel: Kernel, costs: AttentionCosts) -> None:
        store = small_store()
        work = [SequenceWork([0], 6, [3, 1], False), SequenceWork([0] * 3, 5, [2, 0], False)]
        plan = StepPlanner(store, torch.float32, costs).plan(work)
        q, pairs, stored = random(4, 4, 8), random(4, 2, 2, 8), random(16, 2, 2, 8, seed=2)
        store.write(0, torch.arange(16), stored)
        out = PagedAttention(plan, store, kernel, [None])(0, q, pairs)
        decode = torch.cat([stored[12:16], stored[4:6], pairs[:1]])  # block 3, two tokens of block 1, itself
        chunk = torch.cat([stored[8:12], stored[0:1], pairs[1:]])  # block 2, one token of block 0, itself
        torch.testing.assert_close(out[:1], attended(q[:1], decode), atol=1e-5, rtol=0)
        for row in (1, 2, 3):
            torch.testing.assert_close(
                out[row : row + 1], attended(q[row : row + 1], chunk[: 5 + row]), atol=1e-5, rtol=0
            )

    def test_not_a_number_in_a_strangers_slot_never_shows(self, kernel: Kernel) -> None:
        store = small_store()
        store.write(0, torch.arange(16), torch.full((16, 2, 2, 8), float("nan")))
        for slots in (torch.arange(2), torch.arange(8, 15)):  # what the two sequences have stored before
            store.write(0, slots, random(len(slots), 2, 2, 8))
        work = [SequenceWork([0], 2, [0], False), SequenceWork([0], 7, [2, 3], False)]
        plan = StepPlanner(store, torch.float32, SEPARATELY).plan(work)
        (bucket,) = plan.reads[None].buckets
        assert bucket.mask is not None, "the two share padding, or this test shows nothing"
        out = PagedAttention(plan, store, kernel, [None])(0, random(2, 4, 8), random(2, 2, 2, 8))
        assert torch.isfinite(out).all()


def small_store(num_blocks: int = 4) -> KvStore:
    return KvStore(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=4,
        kv_heads=2,
        head_dim=8,
        kv_format=kv_format(KvDtype.AUTO, torch.float32),
        device=torch.device("cpu"),
    )


def attended(q: Tensor, pairs: Tensor) -> Tensor:
    """q: [1, heads, head_dim], pairs: [tokens, 2, kv_heads, head_dim] -> [1, heads, head_dim]"""
    k, v = pairs[None, :, 0].transpose(1, 2), pairs[None, :, 1].transpose(1, 2)
    return by_definition(q[:, :, None], k, v)[0][:, :, 0]


def test_other_devices_than_the_cpu_use_the_plain_kernel() -> None:
    assert kernel_for(torch.device("meta")) is matmul_attention


@given(st.lists(st.integers(1, 9000), max_size=60))
def test_buckets_cover_the_sequences_in_order_and_pad_little(lengths: list[int]) -> None:
    sizes = bucket_sizes(lengths, 8192)
    assert sum(sizes) == len(lengths)
    first = 0
    for size in sizes:
        bucket = lengths[first : first + size]
        first += size
        assert size >= 1
        assert min(bucket) >= 0.8 * max(bucket) or max(bucket) - min(bucket) <= 64
        assert size == 1 or size * max(bucket) <= 8192


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        pytest.param([512] * 8, [8], id="equal-lengths-are-one-call"),
        pytest.param([4000, 30, 20, 10], [1, 3], id="one-long-context-stays-alone"),
        pytest.param([10, 40, 20, 60], [4], id="short-ones-go-together-in-any-order"),
        pytest.param([4096, 4096, 4096], [2, 1], id="no-more-slots-than-a-cache-holds"),
        pytest.param([20_000], [1], id="a-context-beyond-that-still-runs"),
        pytest.param([], [], id="no-decodes"),
    ],
)
def test_buckets_of_known_lengths(lengths: list[int], sizes: list[int]) -> None:
    assert bucket_sizes(lengths, 8192) == sizes


@pytest.mark.skipif(not packing_works(), reason="this torch cannot pack weights")
@pytest.mark.parametrize("rows", [1, 2, 7, 65])
@pytest.mark.parametrize("worth_packing", [pytest.param(0, id="packed"), pytest.param(1000, id="transposed")])
def test_weights_multiply_the_same_in_any_form(monkeypatch: pytest.MonkeyPatch, rows: int, worth_packing: int) -> None:
    monkeypatch.setattr("cacheaware_engine.linear._WORTH_PACKING", worth_packing)
    weight, bias, x = random(10, 6), random(10), random(rows, 6)
    torch.testing.assert_close(Linear(weight)(x), x @ weight.T, atol=1e-5, rtol=0)
    torch.testing.assert_close(Linear(weight, bias)(x), x @ weight.T + bias, atol=1e-5, rtol=0)
    before = random(rows, 10)
    torch.testing.assert_close(Linear(weight).onto(before, x), before + x @ weight.T, atol=1e-5, rtol=0)
    torch.testing.assert_close(Linear(weight, bias).onto(before, x), before + x @ weight.T + bias, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("members", [1, 3])
def test_a_long_prefix_divided_among_threads_is_exact(kernel: Kernel, members: int) -> None:
    store = KvStore(
        num_layers=1,
        num_blocks=300,
        block_size=4,
        kv_heads=2,
        head_dim=8,
        kv_format=kv_format(KvDtype.AUTO, torch.float32),
        device=torch.device("cpu"),
    )
    stored, q, pairs = random(1200, 2, 2, 8), random(members, 4, 8), random(members, 2, 2, 8, seed=3)
    store.write(0, torch.arange(1200), stored)
    work = [SequenceWork([0], 1024, [*range(256), 260 + member], False) for member in range(members)]
    plan = StepPlanner(store, torch.float32, TOGETHER).plan(work)
    divided = PagedAttention(plan, store, kernel, [None], tasks=4)(0, q, pairs)
    whole = PagedAttention(plan, store, kernel, [None], tasks=1)(0, q, pairs)
    assert plan.reads[None].tokens_in_place >= 1024
    torch.testing.assert_close(divided, whole, atol=1e-5, rtol=0)
    for member in range(members):
        context = torch.cat([stored[:1024], pairs[member : member + 1]])
        row = slice(member, member + 1)
        torch.testing.assert_close(divided[row], attended(q[row], context), atol=1e-5, rtol=0)
