"""What one step reads and writes, as index tensors: made once by `step_planner.py`, used by every layer.

What a sequence attends to is read in parts, each once: its own newest tokens, a prefix that it shares with others of
the step, stretches that lie in one piece, and the rest.

The keys and values of all tokens of a step are stored before any are read, layer by layer: a sequence may read blocks
that another one fills in the same step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from cacheaware_engine.kv_reads import Run

LEAST_SPLIT: Final = 256
"""Keys that one of the tasks that a long stretch is split into attends to, at least."""

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
class PagedReads:
    """What the first `rows` rows read where it lies, in pieces: some neighbouring rows attend to some neighbouring
    tokens. What a piece leaves of a row is a part. All tensors are int32.
    """

    rows: int
    pieces: Tensor  # [pieces, 8]: the fields of `Piece` in `paged_attention.cpp`
    tables: Tensor  # block numbers, table by table
    row_parts: Tensor  # [parts] row by row
    row_starts: Tensor  # [rows + 1] where each row's begin in `row_parts`
    parts: int


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

    paged: PagedReads | None  # what the native library reads: of all rows, or of all decodes
    buckets: tuple[DecodeBucket, ...]  # all of the decodes else
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
