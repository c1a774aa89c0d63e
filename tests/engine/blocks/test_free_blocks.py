"""Free blocks: every block is free once or in use once, sequences lie in one piece where there is room, hints wait."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cacheaware_api.wire import GroupHint, Hints
from cacheaware_engine.blocks import Admitted, BlockId, BlockKey, BlockPool, Grown, Request
from cacheaware_engine.blocks.free_blocks import FreeBlocks

CAPACITY = 24
GROUPS = st.sampled_from(["a", "b"])


class FreeBlocksMachine(RuleBasedStateMachine):
    """Beside it a plain set of what is free."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = FreeBlocks(CAPACITY)
        self.free = set(range(CAPACITY))
        self.now = 0.0

    @precondition(lambda self: self.free)
    @rule(after=st.none() | st.integers(0, CAPACITY - 1), more=st.integers(1, 8), group=st.none() | GROUPS)
    def take(self, after: int | None, more: int, group: str | None) -> None:
        open_before = len(self.free) - sum(self.blocks.set_aside.values())
        aside = self.blocks.set_aside
        block = self.blocks.take(None if after is None else BlockId(after), more, group)
        assert block in self.free
        self.free.remove(block)
        for name, count in aside.items():
            others = self.blocks.set_aside.get(name, 0)
            assert others == count or name == group or not open_before, "others' blocks only when nothing else is free"

    @precondition(lambda self: len(self.free) < CAPACITY)
    @rule(pick=st.randoms(use_true_random=False), again=st.booleans())
    def give(self, pick: object, again: bool) -> None:
        block = pick.choice(sorted(set(range(CAPACITY)) - self.free))  # type: ignore[attr-defined]
        self.blocks.give(BlockId(block))
        if again:
            self.blocks.take_back(BlockId(block))
        else:
            self.free.add(block)

    @rule(group=GROUPS, count=st.integers(0, 10), seconds=st.integers(1, 3))
    def reserve(self, group: str, count: int, seconds: int) -> None:
        others = sum(blocks for name, blocks in self.blocks.set_aside.items() if name != group)
        assert self.blocks.reserve(group, count, self.now + seconds) == min(count, len(self.free) - others)

    @rule()
    def wait(self) -> None:
        self.now += 1
        self.blocks.expire(self.now)

    @rule()
    def wait_long(self) -> None:
        self.now += 4
        self.blocks.expire(self.now)
        assert not self.blocks.set_aside

    @invariant()
    def every_block_is_free_once_or_not_at_all(self) -> None:
        assert sorted(self.blocks.ids()) == sorted(self.free)
        assert len(self.blocks) == len(self.free)
        assert self.blocks.longest == self._longest_open()

    def _longest_open(self) -> int:
        stretches = list(self.blocks._open.stretches())
        assert all(end < start for (_, end), (start, _) in pairwise(stretches)), "maximal"
        return max((end - start for start, end in stretches), default=0)


TestFreeBlocks = FreeBlocksMachine.TestCase


def request(name: str, blocks: int, *, group: str | None = None, most: int = 60) -> Request:
    return Request(name, "t", 1, keys=[[]], blocks=[blocks], max_blocks=most, group=group)


def pool(capacity: int = 100) -> BlockPool:
    return BlockPool(capacity, 4, 16, clock=lambda: 0.0)


def admitted(blocks: BlockPool, wanted: Request) -> Request:
    blocks.submit(wanted)
    assert isinstance(blocks.admit(wanted), Admitted)
    return wanted


def pieces(wanted: Request) -> int:
    (table,) = wanted.tables
    return 1 + sum(after != block + 1 for block, after in pairwise(table))


def test_a_request_lies_in_one_piece_where_there_is_one() -> None:
    blocks = pool()
    for turn in range(4):
        assert pieces(admitted(blocks, request(f"r{turn}", 9))) == 1


