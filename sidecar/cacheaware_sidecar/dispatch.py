"""The scheduler with bounds around it: a queue that may be full, and an account of what is inside the engine.

Pure, like the scheduler; `gate.py` acts. Every request submitted is dispatched or withdrawn, once, and what a
dispatched one has reserved is given back once.
"""

from __future__ import annotations

from cacheaware_sidecar.block_budget import Admits, Demand
from cacheaware_sidecar.budget import Reservation, SlotBudget
from cacheaware_sidecar.errors import Busy, Reason
from cacheaware_sidecar.scheduling import Decision, EngineView, Foreseen, Scheduler, Slots, Used, Waiting

MAX_QUEUE_BYTES = 512 * 1024 * 1024  # bodies wait in memory; a thousand of the largest would not fit a small pod
_LONGEST_RETRY = 60.0  # seconds


class Dispatcher:
    def __init__(
        self,
        max_queue: int,
        scheduler: Scheduler,
        budget: SlotBudget | None = None,
        max_bytes: int = MAX_QUEUE_BYTES,
    ) -> None:
        self._max_queue = max_queue
        self._max_bytes = max_bytes
        self.scheduler = scheduler
        self.budget = budget or SlotBudget()
        self.engine_waiting = 0  # requests that wait inside the engine, where it tells
        self._bytes: dict[str, int] = {}  # of those that wait
        self._all_bytes = 0
        self._demands: dict[str, Demand] = {}  # of those that wait
        self._reservations: dict[str, Reservation] = {}  # of those inside

    def set_slots(self, slots: Slots) -> None:
        self.budget.slots = slots

    def submit(self, request: Waiting, demand: Demand | None = None) -> None:
        """Queue a request, with its demand of KV blocks where admission goes by estimate; raises `Busy` where the queue
        is full.
        """
        self._refuse_if_full(request)
        self.scheduler.add(request)
        self._bytes[request.id] = request.size
        self._all_bytes += request.size
        if demand is not None:
            self._demands[request.id] = demand

    def foresee(self, request: Waiting, demand: Demand | None = None) -> Foreseen:
        """What `submit` and `next_batch` would make of it now, a refusal included. Nothing is queued or reserved."""
        self._refuse_if_full(request)
        admission = self._admission()

        def admits(one: Waiting) -> bool:
            return admission(one.tier, demand if one is request else self._demands.get(one.id))

        return self.scheduler.foresee(request, EngineView(self.budget.slots, self.engine_waiting, admits))

    def withdraw(self, request_id: str) -> bool:
        """Take a waiting request out; False if it has been dispatched, or was never here."""
        if not self.scheduler.cancel(request_id):
            return False
        self._waits_no_more(request_id)
        self._demands.pop(request_id, None)
        return True

    def next_batch(self) -> Decision:
        """Everything that goes to the engine now, in order. The caller sends them, and says when each has finished."""
        admission = self._admission()

        def admits(request: Waiting) -> bool:
            demand = self._demands.get(request.id)
            if not admission(request.tier, demand):
                return False
            reservation = self.budget.reserve(request.id, request.tier, request.sequences, demand)
            self._reservations[request.id] = reservation
            self._demands.pop(request.id, None)
            return True

        decision = self.scheduler.next(EngineView(self.budget.slots, self.engine_waiting, admits))
        for dispatch in decision.dispatches:
            self._waits_no_more(dispatch.request.id)
        return decision

    def finished(self, request_id: str, used: Used | None = None) -> bool:
        """It has left the engine, however it ended. True the first time."""
        if not self.scheduler.finished(request_id, used):
            return False
        self._reservations.pop(request_id).release()
        return True

    def refused(self, request_id: str) -> bool:
        """The engine would not have it: its share is charged nothing. True the first time."""
        if not self.scheduler.refused(request_id):
            return False
        self._reservations.pop(request_id).release()
        return True

    def expected_wait(self) -> float:
        """About how long a new request would wait, in seconds; what a client is told to wait before it tries again."""
        return min(_LONGEST_RETRY, max(1.0, self.scheduler.waiting * (self.scheduler.pace or 0.0)))

    def _admission(self) -> Admits:
        return _any_demand if self.budget.blocks is None else self.budget.blocks.admission()

    def _refuse_if_full(self, request: Waiting) -> None:
        waiting = self.scheduler.waiting
        if waiting >= self._max_queue:
            raise Busy(
                f"{waiting} requests wait already (--max-queue): try again later",
                reason=Reason.QUEUE_FULL,
                retry_after=self.expected_wait(),
            )
        if waiting and self._all_bytes + request.size > self._max_bytes:
            raise Busy(
                "the requests that wait already are too large together: try again later, or send a shorter prompt",
                reason=Reason.QUEUE_FULL,
                retry_after=self.expected_wait(),
            )

    def _waits_no_more(self, request_id: str) -> None:
        self._all_bytes -= self._bytes.pop(request_id)


def _any_demand(tier: str, demand: Demand | None) -> bool:
    """An engine that counts its blocks admits by itself."""
    return True
