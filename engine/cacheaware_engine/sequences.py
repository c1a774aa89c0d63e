"""A request on its way through the engine: its sequences, how far each is computed, and where its output goes.

Plain state with the few rules that belong to one request. Who runs when is `scheduler.py`; blocks are `blocks/`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from .blocks import BlockKey
from .blocks import Request as BlockRequest
from .detokenizer import StopStrings, TextStream
from .requests import Delta, Finish, Submission, TokenReport

if TYPE_CHECKING:
    from .sampler import SequenceSampler


class Sink(Protocol):
    """Where a request's output goes. Called by the step loop, so nothing here may wait."""

    def admitted(self, cached_tokens: int) -> None: ...
    def post(self, deltas: Iterable[Delta]) -> None: ...
    def close(self, error: Exception | None = None) -> None: ...


class SequenceState:
    """One sequence: prompt and output in `tokens`, of which the first `computed` have keys and values in blocks.

    While it runs, all but the newest token are computed after a step; after preemption nothing is, and the tokens so
    far are its prompt. Text and random state stay as they are, so nothing is said twice and a seed goes on.
    """

    __slots__ = (
        "computed",
        "finish",
        "index",
        "keys",
        "last_token",
        "prompt_length",
        "sampler",
        "stop_reason",
        "stops",
        "text",
        "tokens",
    )

    def __init__(
        self, index: int, prompt: tuple[int, ...], text: TextStream, stops: StopStrings, sampler: SequenceSampler
    ) -> None:
        self.index = index
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.computed = 0
        self.keys: list[BlockKey] = []  # of the leading full blocks, as far as they were needed
        self.text = text
        self.stops = stops
        self.sampler = sampler
        self.finish: Finish | None = None
        self.stop_reason: str | int | None = None
        self.last_token: float | None = None  # when it came

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed


class RequestState:
    """One submission: n sequences of one prompt, admitted and preempted together."""

    __slots__ = (
        "arrived",
        "blocks",
        "cached_tokens",
        "closed",
        "first_token",
        "forked",
        "outbox",
        "preemptions",
        "prompt_reports",
        "sequences",
        "submission",
    )

    def __init__(
        self,
        submission: Submission,
        blocks: BlockRequest,
        sequences: list[SequenceState],
        outbox: Sink | None,
        now: float,
    ) -> None:
        self.submission = submission
        self.blocks = blocks
        self.sequences = sequences
        self.outbox = outbox  # None: the engine's own request, to compute a public prefix
        self.arrived = now
        self.first_token: float | None = None
        self.cached_tokens: int | None = None  # of the prompt, at first admission
        self.forked = len(sequences) == 1  # sequences after the first exist once the prompt is computed
        self.preemptions = 0
        self.prompt_reports: list[TokenReport | None] = [None]  # of leading tokens of the prompt, if it is asked for
        self.closed = False  # its end was counted and told

    @property
    def reports_prompt(self) -> bool:
        """Whether tokens of the prompt are still to be computed for what is told of them."""
        asked = self.submission.generation.prompt_logprobs is not None
        return asked and len(self.prompt_reports) < len(self.submission.prompt)

    @property
    def leader(self) -> SequenceState:
        """The first of its sequences that has not ended; the request must be live."""
        first = self.sequences[0]
        return first if first.finish is None else next(one for one in self.sequences if one.finish is None)
