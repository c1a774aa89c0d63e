"""What one step reads and writes, as index tensors: made once, used by every layer.

A step mixes sequences that add one token (decodes) with sequences that add many (chunks). What a sequence attends to
is read in parts, each once: its own newest tokens, a prefix that it shares with others of the step, stretches that lie
in one piece, and the rest. Parts that several rows read are `Segment`s; the rest of the decodes is gathered in buckets
of similar length, so that one long context does not make every other one as long.

The keys and values of all tokens of a step are stored before any are read, layer by layer: a sequence may read blocks
that another one fills in the same step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from cacheaware_engine.attention_costs import AttentionCosts
from cacheaware_engine.kv_reads import Run, split
from cacheaware_engine.kv_store import KvStore
from cacheaware_engine.prefix_groups import PrefixGroup, choose_groups

LENGTH_SLACK: Final = 0.8  # a bucket's shortest context is at least this part of its longest …
SHORT_CONTEXT: Final = 64  # … or at most this many tokens shorter: padding that little costs less than another call
BUCKET_SLOTS: Final = 8192  # slots gathered at once: about what stays in a core's cache between copying and reading

Window = int | None
"""How many tokens, itself included, a token of a layer attends to; None: all before it."""


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """The part of one sequence that a step computes: `tokens` at positions `start`, `start + 1`, …"""

    tokens: Sequence[int]
    start: int  # tokens before these whose keys and values are already stored (or stored by this same step)
    table: Sequence[int]  # blocks of the sequence from position 0, covering `tokens`
    sample: bool | Sequence[int]  # the logits wanted: after the last token, or after these of the tokens

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def wanted(self) -> Sequence[int]:
        """Indices of the tokens after which logits are wanted."""
        if isinstance(self.sample, bool):
            return (len(self.tokens) - 1,) if self.sample else ()
        return self.sample


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows first … last-1 attend to all of `part`: slots in place, or slots to gather."""

    first: int
    last: int
    part: Run | Tensor


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Rows first … last-1 add one token each and attend to slots of their own, the new token's among them."""

    first: int
    last: int
    slots: Tensor  # [rows · longest], padded
    longest: int
    mask: Tensor | None  # [rows, 1, 1, longest] added to scores; None where nothing is padded


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows first … last-1 are one sequence's: they attend causally to themselves.

    In layers with a window they attend to `before` too, stored tokens that the window reaches, as far as `mask` says.
    """

    first: int
    last: int
    before: Tensor | None = None  # slots
    mask: Tensor | None = None  # [rows, before + rows] added to scores


@dataclass(frozen=True, slots=True)
class Reads:
    """What layers with one window read in a step."""

    buckets: tuple[DecodeBucket, ...]
    chunks: tuple[PrefillChunk, ...]
    rounds: tuple[tuple[Segment, ...], ...]  # the segments of a round are of different rows
    tokens: int  # Σ over segments and sequences of stored tokens that are read
    unique_tokens: int  # the same, a slot counted once however many sequences need it
    tokens_in_place: int  # of `tokens`, those read without a copy


@dataclass(frozen=True, slots=True)
class Shared:
    """A group of sequences that read a prefix together."""

    members: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    tokens: Tensor  # [rows] ids, sequence by sequence: decodes first, those of a group side by side
    positions: Tensor  # [rows]
    slots: Tensor  # [rows] where their keys and values are stored
    sampled: Tensor  # [sampled] rows whose logits are wanted, in the order of the work
    reads: Mapping[Window, Reads]
    groups: tuple[Shared, ...]


def plan_step(
    work: Sequence[SequenceWork],
    store: KvStore,
    dtype: torch.dtype,
    costs: AttentionCosts,
    windows: Collection[Window] = (None,),
) -> StepPlan:
    """Index tensors for `work`. `dtype` is that of scores' masks, the compute dtype; `windows` are those of layers."""
    for item in work:
        _check(item, store)
    decodes = [index for index, item in enumerate(work) if len(item.tokens) == 1]
    chunks = [index for index, item in enumerate(work) if len(item.tokens) > 1]
    decodes, decode_groups = _in_groups(work, decodes, store.block_size, costs)
    chunks, chunk_groups = _in_groups(work, chunks, store.block_size, costs)
    order = [*decodes, *chunks]
    first_rows: dict[int, int] = {}
    rows = 0
    for index in order:
        first_rows[index] = rows
        rows += len(work[index].tokens)
    layout = _Layout(work, decodes, chunks, [*decode_groups, *chunk_groups], first_rows, store, dtype, costs)
    tokens = [token for index in order for token in work[index].tokens]
    positions = [position for index in order for position in range(work[index].start, work[index].end)]
    sampled = [first_rows[index] + offset for index, item in enumerate(work) for offset in item.wanted]
    return StepPlan(
        tokens=_tensor(tokens, store),
        positions=_tensor(positions, store),
        slots=_written(work, decodes, chunks, store),
        sampled=_tensor(sampled, store),
        reads={window: layout.everything() if window is None else layout.windowed(window) for window in windows},
        groups=tuple(Shared(len(group.members), group.blocks * store.block_size) for group in layout.groups),
    )


