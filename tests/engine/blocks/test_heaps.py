"""The heap that blocks can leave: the same as sorting what is in it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cacheaware_engine.blocks.heaps import BlockHeap, Order
from cacheaware_engine.blocks.keys import BlockId
from cacheaware_engine.blocks.owners import Account
from cacheaware_engine.blocks.residents import Block

BLOCKS = [Block(BlockId(serial), serial, 0, Account("gold"), 0.0) for serial in range(6)]


@given(st.lists(st.tuples(st.sampled_from(range(6)), st.one_of(st.none(), st.integers(0, 3))), max_size=400))
def test_the_first_is_the_least_of_those_that_are_in_it(moves: list[tuple[int, int | None]]) -> None:
    heap, inside = BlockHeap(), dict[Block, Order]()
    for index, time in moves:
        block = BLOCKS[index]
        if time is None:
            heap.discard(block)
            inside.pop(block, None)
        else:
            inside[block] = (float(time), 0, block.serial)
            heap.put(block, inside[block])
        assert heap.first() is min(inside, key=lambda block: inside[block], default=None)
        assert heap.first_order() == min(inside.values(), default=None)
        assert heap.orders() == inside
        assert len(heap) == len(inside)
        assert (block in heap) == (block in inside)
        assert time is None or heap.stale <= len(heap) + 32
