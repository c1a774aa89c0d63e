"""What the engine is asked for: values, checked at the edge, that cross from the servers to the step loop.

No field here needs a check inside a step. How a request lives (waiting, running, preempted) is `sequences.py`.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NewType

from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .structured_output import Constraint

RequestId = NewType("RequestId", str)


class Finish(StrEnum):
    """Why a sequence ended, as clients and the metric's label say it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Generation:
    """What to make of a prompt."""

    sampling: SamplingParams
    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    n: int = 1
    constraint: Constraint | None = None
    """What its texts must follow; every sequence follows a copy."""
    prompt_logprobs: int | None = None
    """Tell how likely each token of the prompt was, and so many of the likeliest: nothing of it is taken from cache."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One prompt and what to make of it; n > 1 asks for several sequences of the same prompt."""

    id: RequestId
    tier: str
    prompt: tuple[int, ...]
    generation: Generation
    salt: bytes = b""
    priority: int = 0
    """Lower goes first among requests that arrived for the same step."""
    first_index: int = 0
    """What its first sequence is called in deltas: one call may be several submissions into one outbox."""
    group: str | None = None
    """Whose hints its blocks follow."""
    label: str = ""
    """The caller's own id, for logs; ids that decide anything are ours."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token as text, and how likely it was."""

    token: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenReport:
    """What is told of one token where log-probabilities are asked for."""

    chosen: TokenLogprob
    likeliest: tuple[TokenLogprob, ...]
    rank: int | None = None
    """Of the token among all, 1 the likeliest: of a prompt's tokens alone."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one sequence since its last delta."""

    index: int
    text: str
    tokens: tuple[int, ...]
    finish: Finish | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it, where that was not the model's own end."""
    reports: tuple[TokenReport, ...] = ()
    """Of each of `tokens`, if log-probabilities are asked for."""
    prompt_reports: tuple[TokenReport | None, ...] = ()
    """Of each token of the prompt, once, if they are asked for. Nothing can be said of the first."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def request_ids(prefix: str | None = None) -> Callable[[], RequestId]:
    """A source of ids that no caller chooses and none of which is a prefix of another."""
    prefix = prefix if prefix is not None else secrets.token_hex(6)
    numbers = itertools.count(1)
    return lambda: RequestId(f"{prefix}-{next(numbers):012x}")
