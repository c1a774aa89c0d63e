"""Waiting for the engine: the asyncio shell around `dispatch.py`.

A request holds a place from its submission to the end of the `async with`. However it leaves (answered, cancelled while
queued, cancelled at the very moment it was let go, failed), it leaves the queue, its reservation is released exactly
once, and whoever is next is let in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from cacheaware_sidecar.dispatch import Dispatch, Dispatcher
from cacheaware_sidecar.errors import Busy, Reason, TooLate
from cacheaware_sidecar.fair_queue import Waiting


class Gate:
    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float]) -> None:
        self._dispatcher = dispatcher
        self._clock = clock  # that of `Waiting.arrived`
        self._places: dict[str, asyncio.Future[Dispatch]] = {}

    @property
    def queued(self) -> int:
        return len(self._dispatcher.queue)

    @property
    def in_flight(self) -> int:
        return self._dispatcher.budget.requests

    def queued_of(self, tier: str) -> int:
        return self._dispatcher.queue.waiting(tier)

    @contextlib.asynccontextmanager
    async def place(self, request: Waiting, *, patience: float, reject_late: bool = False) -> AsyncIterator[Dispatch]:
        """Wait for the engine, then hold a place in it.

        `patience` is the most seconds to wait (`TooLate`). `reject_late`: a request that cannot meet its deadline any
        more is told so at once (`Busy`) instead of being served late.
        """
        if reject_late:
            self._refuse_if_hopeless(request)
        place: asyncio.Future[Dispatch] = asyncio.get_running_loop().create_future()
        self._dispatcher.submit(request)
        self._places[request.id] = place
        try:
            self.pump()
            yield await self._turn(place, request, patience, reject_late)
        finally:
            self._leave(request, place)

    def pump(self) -> None:
        """Let in whoever may go: after a submission, a release, or a change of slots or terms."""
        for dispatch in self._dispatcher.next_batch(self._clock()):
            place = self._places[dispatch.request.id]
            if not place.done():
                place.set_result(dispatch)
            else:  # given up in this very tick; `_leave` has not run yet, and a second release does nothing
                dispatch.reservation.release()

    def settle(self, request: Waiting, cost: float) -> None:
        self._dispatcher.settle(request, cost)

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
            place.result().reservation.release()
        place.cancel()
        self.pump()

    def _refuse_if_hopeless(self, request: Waiting) -> None:
        """The oldest waiter of the tier has waited longer than this one may: it would not be served in time either."""
        oldest = self._dispatcher.queue.oldest(request.tier)
        if oldest is None or request.deadline is None:
            return
        if self._clock() - oldest >= request.deadline - request.arrived:
            raise self._too_busy(request)

    def _too_busy(self, request: Waiting) -> Busy:
        return Busy(
            f"tier {request.tier} cannot give a first token in time now: try again later, or use another tier",
            reason=Reason.SLA_INFEASIBLE,
            retry_after=self._dispatcher.expected_wait(),
        )
