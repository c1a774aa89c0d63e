"""The scheduler: events in, decisions out. See docs/designs/0003-scheduling.md for its rules and bounds.

    add → next (Dispatch) → first_byte → finished          cancel at any moment
    step: what the engine's steps cost

It has one caller at a time, which asks `next` after every event and at `wake_at`, and sends what it is told at once.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

from cacheaware_api import wire
from cacheaware_sidecar.scheduling.fair_queue import FairQueue
from cacheaware_sidecar.scheduling.prefix_index import PrefixIndex
from cacheaware_sidecar.scheduling.requests import Decision, Dispatch, EngineView, Slots, Terms, Used, Waiting


@dataclasses.dataclass(slots=True)
class _Inside:
    """A request in the engine, and what its share was charged for it."""

    request: Waiting
    cost: float
    computing: bool = True  # its first token has not come yet


class Scheduler:
    """Every request added is dispatched or cancelled, once; every one dispatched is finished, once."""

    def __init__(
        self,
        terms: Mapping[str, Terms] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        index: PrefixIndex | None = None,
    ) -> None:
        self._clock = clock
        self.index = index or PrefixIndex()
        self._queue = FairQueue(warmth=self.predicted_tokens)
        self._inside: dict[str, _Inside] = {}
        self._sequences: dict[str, int] = {}  # inside the engine, by tier
        if terms is not None:
            self.set_terms(terms)

    # -- what others read ----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def waiting_of(self, tier: str) -> int:
        return self._queue.waiting(tier)

    @property
    def inside(self) -> int:
        """Requests in the engine."""
        return len(self._inside)

    def sequences_of(self, tier: str) -> int:
        """A tier's sequences in the engine."""
        return self._sequences.get(tier, 0)

    def predicted_tokens(self, request: Waiting) -> int:
        """About how many leading tokens of the prompt are cached now."""
        return round(min(request.prompt_tokens, self.index.match(request.chunks) * request.chunk_tokens))

    # -- events --------------------------------------------------------------------------------------------------------

    def set_terms(self, terms: Mapping[str, Terms]) -> None:
        self._queue.set_terms(terms)

    def add(self, request: Waiting) -> None:
        if request.id in self._inside:
            raise ValueError(f"request {request.id} is in the engine already")
        self._queue.push(request)

    def cancel(self, request_id: str) -> bool:
        """Take a waiting request out; False if it was dispatched, or was never here."""
        return self._queue.remove(request_id)

    def next(self, engine: EngineView) -> Decision:
        now = self._clock()
        dispatches = []
        closed: set[str] = set()
        while (request := self._queue.peek(now, closed)) is not None:
            if not self._has_slot(request.tier, engine.slots) or not engine.admits(request):
                closed.add(request.tier)
                continue
            predicted = self.predicted_tokens(request)
            cost = max(1.0, request.prompt_tokens - predicted) + request.output_tokens
            self._queue.take(request, cost, closed)
            self._inside[request.id] = _Inside(request, cost)
            self._sequences[request.tier] = self.sequences_of(request.tier) + request.sequences
            dispatches.append(Dispatch(request, max(0.0, now - request.arrived), predicted_tokens=predicted))
        return Decision(tuple(dispatches))

    def first_byte(self, request_id: str) -> None:
        """The engine has computed the prompt. Unknown or repeated: nothing happens."""
        inside = self._inside.get(request_id)
        if inside is not None and inside.computing:
            inside.computing = False
            self.index.insert(inside.request.chunks)

    def finished(self, request_id: str, used: Used | None = None) -> bool:
        """A request has left the engine, with what it counted. True the first time.

        Without `used` it was cut off: what it had been expected to cost stays charged.
        """
        inside = self._inside.pop(request_id, None)
        if inside is None:
            return False
        request = inside.request
        left = self._sequences[request.tier] - request.sequences
        if left:
            self._sequences[request.tier] = left
        else:
            del self._sequences[request.tier]
        if used is not None:
            if inside.computing:
                self.index.insert(request.chunks)
            cost = max(1.0, used.prompt_tokens - (used.cached_tokens or 0)) + used.output_tokens
            self._queue.charge(request.tier, request.tenant, cost - inside.cost)
        return True

    def step(self, report: wire.StepReport) -> None:
        """The engine told what its last steps cost."""

    # -- deciding ------------------------------------------------------------------------------------------------------

    def _has_slot(self, tier: str, slots: Slots) -> bool:
        """A tier below its nominal slots may always send: the engine takes one back from a tier that borrowed it. A
        request of several sequences may overshoot the total: the engine queues what it cannot run yet.
        """
        return sum(self._sequences.values()) < slots.total or self.sequences_of(tier) < slots.nominal.get(tier, 0)
