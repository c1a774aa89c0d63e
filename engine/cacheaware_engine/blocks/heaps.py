"""A heap of blocks that can leave it at any time.

A block that leaves, or whose order changed, stays behind as a stale entry that is dropped when it comes up. The heap is
rebuilt before stale entries outnumber the others as it grows, so it never needs more than twice what it held at its
fullest. Every operation is O(log n), amortised.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .residents import Block

_SLACK = 32  # stale entries that are not worth a rebuild

Order = tuple[float, int, int]  # ends in the block's serial number, so no two blocks are equal


class BlockHeap:
    """The least `Order` first."""

    __slots__ = ("_current", "_entries")

    def __init__(self) -> None:
        self._entries: list[tuple[Order, Block]] = []
        self._current: dict[Block, tuple[Order, Block]] = {}

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, block: Block) -> bool:
        return block in self._current

    @property
    def stale(self) -> int:
        return len(self._entries) - len(self._current)

    def put(self, block: Block, order: Order) -> None:
        """Insert the block, or move it to where `order` says."""
        entry = self._current[block] = (order, block)
        if len(self._entries) >= 2 * len(self._current) + _SLACK:
            self._entries = list(self._current.values())
            heapq.heapify(self._entries)
        else:
            heapq.heappush(self._entries, entry)

    def discard(self, block: Block) -> None:
        self._current.pop(block, None)

    def first(self) -> Block | None:
        entry = self._first()
        return entry[1] if entry else None

    def first_order(self) -> Order | None:
        entry = self._first()
        return entry[0] if entry else None

    def orders(self) -> dict[Block, Order]:
        """Every block and its place, for checks of integrity."""
        return {block: order for block, (order, _) in self._current.items()}

    def _first(self) -> tuple[Order, Block] | None:
        entries, current = self._entries, self._current
        while entries:
            entry = entries[0]
            if current.get(entry[1]) is entry:
                return entry
            heapq.heappop(entries)
        return None
