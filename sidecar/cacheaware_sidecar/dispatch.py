"""Which requests go to the engine now. Pure: it is told the time, and decides; `gate.py` acts.

`next_batch(now)` is the one place that decides order and, later, groups and windows: today every request goes alone, as
soon as the engine has room and the queue says it is its turn, and nothing is held for company.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from enum import StrEnum

from cacheaware_sidecar.budget import Reservation, SlotBudget, Slots
from cacheaware_sidecar.errors import Busy, Reason
from cacheaware_sidecar.fair_queue import FairQueue, Terms, Waiting

MAX_QUEUE_BYTES = 512 * 1024 * 1024  # bodies wait in memory; a thousand of the largest would not fit a small pod
_LONGEST_RETRY = 60.0  # seconds
_SMOOTHING = 0.1


class FlushReason(StrEnum):
    """Why a request was let go when it was."""

    NOT_HELD = "not-held"


@dataclasses.dataclass(frozen=True, slots=True)
class Dispatch:
    """One request that goes now. `queued` and `held` are the seconds that it waited for its turn, and for company."""

    request: Waiting
    reservation: Reservation
    queued: float
    held: float = 0.0
    flush_reason: FlushReason = FlushReason.NOT_HELD
    group: str | None = None


class Dispatcher:
    """A bounded queue in front of a bounded engine. Every request submitted is dispatched or withdrawn, once."""

    def __init__(
        self,
        max_queue: int,
        queue: FairQueue | None = None,
        budget: SlotBudget | None = None,
        max_bytes: int = MAX_QUEUE_BYTES,
    ) -> None:
        self._max_queue = max_queue
        self._max_bytes = max_bytes
        self.queue = queue or FairQueue()
        self.budget = budget or SlotBudget()
        self._between: float | None = None  # seconds between two dispatches, while there is a queue
        self._last: float | None = None

    def set_terms(self, terms: Mapping[str, Terms]) -> None:
        self.queue.set_terms(terms)

    def set_slots(self, slots: Slots) -> None:
        self.budget.slots = slots

    def submit(self, request: Waiting) -> None:
        """Queue a request; raises `Busy` where the queue is full."""
        if len(self.queue) >= self._max_queue:
            raise Busy(
                f"{len(self.queue)} requests wait already (--max-queue): try again later",
                reason=Reason.QUEUE_FULL,
                retry_after=self.expected_wait(),
            )
        if len(self.queue) and self.queue.bytes + request.size > self._max_bytes:
            raise Busy(
                "the requests that wait already are too large together: try again later, or send a shorter prompt",
                reason=Reason.QUEUE_FULL,
                retry_after=self.expected_wait(),
            )
        self.queue.push(request)

    def withdraw(self, request_id: str) -> bool:
        """Take a waiting request out; False if it has been dispatched, or was never here."""
        return self.queue.remove(request_id)

    def next_batch(self, now: float) -> tuple[Dispatch, ...]:
        """Everything that goes to the engine now, in order. The caller sends them and releases each reservation."""
        batch = []
        admits = self._admission()
        while (request := self.queue.pop(now, self.budget.has_room, admits)) is not None:
            reservation = self.budget.reserve(request.id, request.tier, request.sequences, request.demand)
            batch.append(Dispatch(request, reservation, queued=max(0.0, now - request.arrived)))
        if batch:
            self._note_pace(now, len(batch))
        return tuple(batch)

    def settle(self, request: Waiting, cost: float) -> None:
        """The engine has told what a request really cost: correct its share's account."""
        self.queue.charge(request.tier, request.tenant, cost - request.cost)

    def expected_wait(self) -> float:
        """About how long a new request would wait, in seconds; what a client is told to wait before it tries again."""
        return min(_LONGEST_RETRY, max(1.0, len(self.queue) * (self._between or 0.0)))

    def _admission(self) -> Callable[[Waiting], bool]:
        """Who may go in this round, as far as blocks decide it: where the engine keeps their account, it decides."""
        if self.budget.blocks is None:
            return lambda request: True
        admits = self.budget.blocks.admission()
        return lambda request: admits(request.tier, request.demand)

    def _note_pace(self, now: float, dispatched: int) -> None:
        if self._last is not None and len(self.queue):
            between = (now - self._last) / dispatched
            self._between = between if self._between is None else self._between + _SMOOTHING * (between - self._between)
        self._last = now
