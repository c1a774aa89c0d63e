"""A request trace in the terms that all formats share. Reading files is left to `trace_formats`.

Blocks are numbers that are unique within a trace: the number of a block stands for the whole prompt up to its end, so
two requests share exactly the blocks that their lists have in common, and those are a beginning of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`blocks` are the full ones of the prompt. `tier` and `tenant` are None where the trace knows none."""

    at: float  # seconds from the start of the trace
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    tier: str | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """`requests` are in the order of arrival; their blocks have `block_size` tokens."""

    name: str
    block_size: int
    requests: Sequence[TraceRequest]
    notes: tuple[str, ...] = ()  # what a reader of the results should know: assumptions, rows left out

    @property
    def seconds(self) -> float:
        return self.requests[-1].at if self.requests else 0.0

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    def until(self, seconds: float) -> Trace:
        """Its beginning."""
        kept = [request for request in self.requests if request.at < seconds]
        return Trace(self.name, self.block_size, kept, self.notes)
