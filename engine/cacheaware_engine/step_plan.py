"""What one step reads and writes, as index tensors: made once, used by every layer.

A step mixes sequences that add one token (decodes) with sequences that add many (prefill chunks). Decodes are attended
in buckets of similar context length, so that one long context does not make every other one as long. The keys and
values of all tokens of a step are stored before any are read, layer by layer: a sequence may read blocks that another
one fills in the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from cacheaware_engine.kv_store import KvStore

LENGTH_SLACK: Final = 0.8  # a bucket's shortest context is at least this part of its longest …
SHORT_CONTEXT: Final = 64  # … or at most this many tokens shorter: padding that little costs less than another call
BUCKET_SLOTS: Final = 8192  # slots gathered at once: about what stays in a core's cache between copying and reading


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """The part of one sequence that a step computes: `tokens` at positions `start`, `start + 1`, …"""

    tokens: Sequence[int]
    start: int  # tokens before these whose keys and values are already stored (or stored by this same step)
    table: Sequence[int]  # blocks of the sequence from position 0, covering `tokens`
    sample: bool  # whether the logits after the last token are wanted

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Sequences of similar context length that add one token each."""

    rows: Tensor  # [sequences] their rows among the step's tokens
    slots: Tensor  # [sequences · longest] the slots of each context, the new token's included, padded
    longest: int
    mask: Tensor | None  # [sequences, 1, 1, longest] added to scores; None where nothing is padded


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A sequence that adds many tokens: rows first:last attend to a stored prefix and causally to themselves."""

    first: int
    last: int
    prefix: Tensor | None  # [start] slots of the tokens before the chunk


@dataclass(frozen=True, slots=True)
class StepPlan:
    tokens: Tensor  # [tokens] ids of all sequences, one after the other
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens] where their keys and values are stored
    sampled: Tensor  # [sampled] rows whose logits are wanted
    buckets: tuple[DecodeBucket, ...]
    chunks: tuple[PrefillChunk, ...]
    kv_tokens_read: int  # Σ over sequences of stored tokens that attention reads
    unique_kv_tokens: int  # the same, a slot counted once however many sequences read it


def plan_step(work: Sequence[SequenceWork], store: KvStore, dtype: torch.dtype) -> StepPlan:
    """Index tensors for `work`. `dtype` is that of scores' masks: the compute dtype."""
    device = store.device
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[Tensor] = []
    sampled: list[int] = []
    decodes: list[tuple[int, SequenceWork]] = []
    chunks: list[PrefillChunk] = []
    for item in work:
        _check(item, store)
        first = len(tokens)
        tokens.extend(item.tokens)
        positions.extend(range(item.start, item.end))
        if item.sample:
            sampled.append(len(tokens) - 1)
        if len(item.tokens) == 1:
            decodes.append((first, item))
            slots.append(_slot_of_last(item, store))
        else:
            own = store.slots([item.table], item.end)[0]
            slots.append(own[item.start :])
            prefix = own[: item.start] if item.start else None
            chunks.append(PrefillChunk(first=first, last=len(tokens), prefix=prefix))
    read, unique = _stored_tokens_read(work, store)
    return StepPlan(
        tokens=torch.tensor(tokens, dtype=torch.long, device=device),
        positions=torch.tensor(positions, dtype=torch.long, device=device),
        slots=torch.cat(slots),
        sampled=torch.tensor(sampled, dtype=torch.long, device=device),
        buckets=tuple(
            _bucket([decodes[index] for index in bucket], store, dtype)
            for bucket in length_buckets([item.end for _, item in decodes])
        ),
        chunks=tuple(chunks),
        kv_tokens_read=read,
        unique_kv_tokens=unique,
    )


def length_buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of `lengths`, grouped so that little is padded within a group. Longest first."""
    buckets: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        similar = length >= LENGTH_SLACK * longest or length >= longest - SHORT_CONTEXT
        if buckets and similar and (len(buckets[-1]) + 1) * longest <= BUCKET_SLOTS:
            buckets[-1].append(index)
        else:
            buckets.append([index])
            longest = length
    return buckets


def _bucket(members: Sequence[tuple[int, SequenceWork]], store: KvStore, dtype: torch.dtype) -> DecodeBucket:
    lengths = [item.end for _, item in members]
    longest = max(lengths)
    slots = store.slots([item.table for _, item in members], longest)
    mask = None
    if min(lengths) < longest:
        inside = torch.arange(longest, device=store.device) < torch.tensor(lengths, device=store.device)[:, None]
        # Padding reads the sequence's own first token: a slot of somebody else could hold NaN, which no mask hides.
        slots = torch.where(inside, slots, slots[:, :1])
        mask = torch.zeros(inside.shape, dtype=dtype, device=store.device).masked_fill_(~inside, float("-inf"))
        mask = mask[:, None, None]
    return DecodeBucket(
        rows=torch.tensor([row for row, _ in members], dtype=torch.long, device=store.device),
        slots=slots.reshape(-1),
        longest=longest,
        mask=mask,
    )


def _slot_of_last(item: SequenceWork, store: KvStore) -> Tensor:
    block, offset = divmod(item.start, store.block_size)
    return torch.tensor([item.table[block] * store.block_size + offset], dtype=torch.long, device=store.device)


def _stored_tokens_read(work: Sequence[SequenceWork], store: KvStore) -> tuple[int, int]:
    """Stored tokens that attention reads: all of them, and distinct ones.

    A decode reads its whole context, its own token included; a chunk reads its prefix, and its own keys and values
    straight from the projections.
    """
    read = 0
    extents: dict[int, int] = {}  # block -> most of its tokens that some sequence reads
    for item in work:
        length = item.end if len(item.tokens) == 1 else item.start
        read += length
        full, rest = divmod(length, store.block_size)
        for block in item.table[:full]:
            extents[block] = store.block_size
        if rest:
            extents[item.table[full]] = max(rest, extents.get(item.table[full], 0))
    return read, sum(extents.values())


def _check(item: SequenceWork, store: KvStore) -> None:
    assert item.tokens, "a sequence in a step adds at least one token"
    assert item.start >= 0, f"a sequence cannot start at position {item.start}"
    covered = len(item.table) * store.block_size
    assert covered >= item.end, f"the table covers {covered} tokens, and the work ends at {item.end}"
