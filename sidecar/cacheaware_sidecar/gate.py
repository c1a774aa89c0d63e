"""Waiting for the engine: the asyncio shell around `dispatch.py`.

A request holds a place from its submission to the end of the `async with`. However it leaves (answered, cancelled while
queued, cancelled at the very moment it was let go, failed), it leaves the queue, what it reserved is given back exactly
once, and whoever is next is let in. A timer asks again when the scheduler wants to be asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cacheaware_sidecar.block_budget import Demand
from cacheaware_sidecar.dispatch import Dispatcher
from cacheaware_sidecar.errors import Busy, Reason, TooLate
from cacheaware_sidecar.scheduling import Dispatch, Foreseen, Used, Waiting


class Gate:
    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float]) -> None:
        self._dispatcher = dispatcher
        self._scheduler = dispatcher.scheduler
        self._clock = clock  # that of `Waiting.arrived`, and the scheduler's
        self._places: dict[str, asyncio.Future[Dispatch]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def queued(self) -> int:
        return self._scheduler.waiting

    @property
    def in_flight(self) -> int:
        return self._scheduler.inside

    def queued_of(self, tier: str) -> int:
        return self._scheduler.waiting_of(tier)

    def place(
        self, request: Waiting, demand: Demand | None = None, *, patience: float, reject_late: bool = False
    ) -> _Place:
        """Wait for the engine, then hold a place in it: `async with gate.place(...) as dispatch`.

        `patience` is the most seconds to wait (`TooLate`). `reject_late`: a request that cannot meet its deadline any
        more is told so at once (`Busy`) instead of being served late.
        """
        return _Place(self, request, demand, patience, reject_late)

    def foresee(self, request: Waiting, demand: Demand | None = None, *, reject_late: bool = False) -> Foreseen:
        """What `place` would do with it now, a refusal included. Nobody waits, and nothing is reserved."""
        if reject_late:
            self._refuse_if_hopeless(request)
        return self._dispatcher.foresee(request, demand)

    def time_to_first_token(self, request: Waiting) -> float | None:
        """About how long it would take if it came now, in seconds; None: not known."""
        return self._scheduler.time_to_first_token(request)

    def predicted_tokens(self, request: Waiting) -> int:
        """About how many leading tokens of its prompt are cached now."""
        return self._scheduler.predicted_tokens(request)

    def pump(self) -> None:
        """Let in whoever may go: after a submission, a release, a first token, or a change of slots or terms."""
        if not self._scheduler.waiting:  # the next submission asks
            self._wake_at(None)
            return
        decision = self._dispatcher.next_batch()
        for dispatch in decision.dispatches:
            place = self._places[dispatch.request.id]
            if not place.done():
                place.set_result(dispatch)
            else:  # given up in this very tick; `_leave` has not run yet, and finishing twice does nothing
                self._dispatcher.refused(dispatch.request.id)
        self._wake_at(decision.wake_at)

    def first_byte(self, request_id: str) -> None:
        """Its prompt is computed: those that waited for that may go."""
        self._scheduler.first_byte(request_id)
        self.pump()

    def finished(self, request_id: str, used: Used | None) -> None:
        """What the engine counted, told before the place is left."""
        self._dispatcher.finished(request_id, used)

    def refused(self, request_id: str) -> None:
        """The engine would not have it, told before the place is left."""
        self._dispatcher.refused(request_id)

    async def _enter(
        self, request: Waiting, demand: Demand | None, patience: float, reject_late: bool
    ) -> tuple[asyncio.Future[Dispatch], Dispatch]:
        if reject_late:
            self._refuse_if_hopeless(request)
        place: asyncio.Future[Dispatch] = asyncio.get_running_loop().create_future()
        self._dispatcher.submit(request, demand)
        self._places[request.id] = place
        try:
            self.pump()
            if place.done():  # at once, as on any engine that is not full
                return place, place.result()
            return place, await self._turn(place, request, patience, reject_late)
        except BaseException:  # cancelled as well as refused: whoever does not get in leaves the queue
            self._leave(request, place)
            raise

    async def _turn(
        self, place: asyncio.Future[Dispatch], request: Waiting, patience: float, reject_late: bool
    ) -> Dispatch:
        limit = patience
        if reject_late and request.deadline is not None:
            limit = min(limit, request.deadline - self._clock())
        try:
            async with asyncio.timeout(max(0.0, limit)):
                return await place
        except TimeoutError:
            if limit < patience:
                raise self._too_busy(request) from None
            raise TooLate(
                f"the request waited {patience:g} s for its turn (--request-timeout): try again later",
                reason=Reason.REQUEST_TIMEOUT,
            ) from None

    def _leave(self, request: Waiting, place: asyncio.Future[Dispatch]) -> None:
        del self._places[request.id]
        self._dispatcher.withdraw(request.id)
        if place.done() and not place.cancelled():
            self._dispatcher.finished(request.id)
        place.cancel()
        self.pump()

    def _wake_at(self, time: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if time is not None:
            seconds = max(0.0, time - self._clock())
            self._timer = asyncio.get_running_loop().call_later(seconds, self.pump)

    def _refuse_if_hopeless(self, request: Waiting) -> None:
        """It would not be served in time: the engine is busy and the estimate says so, or one of its tier has waited
        for longer than this one may. An idle engine serves it: then the estimate is put to the test.
        """
        if request.deadline is None or not self._scheduler.inside:
            return
        now, allowed = self._clock(), request.deadline - request.arrived
        oldest = self._scheduler.oldest(request.tier)
        if oldest is not None and now - oldest >= allowed:
            raise self._too_busy(request)
        expected = self._scheduler.time_to_first_token(request)
        if expected is not None and now + expected > request.deadline:
            raise self._too_busy(request)

    def _too_busy(self, request: Waiting) -> Busy:
        return Busy(
            f"tier {request.tier} cannot give a first token in time now: try again later, or use another tier",
            reason=Reason.SLA_INFEASIBLE,
            retry_after=self._dispatcher.expected_wait(),
        )


class _Place:
    """A request's place, from entering the block to leaving it."""

    __slots__ = ("_asked", "_gate", "_place", "_request")

    def __init__(self, gate: Gate, request: Waiting, demand: Demand | None, patience: float, reject_late: bool) -> None:
        self._gate = gate
        self._request = request
        self._asked = (demand, patience, reject_late)
        self._place: asyncio.Future[Dispatch] | None = None

    async def __aenter__(self) -> Dispatch:
        self._place, dispatch = await self._gate._enter(self._request, *self._asked)
        return dispatch

    async def __aexit__(self, *_: object) -> None:
        assert self._place is not None
        self._gate._leave(self._request, self._place)
