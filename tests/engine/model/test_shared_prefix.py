"""Sequences that read a prefix together, in place or not, compute what each of them computes alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheaware_engine.attention_costs import SEPARATELY, TOGETHER, AttentionCosts
from cacheaware_engine.native_attention import NativeAttention
from cacheaware_engine.runner import ModelRunner, SequenceWork
from cacheaware_engine.testing import native_here

Tiny = Callable[[str], Any]
BLOCK = 4
VOCABULARY = 256
KINDS = ("llama-gqa", "llama-mha", "llama-mqa-biases", "qwen3", "mistral-window", "qwen2-some-windows")
SOMETIMES = AttentionCosts(own_token=1.0, call=40.0, token=0.2, row=0.1)
"""Long or popular prefixes are shared, others are not."""


@dataclass(frozen=True, slots=True)
class Member:
    own: int  # tokens behind the prefix, before the step
    added: int  # tokens that the step computes: one is a decode


@dataclass(frozen=True, slots=True)
class Family:
    """Sequences on one prefix."""

    blocks: int
    members: tuple[Member, ...]


members = st.builds(Member, own=st.integers(0, 11), added=st.sampled_from([1, 1, 1, 2, 7]))
families = st.builds(
    Family, blocks=st.sampled_from([0, 1, 3, 12]), members=st.lists(members, min_size=1, max_size=4).map(tuple)
)


def compute(
    network: Any,
    families: list[Family],
    costs: AttentionCosts,
    seed: int,
    in_place: bool,
    native: NativeAttention | None = None,
) -> torch.Tensor:
    """Logits after every sequence's newest token, all of them in one last step."""
    rng = random.Random(seed)
    free = list(range(200))
    if not in_place:
        rng.shuffle(free)
    runner = ModelRunner(network, num_blocks=200, block_size=BLOCK, costs=costs, native=native)
    work = []
    for family in families:
        prefix = tokens(rng, family.blocks * BLOCK)
        shared = [free.pop(0) for _ in range(family.blocks)]
        if prefix:
            runner.forward([SequenceWork(prefix, 0, shared, sample=False)])
        for member in family.members:
            own, added = tokens(rng, member.own), tokens(rng, member.added)
            table = [*shared, *(free.pop(0) for _ in range(-(-(member.own + member.added) // BLOCK)))]
            if own:
                runner.forward([SequenceWork(own, len(prefix), table, sample=False)])
            work.append(SequenceWork(added, len(prefix) + member.own, table, sample=True))
    return runner.forward(work).logits


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(KINDS),
    families=st.lists(families, min_size=1, max_size=4),
    costs=st.sampled_from([TOGETHER, SOMETIMES]),
    in_place=st.booleans(),
    native=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_batch_computes_what_its_sequences_compute_for_themselves(
    tiny: Tiny, kind: str, families: list[Family], costs: AttentionCosts, in_place: bool, native: bool, seed: int
) -> None:
    network = tiny(kind).ours.network
    together = compute(network, families, costs, seed, in_place, native_here() if native else None)
    alone = compute(network, families, SEPARATELY, seed, in_place)
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)


def decodes(runner: ModelRunner, groups: int, members: int, blocks: int) -> list[SequenceWork]:
    """A step of decodes on resident prefixes, one own token each."""
    free = iter(range(runner.num_blocks))
    work = []
    for _ in range(groups):
        shared = [next(free) for _ in range(blocks)]
        runner.forward([SequenceWork([1] * (blocks * BLOCK), 0, shared, sample=False)])
        work += [SequenceWork([2], blocks * BLOCK, [*shared, next(free)], sample=True) for _ in range(members)]
    return work


@pytest.mark.parametrize(
    ("costs", "amplification"),
    [pytest.param(TOGETHER, 1.0, id="on"), pytest.param(SEPARATELY, 7.5, id="off")],
)
def test_a_group_reads_its_prefix_once(
    tiny: Tiny, costs: AttentionCosts, amplification: float, either: NativeAttention | None
) -> None:
    network = tiny("llama-gqa").ours.network
    runner = ModelRunner(network, 200, BLOCK, costs=costs, native=either)
    output = runner.forward(decodes(runner, groups=2, members=8, blocks=32))
    assert output.kv_bytes_read / output.unique_kv_bytes == pytest.approx(amplification, rel=0.05)


def test_several_groups_share_in_one_step_and_say_so(tiny: Tiny) -> None:
    runner = ModelRunner(tiny("llama-gqa").ours.network, num_blocks=200, block_size=BLOCK, costs=TOGETHER)
    output = runner.forward(decodes(runner, groups=3, members=2, blocks=5))
    assert [(group.members, group.tokens) for group in output.groups] == [(2, 20)] * 3


def test_neighbouring_blocks_are_read_without_a_copy(tiny: Tiny) -> None:
    runner = ModelRunner(tiny("llama-gqa").ours.network, num_blocks=200, block_size=BLOCK, costs=TOGETHER)
    runner.forward([SequenceWork([1] * 40, 0, range(3, 13), sample=False)])
    output = runner.forward([SequenceWork([1], 40, range(3, 14), sample=True)])
    assert output.kv_bytes_in_place == 40 * runner.bytes_per_token


def test_the_native_library_copies_nothing(tiny: Tiny, native: NativeAttention) -> None:
    runner = ModelRunner(
        tiny("llama-gqa").ours.network, num_blocks=200, block_size=BLOCK, costs=TOGETHER, native=native
    )
    runner.forward([SequenceWork([1] * 40, 0, range(40, 20, -2), sample=False)])
    output = runner.forward([SequenceWork([1], 40, range(40, 18, -2), sample=True)])
    assert output.kv_bytes_in_place == output.kv_bytes_read == 41 * runner.bytes_per_token


def test_logits_after_any_tokens_of_a_chunk_can_be_had(tiny: Tiny) -> None:
    model = tiny("llama-gqa")
    prompt = tokens(random.Random(5), 20)
    runner = ModelRunner(model.ours.network, num_blocks=8, block_size=BLOCK)
    some = runner.forward([SequenceWork(prompt, 0, range(5), sample=(2, 11, 19))]).logits
    for row, length in zip(some, (3, 12, 20), strict=True):
        alone = runner.forward([SequenceWork(prompt[:length], 0, range(5), sample=True)]).logits[0]
        torch.testing.assert_close(row, alone, atol=1e-4, rtol=0)
