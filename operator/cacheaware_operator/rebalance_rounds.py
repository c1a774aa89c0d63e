"""The rebalancing rounds of one pool: when the next is due, and what is remembered from one to the next. No I/O.

All of it may be lost: a new start takes over the shares that the replicas have, and learns anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from cacheaware_api.defaults import RebalancingMode
from cacheaware_operator.fleet import Snapshot
from cacheaware_operator.readings import Page, Readings, ReplicaReading, readings_of
from cacheaware_operator.rebalance import decide
from cacheaware_operator.rebalance_terms import Terms
from cacheaware_operator.rebalance_values import Decision, State
from cacheaware_operator.status_conditions import Finding


class RebalanceRounds:
    """Times are seconds of the clock that the pages were stamped with."""

    def __init__(self) -> None:
        self._state = State()
        self._held = float("-inf")  # when the last round was
        self._last: Mapping[str, ReplicaReading] = {}  # of each replica
        self.closer_look: Sequence[Finding] = ()  # what the last round found that a status should say

    def due(self, terms: Terms, now: float) -> bool:
        """Whether it is time for a round; with mode Off it never is, and everything is forgotten."""
        if terms.mode is RebalancingMode.OFF:
            self._state, self._held, self._last, self.closer_look = State(), float("-inf"), {}, ()
            return False
        return now >= self._held + terms.interval

    def hold(self, terms: Terms, snapshot: Snapshot, pages: Mapping[str, Page], now: float) -> Decision:
        """`pages` has the metrics page of every ready replica that answered."""
        decision = decide(self._state, self._completed(readings_of(snapshot, pages)), terms, now)
        self._state, self.closer_look, self._held = decision.state, decision.conditions, now
        return decision

    def _completed(self, readings: Readings) -> Readings:
        """With what a replica said before, where it says nothing now: how old that may be is for the decision."""
        known = {**self._last, **{reading.name: reading for reading in readings.replicas}}
        self._last = {name: reading for name, reading in known.items() if name in readings.ready}
        return dataclasses.replace(readings, replicas=tuple(self._last.values()))
