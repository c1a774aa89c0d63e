"""What decodes read where it lies, in pieces that keep all threads busy: the work list of `paged_attention.cpp`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from cacheaware_engine.step_plan import PagedReads

UNITS_A_THREAD: Final = 4
"""Pieces, times key heads, that each thread should find: a few, so that who is interrupted leaves little undone."""

TILE: Final = 64  # tokens that are read at a time
LEAST: Final = 2 * TILE  # of a piece: what it leaves has to be merged

READING: Final = 8
"""Reading a token costs as much as so many rows' attention to it (SmolLM2's heads, one core with AVX-512)."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows first_row … last_row-1 attend to tokens first … last-1 of a table."""

    first_row: int
    last_row: int
    table: int  # its place among the tables
    first: int
    last: int

    @property
    def effort(self) -> int:
        return (self.last - self.first) * (READING + self.last_row - self.first_row)


def paged_reads(stretches: Sequence[Stretch], tables: Sequence[Tensor], kv_heads: int, threads: int) -> PagedReads:
    """All stretches of rows 0, 1, …, each row in one of them at least. tables: block numbers, int32"""
    starts = [0]
    for table in tables:
        starts.append(starts[-1] + len(table))
    rows = max(stretch.last_row for stretch in stretches)
    pieces: list[tuple[int, int, int, int, int, int]] = []
    of_row: list[list[int]] = [[] for _ in range(rows)]
    parts = 0
    for stretch, size in zip(stretches, piece_sizes(stretches, kv_heads, threads), strict=True):
        members = stretch.last_row - stretch.first_row
        for first in range(stretch.first, stretch.last, size):
            last = min(first + size, stretch.last)
            pieces.append((stretch.first_row, members, starts[stretch.table], first, last, parts))
            for row in range(members):
                of_row[stretch.first_row + row].append(parts + row)
            parts += members
    row_starts = [0]
    for own in of_row:
        row_starts.append(row_starts[-1] + len(own))
    return PagedReads(
        rows=rows,
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
