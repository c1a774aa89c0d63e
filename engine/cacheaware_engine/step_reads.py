"""What a step's rows read of stored keys and values, for layers that attend to everything and for those with a window.

What the native library reads are stretches of block tables, whoever reads them (`paged_reads.py`). For torch's
operations, parts that several rows read are segments, and the rest of the decodes is gathered in buckets of similar
length, so that one long context does not make every other one as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cacheaware_engine.attention_costs import AttentionCosts
from cacheaware_engine.block_tables import BlockTable
from cacheaware_engine.kv_reads import Run
from cacheaware_engine.kv_store import KvStore
from cacheaware_engine.paged_reads import Stretch, paged_reads
from cacheaware_engine.prefix_groups import PrefixGroup, PrefixTree
from cacheaware_engine.step_plan import DecodeBucket, PagedReads, PrefillChunk, Reads, Segment

LENGTH_SLACK: Final = 0.8  # a bucket's shortest context is at least this part of its longest …
SHORT_CONTEXT: Final = 64  # … or at most this many tokens shorter: padding that little costs less than another call


@dataclass(slots=True)
class Item:
    """A sequence's part of a step. `full` leading blocks are stored whole; a decode's own token is in none of them."""

    table: BlockTable
    start: int
    rows: int
    full: int
    row: int = 0  # its first one

    @property
    def end(self) -> int:
        return self.start + self.rows

    @property
    def last_row(self) -> int:
        return self.row + self.rows


@dataclass(frozen=True, slots=True)
class _Rest:
    """What of a decode's context is in no segment."""

    row: int
    slots: Tensor
    tokens: int  # as many as there are slots; to ask a tensor takes longer than most of what is done with it


@dataclass(frozen=True, slots=True)
class Native:
    """What the native library is used for: decodes, by so many threads, and perhaps prompts too."""

    threads: int
    chunks: bool