def test_requests_that_grow_together_stay_in_one_piece_each() -> None:
    blocks = pool()
    both = [admitted(blocks, request(name, 4)) for name in "ab"]
    for _ in range(10):
        for one in both:
            assert isinstance(blocks.grow(one, 0), Grown)
    assert [pieces(one) for one in both] == [1, 1]
    layout = blocks.layout()
    assert (layout.sequences, layout.extents) == (2, 2)


def test_what_was_evicted_block_by_block_is_given_in_one_piece() -> None:
    """A cache in use has no free block: each is evicted for the one that is asked for, the end of a sequence first."""
    clock = itertools.count()
    blocks = BlockPool(14, 4, 4, clock=lambda: float(next(clock)))
    for turn in range(2):
        old = admitted(blocks, request(f"old{turn}", 7, most=7))
        for index in range(7):
            blocks.fill(old, 0, index, BlockKey(f"{turn} {index}".encode()))
        blocks.release(old)
    assert blocks.ledger().free == 0
    assert pieces(admitted(blocks, request("new", 7, most=7))) == 1
    blocks.check_integrity()


def test_pieces_that_are_too_small_are_used_all_the_same() -> None:
    blocks = pool(16)
    small = [admitted(blocks, request(f"s{i}", 1)) for i in range(8)]
    for one in sorted(small, key=lambda one: one.tables[0])[::2]:
        blocks.release(one)
    assert pieces(admitted(blocks, request("large", 6))) > 1
    blocks.check_integrity()


def hint(**groups: int) -> Hints:
    return Hints({name: GroupHint(blocks, ttl_s=10) for name, blocks in groups.items()})


def test_a_hinted_group_finds_its_blocks_side_by_side_after_others_took_what_was_open() -> None:
    blocks = pool()
    assert blocks.set_hints(hint(docs=8)) == {"docs": 8}
    while blocks.layout().longest_free > 2:
        admitted(blocks, request(f"other{blocks.ledger().free}", 1, most=2))
        if len(blocks.running) == 16:
            blocks.release(blocks.running[0])
            break
    assert pieces(admitted(blocks, request("hinted", 7, group="docs"))) == 1
    assert blocks.set_hints(hint()) == {"docs": 0}


def test_hints_set_aside_a_tenth_of_the_cache_at_most() -> None:
    blocks = pool(100)
    assert blocks.set_hints(hint(a=7, b=7)) == {"a": 7, "b": 3}
    assert blocks.set_hints(hint(a=2)) == {"a": 2, "b": 3}
    assert blocks.set_hints(hint(b=0)) == {"a": 2}


def test_hints_never_keep_a_block_from_anybody() -> None:
    blocks = pool(30)
    blocks.set_hints(hint(a=3))
    wanted = admitted(blocks, request("all", 30, most=30))
    assert len(wanted.tables[0]) == 30
    assert blocks.ledger().free == 0
    blocks.check_integrity()


def test_hints_charge_nobody_and_end_with_their_time() -> None:
    now = 0.0
    blocks = BlockPool(50, 4, 4, clock=lambda: now)
    before = blocks.ledger()
    blocks.set_hints(hint(a=5))
    assert blocks.ledger().free == before.free == 50
    now = 10.0
    assert blocks.set_hints(hint()) == {}


@pytest.mark.parametrize("capacity", [1, 9])
def test_a_tiny_cache_sets_nothing_aside(capacity: int) -> None:
    assert pool(capacity).set_hints(hint(a=5)) == {}


def test_where_it_means_nothing_how_blocks_lie_what_was_freed_last_is_given_first() -> None:
    blocks = BlockPool(10, 4, 4, clock=lambda: 0.0, adjacent=False)
    first, second = (admitted(blocks, request(name, 2, most=2)) for name in "ab")
    blocks.release(first)
    third = admitted(blocks, request("c", 3, most=3))
    assert set(third.tables[0]) > {0, 1}
    assert not set(third.tables[0]) & set(second.tables[0])
    assert blocks.set_hints(Hints({"g": GroupHint(1, 60)})) == {}
    blocks.check_integrity()
