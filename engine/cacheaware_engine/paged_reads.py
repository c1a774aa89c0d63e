"""What rows read where it lies, in pieces that keep all threads busy: the work list of `paged_attention.cpp`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from cacheaware_engine.step_plan import PagedReads

UNITS_A_THREAD: Final = 4
"""Pieces, times key heads, that each thread should find: a few, so that who is interrupted leaves little undone."""

TILE: Final = 64  # tokens that are read at a time
LEAST: Final = 2 * TILE  # of a piece: what it leaves has to be merged
MOST_ROWS: Final = 64
"""Of a piece: what its rows have so far stays in a core's cache."""

READING: Final = 8
"""Reading a token costs as much as so many rows' attention to it (SmolLM2's heads, one core with AVX-512)."""

BEYOND: Final = 2**30  # any token


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows first_row … last_row-1 attend to tokens first … last-1 of a table: all of them, or if they are tokens of
    one sequence themselves, the first at position `start`, each to itself and what is before it, as far as `window`.
    """

    first_row: int
    last_row: int
    table: int  # its place among the tables
    first: int
    last: int
    start: int | None = None
    window: int | None = None

    @property
    def rows(self) -> int:
        return self.last_row - self.first_row

    @property
    def stored(self) -> int:
        """Tokens that were stored before this step, or by a decode: not what a prompt has just added."""
        return (self.last if self.start is None else self.start) - self.first

    @property
    def effort(self) -> int:
        return (self.last - self.first) * (READING + self.rows)

    @property
    def seen(self) -> tuple[int, int]:
        """Row i sees tokens from the one + i on, and before the other + i."""
        if self.start is None:
            return -BEYOND, BEYOND
        return -BEYOND if self.window is None else self.start + 1 - self.window, self.start + 1

    def blocks(self) -> Iterator[Stretch]:
        """The same, not too many rows at a time, and of the tokens only what they see."""
        for low in range(0, self.rows, MOST_ROWS):
            high = min(low + MOST_ROWS, self.rows)
            block = replace(self, first_row=self.first_row + low, last_row=self.first_row + high)
            if self.start is not None:
                start = self.start + low
                first = self.first if self.window is None else max(self.first, start + 1 - self.window)
                block = replace(block, start=start, first=first, last=min(self.last, self.start + high))
            yield block


def paged_reads(stretches: Sequence[Stretch], tables: Sequence[Tensor], kv_heads: int, threads: int) -> PagedReads:
    """All stretches of rows 0, 1, …, each row in one of them at least. tables: block numbers, int32"""
    starts = [0]
    for table in tables:
        starts.append(starts[-1] + len(table))
    blocks = [block for stretch in stretches for block in stretch.blocks()]
    of_row: list[list[int]] = [[] for _ in range(max(block.last_row for block in blocks))]
    pieces: list[tuple[int, ...]] = []
    parts = 0
    for block, size in zip(blocks, piece_sizes(blocks, kv_heads, threads), strict=True):
        for first in range(block.first, block.last, size):
            last = min(first + size, block.last)
            pieces.append((block.first_row, block.rows, starts[block.table], first, last, parts, *block.seen))
            for row in range(block.rows):
                of_row[block.first_row + row].append(parts + row)
            parts += block.rows
    row_starts = [0]
    for own in of_row:
        row_starts.append(row_starts[-1] + len(own))
    return PagedReads(
        rows=len(of_row),
        pieces=torch.tensor(pieces, dtype=torch.int32),
        tables=torch.cat(list(tables)),
        row_parts=torch.tensor([part for own in of_row for part in own], dtype=torch.int32),
        row_starts=torch.tensor(row_starts, dtype=torch.int32),
        parts=parts,
    )


def piece_sizes(stretches: Sequence[Stretch], kv_heads: int, threads: int) -> list[int]:
    """How many tokens a piece of each stretch has, the last one at most: whole tiles, about equal effort."""
    wanted = max(1, UNITS_A_THREAD * threads // kv_heads)
    fair = max(1, sum(stretch.effort for stretch in stretches) // wanted)
    sizes: list[int] = []
    for stretch in stretches:
        tokens = stretch.last - stretch.first
        pieces = max(1, min(-(-stretch.effort // fair), tokens // LEAST))
        sizes.append(-(-tokens // pieces // TILE) * TILE)
    return sizes
