"""Which blocks are free, and which of them to give next, so that a sequence's blocks lie side by side.

A sequence goes on where its last block ends, if that is free. A new one starts in the longest free stretch, with half
of what it does not need before it: the sequence there can grow too. Stretches can be set aside for a group that is
expected to grow; whoever else needs a block takes from them when nothing else is free, before anything is evicted.
Order only: whether a block may be had at all is decided elsewhere.

`FreeStack` is for an engine to which it means nothing where blocks lie: what was freed last is given first.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping

from .keys import BlockId


class Extents:
    """A set of block numbers as maximal stretches. O(log n) in stretches, but for moving pointers in one list."""

    __slots__ = ("_ends", "_longest", "_starts", "count")

    def __init__(self) -> None:
        self.count = 0
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}  # start -> end, exclusive
        self._longest: list[tuple[int, int]] = []  # heap of (-length, start); entries that are no stretch are stale

    def __len__(self) -> int:
        return self.count

    def __contains__(self, block: int) -> bool:
        start = self._start_of(block)
        return start is not None and block < self._ends[start]

    def stretches(self) -> Iterator[tuple[int, int]]:
        """(start, end) of each, in order."""
        return ((start, self._ends[start]) for start in self._starts)

    def longest(self) -> tuple[int, int]:
        """(start, end) of the longest stretch; the first of several. There must be one."""
        while True:
            length, start = self._longest[0]
            if self._ends.get(start) == start - length:
                return start, start - length
            heapq.heappop(self._longest)

    def add(self, start: int, end: int) -> None:
        """Blocks start … end-1, none of which is in the set."""
        self.count += end - start
        before = self._start_of(start)
        if before is not None and self._ends[before] == start:
            start = before
            self._drop(before)
        if end in self._ends:
            after, end = end, self._ends[end]
            self._drop(after)
        self._put(start, end)

    def take(self, block: int) -> None:
        """Take out one block, which is in the set."""
        start = self._start_of(block)
        assert start is not None, f"block {block} is not in the set"
        end = self._ends[start]
        assert block < end, f"block {block} is not in the set"
        self._drop(start)
        if start < block:
            self._put(start, block)
        if block + 1 < end:
            self._put(block + 1, end)
        self.count -= 1

    def _start_of(self, block: int) -> int | None:
        """Where the last stretch that begins at or before the block begins."""
        index = bisect_right(self._starts, block)
        return self._starts[index - 1] if index else None

    def _put(self, start: int, end: int) -> None:
        insort(self._starts, start)
        self._ends[start] = end
        heapq.heappush(self._longest, (start - end, start))
        if len(self._longest) > 64 + 2 * len(self._starts):
            self._longest = [(start - end, start) for start, end in self._ends.items()]
            heapq.heapify(self._longest)

    def _drop(self, start: int) -> None:
        del self._starts[bisect_right(self._starts, start) - 1]
        del self._ends[start]


class FreeBlocks:
    """All free blocks of a cache, those that are set aside among them."""

    def __init__(self, capacity: int) -> None:
        self._open = Extents()
        self._open.add(0, capacity)
        self._aside: dict[str, Extents] = {}
        self._until: dict[str, float] = {}

    def __len__(self) -> int:  # asked for each block that is given
        return self._open.count + sum(map(len, self._aside.values())) if self._aside else self._open.count

    @property
    def set_aside(self) -> Mapping[str, int]:
        """Blocks that are set aside, by group."""
        return {group: len(extents) for group, extents in self._aside.items()}

    @property
    def longest(self) -> int:
        """Blocks of the longest stretch that anyone may take."""
        if not self._open:
            return 0
        start, end = self._open.longest()
        return end - start

    def ids(self) -> list[BlockId]:
        every = (self._open, *self._aside.values())
        return [
            BlockId(block) for extents in every for start, end in extents.stretches() for block in range(start, end)
        ]

    def take(self, after: BlockId | None, more: int, group: str | None) -> BlockId:
        """A block for a sequence of `group` whose last block is `after`; it wants so many `more` side by side."""
        own = self._aside.get(group) if group is not None else None
        if after is not None:
            for extents in (own, self._open):
                if extents is not None and after + 1 in extents:
                    extents.take(after + 1)
                    return BlockId(after + 1)
        extents = own or self._open or next(iter(self._soonest()))
        start, end = extents.longest()
        block = start + max(0, end - start - more) // 2 if extents is self._open else start
        extents.take(block)
        return BlockId(block)

    def take_back(self, block: BlockId) -> None:
        """Take exactly this block, which was given a moment ago."""
        self._open.take(block)

    def give(self, block: BlockId) -> None:
        """It is free again, for anyone."""
        self._open.add(block, block + 1)

    def reserve(self, group: str, blocks: int, until: float) -> int:
        """Set aside long stretches for the group, until then; what was set aside for it before is returned first.

        Returns how many blocks: fewer than wanted where fewer are open.
        """
        self.release(group)
        extents = Extents()
        while len(extents) < blocks and self._open:
            start, end = self._open.longest()
            first = max(start, end - (blocks - len(extents)))  # its end: sequences grow upwards into the rest of it
            for block in range(first, end):
                self._open.take(block)
            extents.add(first, end)
        if extents:
            self._aside[group], self._until[group] = extents, until
        return len(extents)

    def release(self, group: str) -> None:
        """What is set aside for the group is open to all."""
        self._until.pop(group, None)
        if (extents := self._aside.pop(group, None)) is not None:
            for start, end in extents.stretches():
                self._open.add(start, end)

    def expire(self, now: float) -> None:
        """Release what was set aside until now at most."""
        for group in [group for group, until in self._until.items() if until <= now]:
            self.release(group)

    def _soonest(self) -> Iterator[Extents]:
        """What is set aside and not empty, the first to expire first."""
        for group in sorted(self._until, key=lambda group: self._until[group]):
            if self._aside[group]:
                yield self._aside[group]


class FreeStack:
    """All free blocks of a cache whose blocks are as good as each other. Nothing is set aside. O(1)."""

    def __init__(self, capacity: int) -> None:
        self._free = [BlockId(block) for block in range(capacity - 1, -1, -1)]

    def __len__(self) -> int:
        return len(self._free)

    @property
    def set_aside(self) -> Mapping[str, int]:
        return {}

    @property
    def longest(self) -> int:
        return min(1, len(self._free))

    def ids(self) -> list[BlockId]:
        return list(self._free)

    def take(self, after: BlockId | None, more: int, group: str | None) -> BlockId:
        return self._free.pop()

    def take_back(self, block: BlockId) -> None:
        """Take exactly this block, the last that was given."""
        last = self._free.pop()
        assert last == block, f"block {last} was given last, not {block}"

    def give(self, block: BlockId) -> None:
        self._free.append(block)

    def reserve(self, group: str, blocks: int, until: float) -> int:
        return 0

    def expire(self, now: float) -> None:
        """Nothing was set aside."""
