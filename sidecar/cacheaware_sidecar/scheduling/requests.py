"""What a request is to the scheduler, what the scheduler knows of tiers and of the engine, and what it decides.

Times are seconds of the scheduler's clock; tokens are estimates until the engine has counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from enum import StrEnum


class FlushReason(StrEnum):
    """Why a request was let go when it was. All but the first were held for company."""

    NOT_HELD = "not-held"
    PREFIX_READY = "prefix-ready"  # the request that computes the common prefix has its first token, or is gone
    WINDOW = "window"  # the tier's batchingWindow is over
    SLACK = "slack"  # waiting longer would endanger its time to first token
    GROUP_FULL = "group-full"  # enough company has come
    NOT_BUSY = "not-busy"  # the engine has room for it: waiting gains nothing
    IDLE = "idle"  # an idle engine holds nothing
    NO_GAIN = "no-gain"  # company no longer pays, or comes too seldom


class WaitsFor(StrEnum):
    """Why a request that is not held does not go yet."""

    PROMPTS = "prompts-ahead"  # the engine has as many prompts as it is sent ahead
    SLOTS = "slots"  # the engine runs as many sequences as it can, or has requests waiting
    BLOCKS = "blocks"  # its tier finds no room for it, where blocks are counted outside the engine
    TURN = "turn"  # others go first, and they wait


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """What the scheduler needs to know of a tier."""

    weight: int = 1
    priority: int = 0
    window: float = 0.0  # batchingWindow: the longest that a request is held for company


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for the engine.

    `chunks` are chained digests of how its prompt starts: two requests share the leading chunks that are equal, and may
    share nothing else (sharing scopes are part of the chain). A chunk is about `chunk_tokens` tokens long.
    """

    id: str
    tier: str
    tenant: str
    arrived: float
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0  # expected, of all its sequences
    deadline: float | None = None  # when its first token is due; None: nothing was promised
    chunks: tuple[bytes, ...] = ()
    chunk_tokens: float = 16.0
    conversation: str | None = None
    sequences: int = 1
    streams: bool = True  # its first token will be seen when it comes
    size: int = 0  # bytes that it holds while it waits

    def __deepcopy__(self, memo: Mapping[int, object]) -> Waiting:
        return self  # nothing in it ever changes

    @property
    def urgent_at(self) -> float:
        """When half of its time to first token is gone; never, where nothing was promised."""
        return math.inf if self.deadline is None else self.arrived + (self.deadline - self.arrived) / 2

    @property
    def due(self) -> float:
        return math.inf if self.deadline is None else self.deadline


@dataclasses.dataclass(slots=True)  # not frozen, which would take five times as long for every request
class Dispatch:
    """One request that goes now. `queued` and `held` are the seconds that it waited for its turn, and for company."""

    request: Waiting
    queued: float
    held: float = 0.0
    flush_reason: FlushReason = FlushReason.NOT_HELD
    group: str | None = None  # those that share a prefix worth reading once have the same one
    group_size: int = 1  # of those that wait or run now
    predicted_tokens: int = 0  # of its prompt that are probably cached


@dataclasses.dataclass(frozen=True, slots=True)
class Foreseen:
    """What would happen to a request that came now: it is held, it waits, or it goes at once, and nothing is set."""

    hold_reason: FlushReason | None = None  # what will probably let it go
    hold_ends: FlushReason | None = None  # what lets it go at the latest: WINDOW or SLACK
    hold_seconds: float = 0.0  # at most
    waits_for: WaitsFor | None = None


@dataclasses.dataclass(slots=True)  # not frozen: as above
class Decision:
    """Who goes now, in order, and when to ask again if nothing happens until then."""

    dispatches: tuple[Dispatch, ...] = ()
    wake_at: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    """How many sequences the engine runs at once, and what each tier may always have of them."""

    total: int = 32  # the Torch engine's default of --max-num-seqs
    nominal: Mapping[str, int] = dataclasses.field(default_factory=dict)


def _anyone(request: Waiting) -> bool:
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class EngineView:
    """What is known of the engine at this moment, besides what the scheduler itself has sent there.

    `admits` is asked in the order of dispatch, once for each candidate of a round: where the sidecar keeps the account
    of blocks by estimate, it says whether a request fits, and counts it if it does. An engine that keeps its own
    account admits by itself; `waiting` is then how many requests wait inside it.
    """

    slots: Slots = Slots()
    waiting: int = 0
    admits: Callable[[Waiting], bool] = _anyone


@dataclasses.dataclass(frozen=True, slots=True)
class Used:
    """What the engine counted for a request that has ended."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None  # None: the engine does not say
