"""Slots and stretches of block tables, kept from step to step: a step works out only what is new of each.

A table grows by a block every few steps, and the step before has seen the rest of it. So what was worked out is kept,
and compared with what the table says now: nobody needs to tell what changed, and a table that became another one is
worked out anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from cacheaware_engine.kv_reads import Run

_NAMES: Final = itertools.count()


class BlockTable:
    """One table: its blocks, the slots of their tokens, and the stretches of neighbouring blocks that they lie in."""

    __slots__ = ("_extents", "_longest", "_numbers", "_offsets", "_slots", "blocks", "name")

    def __init__(self, blocks: Sequence[int], offsets: Tensor) -> None:
        """`offsets`: 0 … block size - 1, on the device that reads."""
        self.blocks: list[int] = []
        self.name = next(_NAMES)  # another one as soon as the table does anything but get longer
        self._offsets = offsets
        self._extents: list[tuple[int, int]] = []  # first and last+1 index of each stretch
        self._longest = 0  # blocks of the longest of them
        self._slots = offsets[:0]
        self._numbers = torch.empty(0, dtype=torch.int32)
        self.follow(blocks)

    def follow(self, blocks: Sequence[int]) -> None:
        """The table says this now."""
        if blocks == self.blocks:
            return
        now = list(blocks)
        if now[: len(self.blocks)] != self.blocks:
            self.blocks, self._extents, self._longest = [], [], 0
            self.name = next(_NAMES)
        if new := now[len(self.blocks) :]:
            self._continue(new)

    @property
    def numbers(self) -> Tensor:
        """The blocks, int32, on the CPU. A view: valid until the table is followed again."""
        return self._numbers[: len(self.blocks)]

    def slots(self, first: int, last: int) -> Tensor:
        """Of tokens first … last-1. A view: valid until the table is followed again."""
        return self._slots[first:last]

    def parts(self, first: int, last: int, least_run: int) -> tuple[list[Run], list[tuple[int, int]]]:
        """Full blocks first … last-1: stretches of at least so many tokens, and the ranges of blocks between them."""
        size = len(self._offsets)
        if first >= last:
            return [], []
        if self._longest * size < least_run:
            return [], [(first, last)]
        runs: list[Run] = []
        between: list[tuple[int, int]] = []
        for begin, end in self._extents:
            low, high = max(begin, first), min(end, last)
            if low >= high:
                continue
            if (high - low) * size >= least_run:
                runs.append(Run(self.blocks[low] * size, (self.blocks[high - 1] + 1) * size))
            elif between and between[-1][1] == low:
                between[-1] = (between[-1][0], high)
            else:
                between.append((low, high))
        return runs, between

    def _continue(self, new: list[int]) -> None:
        known, size = len(self.blocks), len(self._offsets)
        needed = (known + len(new)) * size
        if needed > len(self._slots):
            slots = torch.empty(max(needed, 2 * known * size), dtype=torch.long, device=self._offsets.device)
            slots[: known * size] = self._slots[: known * size]
            self._slots = slots
        if (blocks := known + len(new)) > len(self._numbers):
            self._numbers = torch.cat([self._numbers[:known], torch.empty(max(len(new), blocks), dtype=torch.int32)])
        self._numbers[known:blocks] = torch.tensor(new, dtype=torch.int32)
        first = torch.tensor(new, dtype=torch.long, device=self._offsets.device)[:, None] * size
        torch.add(first, self._offsets, out=self._slots[known * size : needed].view(-1, size))
        for index, block in enumerate(new, known):
            if self._extents and self.blocks[-1] + 1 == block:
                self._extents[-1] = (self._extents[-1][0], index + 1)
            else:
                self._extents.append((index, index + 1))
            self._longest = max(self._longest, index + 1 - self._extents[-1][0])
            self.blocks.append(block)


class BlockTables:
    """The tables of the last step."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._offsets = torch.arange(block_size, device=device)
        self._known: dict[int, BlockTable] = {}

    def of_step(self, tables: Sequence[Sequence[int]]) -> list[BlockTable]:
        """What is known of the tables of a step. Those that are not in it are forgotten."""
        known: dict[int, BlockTable] = {}
        for table in tables:
            # A number that belonged to another list by now leads to other blocks, and those are worked out anew.
            name = id(table)
            if (found := known.get(name) or self._known.get(name)) is None:
                found = BlockTable(table, self._offsets)
            else:
                found.follow(table)
            known[name] = found
        self._known = known
        return [known[id(table)] for table in tables]