@dataclass(slots=True)
class StepReads:
    """A step's sequences in the order of their rows, and from them what each kind of layer reads.

    `native` tells what the native library reads, if it is there.
    """

    items: Sequence[Item]
    decodes: Sequence[int]
    chunks: Sequence[int]
    groups: Sequence[PrefixGroup]
    tree: PrefixTree
    store: KvStore
    dtype: torch.dtype
    costs: AttentionCosts
    native: Native | None

    def everything(self) -> Reads:
        """For layers in which a token attends to all before it."""
        size = self.store.block_size
        shared: dict[int, int] = {}
        segments: list[Segment] = []
        stretches: list[Stretch] = []
        tokens = 0
        for group in self.groups:
            shared.update(dict.fromkeys(group.members, group.blocks))
            first, last = self.items[group.members[0]], self.items[group.members[-1]]
            tokens += group.blocks * size
            if self._is_native(first):
                stretches.append(Stretch(first.row, last.last_row, group.members[0], 0, group.blocks * size))
            else:
                segments.extend(self._parts(first.table, first.row, last.last_row, 0, group.blocks))
        rests: list[_Rest] = []
        for index in self.decodes:
            item, begin = self.items[index], shared.get(index, 0) * size
            tokens += item.end - begin
            if self._is_native(item):
                stretches.append(Stretch(item.row, item.last_row, index, begin, item.end))
            else:
                alone, rest = self._alone(item, begin // size)
                segments.extend(alone)
                rests.append(rest)
        chunks: list[PrefillChunk] = []
        for index in self.chunks:
            item, begin = self.items[index], shared.get(index, 0)
            tokens += item.start - begin * size
            if self._is_native(item):
                stretches.append(Stretch(item.row, item.last_row, index, begin * size, item.end, item.start))
                continue
            chunks.append(PrefillChunk(item.row, item.last_row))
            segments.extend(self._parts(item.table, item.row, item.last_row, begin, item.full))
            if item.start % size:
                begin = item.table.blocks[item.full] * size
                segments.append(Segment(item.row, item.last_row, Run(begin, begin + item.start % size)))
        in_place = sum([len(segment.part) for segment in segments if isinstance(segment.part, Run)])
        in_place += sum([stretch.stored for stretch in stretches])
        return Reads(
            paged=self._paged(stretches),
            buckets=self._buckets(rests),
            chunks=tuple(chunks),
            rounds=rounds(segments),
            tokens=tokens,
            unique_tokens=self._unique_tokens(),
            tokens_in_place=in_place,
        )

    def windowed(self, window: int) -> Reads:
        """For layers in which a token attends to itself and the `window` - 1 before it. Nothing is shared here: the
        windows of a group's members end, and so begin, at different tokens."""
        size = self.store.block_size
        rests: list[_Rest] = []
        chunks: list[PrefillChunk] = []
        stretches: list[Stretch] = []
        seen: set[int] = set()
        tokens = 0
        for index in self.decodes:
            item = self.items[index]
            low = max(0, item.end - window)
            if self._is_native(item):
                stretches.append(Stretch(item.row, item.last_row, index, low, item.end))
            else:
                rests.append(_Rest(item.row, item.table.slots(low, item.end), item.end - low))
            seen.update(item.table.blocks[low // size : -(-item.end // size)])
            tokens += item.end - low
        for index in self.chunks:
            item = self.items[index]
            low = max(0, item.start + 1 - window)
            if self._is_native(item):
                stretches.append(Stretch(item.row, item.last_row, index, low, item.end, item.start, window))
            else:
                before = item.table.slots(low, item.start) if item.start > low else None
                chunks.append(PrefillChunk(item.row, item.last_row, before, self._window_mask(item, low, window)))
            seen.update(item.table.blocks[low // size : -(-item.start // size)])
            tokens += item.start - low
        return Reads(
            paged=self._paged(stretches),
            buckets=self._buckets(rests),
            chunks=tuple(chunks),
            rounds=(),
            tokens=tokens,
            unique_tokens=min(tokens, len(seen) * size),
            tokens_in_place=sum([stretch.stored for stretch in stretches]),
        )

    def _is_native(self, item: Item) -> bool:
        return self.native is not None and (item.rows == 1 or self.native.chunks)

    def _paged(self, stretches: Sequence[Stretch]) -> PagedReads | None:
        if self.native is None or not stretches:
            return None
        tables = [item.table.numbers for item in self.items]
        return paged_reads(stretches, tables, self.store.kv_heads, self.native.threads)

    def _alone(self, item: Item, begin: int) -> tuple[list[Segment], _Rest]:
        """What one decode reads for itself, from block `begin` on: stretches in place, and the rest."""
        size = self.store.block_size
        runs, between = item.table.parts(begin, item.full, self.costs.least_run())
        if not runs:
            return [], _Rest(item.row, item.table.slots(begin * size, item.end), item.end - begin * size)
        slots = item.table.slots(item.full * size, item.end)
        if between:
            slots = torch.cat([*(item.table.slots(low * size, high * size) for low, high in between), slots])
        rest = _Rest(item.row, slots, item.end - begin * size - sum(map(len, runs)))
        return [Segment(item.row, item.row + 1, run) for run in runs], rest

    def _parts(self, table: BlockTable, first_row: int, last_row: int, first: int, last: int) -> list[Segment]:
        """Blocks first … last-1 of a table, read once for some rows: in place where that pays, else in one gathered
        piece."""
        size = self.store.block_size
        runs, between = table.parts(first, last, self.costs.least_run())
        segments = [Segment(first_row, last_row, run) for run in runs]
        if between:
            pieces = [table.slots(low * size, high * size) for low, high in between]
            segments.append(Segment(first_row, last_row, pieces[0] if len(pieces) == 1 else torch.cat(pieces)))
        return segments

    def _window_mask(self, item: Item, low: int, window: int) -> Tensor:
        queries = torch.arange(item.start, item.end, device=self.store.device)[:, None]
        keys = torch.arange(low, item.end, device=self.store.device)
        hidden = (keys > queries) | (keys <= queries - window)
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.store.device).masked_fill_(hidden, float("-inf"))

    def _buckets(self, rests: Sequence[_Rest]) -> tuple[DecodeBucket, ...]:
        """Rests of similar length together, not too many at once."""
        buckets: list[DecodeBucket] = []
        first = 0
        lengths = [rest.tokens for rest in rests]
        for rows in bucket_sizes(lengths, self.store.gathered_slots):
            buckets.append(self._bucket(rests[first : first + rows], lengths[first : first + rows]))
            first += rows
        return tuple(buckets)

    def _bucket(self, rests: Sequence[_Rest], lengths: Sequence[int]) -> DecodeBucket:
        first, last, longest = rests[0].row, rests[-1].row + 1, max(lengths)
        own = [rest.slots for rest in rests]
        if min(lengths) == longest:
            return DecodeBucket(first, last, own[0] if len(own) == 1 else torch.cat(own), longest, None)
        device = self.store.device
        outside = torch.arange(longest, device=device) >= torch.tensor(lengths, device=device)[:, None]
        # Padding reads the sequence's own first token: a slot of somebody else could hold NaN, which no mask hides.
        padded = pad_sequence(own, batch_first=True)
        slots = torch.where(outside, padded[:, :1], padded).view(-1)
        mask = torch.zeros(outside.shape, dtype=self.dtype, device=device).masked_fill_(outside, float("-inf"))
        return DecodeBucket(first, last, slots, longest, mask[:, None, None])

    def _unique_tokens(self) -> int:
        """Distinct stored tokens that full attention needs. A decode reads its whole context, its own token included;
        a chunk reads its prefix, and its own keys and values straight from the projections."""
        size = self.store.block_size
        partial: dict[int, int] = {}  # block -> most of its tokens that some sequence reads
        for index, item in enumerate(self.items):
            tokens = (item.end if item.rows == 1 else item.start) - item.full * size
            if tokens:
                block = item.table.blocks[item.full]
                if tokens > partial.get(block, 0) and not self.tree.goes_on(index, block):
                    partial[block] = tokens
        return self.tree.distinct_blocks() * size + sum(partial.values())


def bucket_sizes(lengths: Sequence[int], most: int) -> list[int]:
    """How many of `lengths`, in their order, go together so that little is padded and at most so many tokens are
    gathered at once."""
    sizes: list[int] = []
    shortest = longest = 0
    for length in lengths:
        low, high = (min(shortest, length), max(longest, length)) if sizes else (length, length)
        similar = low >= LENGTH_SLACK * high or low >= high - SHORT_CONTEXT
        if sizes and similar and (sizes[-1] + 1) * high <= most:
            sizes[-1] += 1
            shortest, longest = low, high
        else:
            sizes.append(1)
            shortest = longest = length
    return sizes


def rounds(segments: Sequence[Segment]) -> tuple[tuple[Segment, ...], ...]:
    """Segments in rounds of different rows, so that a round is merged into what came before by one operation."""
    found: list[list[Segment]] = []
    ends: list[int] = []
    for segment in sorted(segments, key=lambda segment: segment.first):
        for index, end in enumerate(ends):
            if segment.first >= end:
                found[index].append(segment)
                ends[index] = segment.last
                break
        else:
            found.append([segment])
            ends.append(segment.last)
    return tuple(tuple(members) for members in found)
