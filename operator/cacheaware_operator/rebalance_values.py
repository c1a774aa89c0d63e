"""What the rebalancer keeps from epoch to epoch, and what it says of each one. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cacheaware_operator.predictions import Trial, Verdict
from cacheaware_operator.reuse_memory import Memory
from cacheaware_operator.status_conditions import Finding


class MoveReason(StrEnum):
    MORE_HITS = "MoreHits"
    SLA_MISSED = "SLAMissed"  # it loses hits over all, but they are worth more to a tier that misses its promise
    PREDICTIONS_FAILED = "PredictionsFailed"  # back to nominal


class Skip(StrEnum):
    """Why nothing moved."""

    OFF = "Off"
    NO_REPLICAS = "NoReplicas"
    STALE_METRICS = "StaleMetrics"
    NOT_ACKNOWLEDGED = "NotAcknowledged"  # the last change is on its way
    LEARNING = "Learning"  # too few references so far
    JUDGING = "Judging"  # moves pause until it is known what the last ones brought
    PREDICTIONS_FAILED = "PredictionsFailed"  # nominal shares, for a while
    GAIN_TOO_SMALL = "GainTooSmall"
    REVERSAL_TOO_SOON = "ReversalTooSoon"
    STEP_TOO_SMALL = "StepTooSmall"  # no step within maxStepPercent gains anything
    DRY_RUN = "DryRun"  # the moves are only told


@dataclass(frozen=True, slots=True)
class Move:
    from_: str
    to: str
    percent: int
    reason: MoveReason
    why: str  # in words, for the status
    gain_percent: float | None = None  # predicted, of all weighted references


@dataclass(frozen=True, slots=True)
class Turn:
    """When a tier's share last changed, and which way."""

    epoch: int
    grew: bool


@dataclass(frozen=True, slots=True)
class State:
    """All that is kept from one epoch to the next. A new one takes over the shares that the replicas have."""

    epoch: int = 0
    effective: Mapping[str, int] | None = None
    nominal: Mapping[str, int] = field(default_factory=dict)  # of the terms that `effective` was decided under
    memory: Memory = field(default_factory=Memory)
    urgency: Mapping[str, float] = field(default_factory=dict)  # by tier: what its weight is multiplied by
    learned: int = 0  # epochs whose figures were used
    hurries: bool = True  # the first epochs may go the whole way
    turns: Mapping[str, Turn] = field(default_factory=dict)
    trial: Trial | None = None
    failures: int = 0  # in a row
    distrusted_until: int | None = None  # epoch


@dataclass(frozen=True, slots=True)
class Decision:
    """`effective` is what the replicas are to have now. `moves` led to it; where `skipped` is DRY_RUN they would."""

    state: State
    effective: Mapping[str, int]
    moves: tuple[Move, ...] = ()
    skipped: Skip | None = None
    message: str = ""  # what there is to say of `skipped`
    conditions: tuple[Finding, ...] = ()
    verdict: Verdict | None = None  # what earlier moves brought, in the epoch in which that is known

    @property
    def made(self) -> tuple[Move, ...]:
        """The moves that are in `effective`."""
        return () if self.skipped is Skip.DRY_RUN else self.moves
