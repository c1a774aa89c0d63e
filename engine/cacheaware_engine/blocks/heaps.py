"""A heap of blocks that can leave it at any time.

A block that leaves, or whose order changed, stays behind as a stale entry that is dropped when it comes up; once stale
entries outnumber the others the heap is rebuilt, so it stays within twice its content. Every operation is O(log n),
amortised.
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
        heapq.heappush(self._entries, entry)
        self._compact()

    def discard(self, block: Block) -> None:
        if self._current.pop(block, None) is not None:
            self._compact()

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

    def _compact(self) -> None:
        if len(self._entries) > 2 * len(self._current) + _SLACK:
            self._entries = list(self._current.values())
            heapq.heapify(self._entries)
