"""How stored tokens of a sequence are read: stretches of neighbouring blocks in place, the rest gathered. Pure.

A stretch that lies in one piece needs no copy before attention reads it. Which blocks lie side by side is the block
pool's doing; whether a stretch is long enough for a call of its own is told by the caller's costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub


@dataclass(frozen=True, slots=True)
class Run:
    """Slots first … last-1, read in place."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first


def extents(table: Sequence[int]) -> list[tuple[int, int]]:
    """Maximal stretches of consecutive block numbers, as index ranges of `table`."""
    if not table:
        return []
    if list(table) == list(range(table[0], table[0] + len(table))):  # as it mostly is: compared without a loop
        return [(0, len(table))]
    cuts = [index for index, step in enumerate(map(sub, table[1:], table), 1) if step != 1]
    return list(zip([0, *cuts], [*cuts, len(table)], strict=True))


@dataclass(frozen=True, slots=True)
class Split:
    """Some blocks of a sequence: those to read in place, and the numbers of those to gather."""

    runs: tuple[Run, ...]
    scattered: tuple[int, ...]


def split(blocks: Sequence[int], block_size: int, least_run: int) -> Split:
    """Divide full blocks into runs of at least `least_run` tokens and the rest, each in order."""
    runs: list[Run] = []
    scattered: list[int] = []
    for first, last in extents(blocks):
        if (last - first) * block_size >= least_run:
            runs.append(Run(blocks[first] * block_size, (blocks[last - 1] + 1) * block_size))
        else:
            scattered.extend(blocks[first:last])
    return Split(tuple(runs), tuple(scattered))
