"""A request as the pool sees it, and what the pool answers.

Tokens, sampling and time are the caller's. A request is one API call: its `n` sequences are admitted and preempted
together and share the blocks of their prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from .keys import BlockId, BlockKey


class Stage(StrEnum):
    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    GONE = "gone"


@dataclass(eq=False, slots=True)
class Request:
    """One API request. The caller fills `keys` and `blocks`, again before each admission; the pool fills the rest."""

    id: str
    tier: str
    sequences: int
    keys: list[list[BlockKey]]  # per sequence: of full blocks that may be hit; at least one token is left to compute
    blocks: list[int]  # per sequence: blocks that its tokens so far need
    max_blocks: int  # most blocks a sequence can ever need
    prompt_blocks: int = 0  # leading blocks that all sequences share physically: the full ones of the prompt
    group: str | None = None  # whose set-aside blocks it may take first
    prompt_tokens: int | None = None  # for the counters of hits; absent: as many as the first sequence's blocks hold

    tables: list[list[BlockId]] = field(init=False)  # per sequence, while running
    copies: list[list[BlockId]] = field(init=False)  # per sequence: what it computed although an equal block is there
    number: int | None = field(init=False, default=None)  # arrival order; kept when it is preempted
    stage: Stage = field(init=False, default=Stage.NEW)
    started: bool = field(init=False, default=False)  # admitted before: it resumes
    reclaims: int = field(init=False, default=0)  # times it was preempted so that a tier got its nominal back
    finished: set[int] = field(init=False, default_factory=set)  # sequences given back before their siblings

    def __post_init__(self) -> None:
        self.tables = [[] for _ in range(self.sequences)]
        self.copies = [[] for _ in range(self.sequences)]

    @property
    def live(self) -> list[int]:
        """Indices of the sequences that have not finished."""
        return [index for index in range(self.sequences) if index not in self.finished]


# -- answers ----------------------------------------------------------------------------------------------------------


class WaitReason(StrEnum):
    """What a waiter lacks."""

    SLOTS = "slots"  # sequences that may run
    OLDER = "older"  # an older request of its tier waits, and it is beyond nominal
    LIMIT = "limit"  # its tier's running requests hold too much of the tier's limit
    LENDING = "lending"  # the other tiers lend no more
    ROOM = "room"  # blocks that it may take
    PREEMPTION = "preemption"  # others would have to give way, and the caller would have none preempted now


@dataclass(frozen=True, slots=True)
class Admitted:
    hit_blocks: list[int]  # per sequence: leading blocks whose KV is there already
    preempted: list[Request]


@dataclass(frozen=True, slots=True)
class Waiting:
    reason: WaitReason


@dataclass(frozen=True, slots=True)
class Ended:
    """No block will come: the caller ends the sequence (of a running request) or the request and gives it back."""

    reason: str = "length"  # the finish reason
    why: str = ""  # in words; the message for a request that never started and has to be refused
    preempted: list[Request] = field(default_factory=list)  # others that gave way first, in vain


@dataclass(frozen=True, slots=True)
class Grown:
    block: BlockId
    preempted: list[Request]


@dataclass(frozen=True, slots=True)
class Yielded:
    """The request itself waits again; `preempted` are others that do."""

    preempted: list[Request]


Admission = Admitted | Waiting | Ended
Growth = Grown | Yielded | Ended