def _in_groups(
    work: Sequence[SequenceWork], indices: Sequence[int], block_size: int, costs: AttentionCosts
) -> tuple[list[int], list[PrefixGroup]]:
    """The same indices with groups side by side, and the groups, in that order; equally long ones near each other."""
    # A decode's newest token stays its own; a chunk's prefix ends where it starts.
    stored = [work[index].end - 1 if len(work[index].tokens) == 1 else work[index].start for index in indices]
    found = choose_groups(
        [work[index].table for index in indices],
        [tokens // block_size for tokens in stored],
        lambda members, blocks: costs.gain(members, blocks * block_size),
    )
    groups = [PrefixGroup(tuple(indices[member] for member in group.members), group.blocks) for group in found]
    grouped = {member for group in groups for member in group.members}

    def own(index: int, blocks: int = 0) -> int:
        return work[index].end - blocks * block_size

    groups = [
        PrefixGroup(tuple(sorted(group.members, key=lambda index: -own(index, group.blocks))), group.blocks)
        for group in groups
    ]
    groups.sort(key=lambda group: -own(group.members[0], group.blocks))
    singles = sorted((index for index in indices if index not in grouped), key=lambda index: -own(index))
    return [*(member for group in groups for member in group.members), *singles], groups


@dataclass(slots=True)
class _Rest:
    """What of a decode's context is in no segment: tokens low … high-1 of the sequence of these blocks."""

    row: int
    blocks: Sequence[int]
    low: int
    high: int


@dataclass(slots=True)
class _Layout:
    """A step's rows, and from them what each kind of layer reads."""

    work: Sequence[SequenceWork]
    decodes: Sequence[int]
    chunks: Sequence[int]
    groups: Sequence[PrefixGroup]
    first_rows: Mapping[int, int]
    store: KvStore
    dtype: torch.dtype
    costs: AttentionCosts

    def everything(self) -> Reads:
        """For layers in which a token attends to all before it."""
        shared = {member: group.blocks for group in self.groups for member in group.members}
        segments: list[Segment] = []
        for group in self.groups:
            first = self.first_rows[group.members[0]]
            last = self.first_rows[group.members[-1]] + len(self.work[group.members[-1]].tokens)
            segments.extend(self._parts(first, last, self.work[group.members[0]].table[: group.blocks]))
        rests: list[_Rest] = []
        tokens = 0
        for index in self.decodes:
            item, row, begin = self.work[index], self.first_rows[index], shared.get(index, 0)
            full = (item.end - 1) // self.store.block_size
            parted = split(item.table[begin:full], self.store.block_size, self.costs.least_run())
            segments.extend(Segment(row, row + 1, run) for run in parted.runs)
            rests.append(
                _Rest(
                    row,
                    (*parted.scattered, item.table[full]),
                    0,
                    len(parted.scattered) * self.store.block_size + item.end - full * self.store.block_size,
                )
            )
            tokens += rests[-1].high
        chunks: list[PrefillChunk] = []
        for index in self.chunks:
            item, row = self.work[index], self.first_rows[index]
            chunks.append(PrefillChunk(row, row + len(item.tokens)))
            segments.extend(self._prefix(item, row, shared.get(index, 0)))
        in_place = sum(len(segment.part) for segment in segments if isinstance(segment.part, Run))
        return Reads(
            buckets=self._buckets(rests),
            chunks=tuple(chunks),
            rounds=_rounds(segments),
            tokens=tokens + sum(len(segment.part) for segment in segments),
            unique_tokens=self._unique_tokens(),
            tokens_in_place=in_place,
        )

    def windowed(self, window: int) -> Reads:
        """For layers in which a token attends to itself and the `window` - 1 before it. Nothing is shared here: the
        windows of a group's members end, and so begin, at different tokens."""
        block_size = self.store.block_size
        rests: list[_Rest] = []
        chunks: list[PrefillChunk] = []
        seen: set[int] = set()
        tokens = 0
        for index in self.decodes:
            item = self.work[index]
            low = max(0, item.end - window)
            skipped = low // block_size
            blocks = item.table[skipped : -(-item.end // block_size)]
            seen.update(blocks)
            offset = skipped * block_size
            rests.append(_Rest(self.first_rows[index], blocks, low - offset, item.end - offset))
            tokens += item.end - low
        for index in self.chunks:
            item, row = self.work[index], self.first_rows[index]
            low = max(0, item.start + 1 - window)
            before = self.store.slots([item.table], item.start)[0, low:] if item.start > low else None
            chunks.append(PrefillChunk(row, row + len(item.tokens), before, self._window_mask(item, low, window)))
            seen.update(item.table[low // block_size : -(-item.start // block_size)])
            tokens += item.start - low
        return Reads(
            buckets=self._buckets(rests),
            chunks=tuple(chunks),
            rounds=(),
            tokens=tokens,
            unique_tokens=min(tokens, len(seen) * block_size),
            tokens_in_place=0,
        )

    def _prefix(self, item: SequenceWork, row: int, shared_blocks: int) -> list[Segment]:
        """A chunk's stored tokens beyond those that its group reads."""
        size, last_row = self.store.block_size, row + len(item.tokens)
        full, partial = divmod(item.start, size)
        segments = self._parts(row, last_row, item.table[shared_blocks:full])
        if partial:
            begin = item.table[full] * size
            segments.append(Segment(row, last_row, Run(begin, begin + partial)))
        return segments

    def _parts(self, first: int, last: int, blocks: Sequence[int]) -> list[Segment]:
        """All of `blocks`, read once for rows first … last-1: in place where that pays, else in one gathered piece."""
        if not blocks:
            return []
        size = self.store.block_size
        parted = split(blocks, size, self.costs.least_run())
        segments = [Segment(first, last, run) for run in parted.runs]
        if parted.scattered:
            tokens = len(parted.scattered) * size
            segments.append(Segment(first, last, self.store.slots([parted.scattered], tokens)[0]))
        return segments

    def _window_mask(self, item: SequenceWork, low: int, window: int) -> Tensor:
        queries = torch.arange(item.start, item.end, device=self.store.device)[:, None]
        keys = torch.arange(low, item.end, device=self.store.device)
        hidden = (keys > queries) | (keys <= queries - window)
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.store.device).masked_fill_(hidden, float("-inf"))

    def _buckets(self, rests: Sequence[_Rest]) -> tuple[DecodeBucket, ...]:
        buckets = []
        first = 0
        for size in bucket_sizes([rest.high for rest in rests]):
            buckets.append(self._bucket(rests[first : first + size]))
            first += size
        return tuple(buckets)

    def _bucket(self, rests: Sequence[_Rest]) -> DecodeBucket:
        device = self.store.device
        longest = max(rest.high for rest in rests)
        slots = self.store.slots([rest.blocks for rest in rests], longest)
        mask = None
        if any(rest.low or rest.high < longest for rest in rests):
            place = torch.arange(longest, device=device)
            inside = (place >= _tensor([rest.low for rest in rests], self.store)[:, None]) & (
                place < _tensor([rest.high for rest in rests], self.store)[:, None]
            )
            # Padding reads the sequence's own first token: a slot of somebody else could hold NaN, which no mask hides.
            slots = torch.where(inside, slots, slots.gather(1, _tensor([[rest.low] for rest in rests], self.store)))
            mask = torch.zeros(inside.shape, dtype=self.dtype, device=device).masked_fill_(~inside, float("-inf"))
            mask = mask[:, None, None]
        return DecodeBucket(
            first=rests[0].row, last=rests[-1].row + 1, slots=slots.reshape(-1), longest=longest, mask=mask
        )

    def _unique_tokens(self) -> int:
        """Distinct stored tokens that full attention needs. A decode reads its whole context, its own token included;
        a chunk reads its prefix, and its own keys and values straight from the projections."""
        size = self.store.block_size
        beginnings = Counter(item.table[0] for item in self.work)
        alone = 0
        seen: set[int] = set()
        partial: dict[int, int] = {}  # block -> most of its tokens that some sequence reads
        for item in self.work:
            tokens = item.end if len(item.tokens) == 1 else item.start
            if beginnings[item.table[0]] == 1:  # who shares no first block shares none
                alone += tokens
                continue
            full, rest = divmod(tokens, size)
            seen.update(item.table[:full])
            if rest:
                partial[item.table[full]] = max(rest, partial.get(item.table[full], 0))
        shared = len(seen) * size + sum(tokens for block, tokens in partial.items() if block not in seen)
        return alone + shared


def bucket_sizes(lengths: Sequence[int]) -> list[int]:
    """How many of `lengths`, in their order, go together so that little is padded."""
    sizes: list[int] = []
    shortest = longest = 0
    for length in lengths:
        low, high = (min(shortest, length), max(longest, length)) if sizes else (length, length)
        similar = low >= LENGTH_SLACK * high or low >= high - SHORT_CONTEXT
        if sizes and similar and (sizes[-1] + 1) * high <= BUCKET_SLOTS:
            sizes[-1] += 1
            shortest, longest = low, high
        else:
            sizes.append(1)
            shortest = longest = length
    return sizes


def _rounds(segments: Sequence[Segment]) -> tuple[tuple[Segment, ...], ...]:
    """Segments in rounds of different rows, so that a round is merged into what came before by one operation."""
    rounds: list[list[Segment]] = []
    ends: list[int] = []
    for segment in sorted(segments, key=lambda segment: segment.first):
        for index, end in enumerate(ends):
            if segment.first >= end:
                rounds[index].append(segment)
                ends[index] = segment.last
                break
        else:
            rounds.append([segment])
            ends.append(segment.last)
    return tuple(tuple(members) for members in rounds)


def _written(work: Sequence[SequenceWork], decodes: Sequence[int], chunks: Sequence[int], store: KvStore) -> Tensor:
    """Slots of the step's own tokens, in the order of rows."""
    size = store.block_size
    own = [work[index].table[work[index].start // size] * size + work[index].start % size for index in decodes]
    slots = [_tensor(own, store)] if own else []
    for index in chunks:
        item = work[index]
        first = item.start // size
        blocks = item.table[first : -(-item.end // size)]
        slots.append(store.slots([blocks], item.end - first * size)[0, item.start - first * size :])
    return torch.cat(slots)


def _tensor(values: Sequence[int] | Sequence[Sequence[int]], store: KvStore) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=store.device)


def _check(item: SequenceWork, store: KvStore) -> None:
    assert item.tokens, "a sequence in a step adds at least one token"
    assert item.start >= 0, f"a sequence cannot start at position {item.start}"
    covered = len(item.table) * store.block_size
    assert covered >= item.end, f"the table covers {covered} tokens, and the work ends at {item.end}"
