"""What reading keys and values costs on this device, and so when a call of its own for a shared prefix pays.

A sequence that reads its context for itself copies it, where torch's operations read, or takes it from memory once
more. Reading together happens in place, once for all who share it, and costs a call and a merge more. Where the one
overtakes the other differs by a factor of ten between machines, so it is measured when an engine starts for the first
time on a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionCosts:
    """Seconds, for one layer."""

    own_token: float  # one sequence reads one token for itself, a copy included if one is made
    call: float  # one more call and its merge
    token: float  # a call reads one token in place, whoever is in it
    row: float  # … and for each sequence in it

    def gain(self, members: int, tokens: int) -> float:
        """What is saved if so many sequences read so many tokens in a call of their own."""
        return members * tokens * self.own_token - self.call - tokens * (self.token + members * self.row)

    def least_run(self) -> int:
        """Tokens from which reading in place pays for a single sequence."""
        saved = self.own_token - self.token - self.row
        return NEVER if saved <= 0 else max(1, min(NEVER, int(self.call / saved) + 1))

    def least_prefix(self, members: int) -> int:
        """Tokens from which so many sequences read a shared prefix together."""
        saved = members * (self.own_token - self.row) - self.token
        return NEVER if saved <= 0 else max(1, min(NEVER, int(self.call / saved) + 1))


NEVER = 2**40
"""More tokens than any context has."""

SEPARATELY = AttentionCosts(own_token=0.0, call=1.0, token=0.0, row=0.0)
"""Every sequence reads for itself: nothing is ever worth a call of its own."""

TOGETHER = AttentionCosts(own_token=1.0, call=0.0, token=0.0, row=0.0)
"""Whatever is shared or lies in one piece is read by a call of its own: for tests, which have no long contexts."""

MEMBERS, OWN = 8, 16
MOST_READINGS = 30


@dataclass(frozen=True, slots=True)
class Reading:
    """One thing to time: so many sequences read so many tokens each for itself, and so many together."""

    members: int
    own: int
    shared: int = 0


def measure(
    attend: Callable[[Reading], None],
    long: int,
    *,
    calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    patience_s: float = 0.04,
) -> AttentionCosts:
    """Costs from readings of `attend`, which does each `calls` times; `long` is the longest prefix to read.

    Each is repeated for so many seconds and the least counts: whatever else the machine does only adds to one.
    """
    short = long // 8

    def seconds(reading: Reading) -> float:
        attend(reading)  # the first one warms up
        deadline = clock() + patience_s
        times: list[float] = []
        while not times or (len(times) < MOST_READINGS and clock() < deadline):
            started = clock()
            attend(reading)
            times.append((clock() - started) / calls)
        return min(times)

    alone, many = seconds(Reading(1, OWN)), seconds(Reading(MEMBERS, OWN))
    short_alone = seconds(Reading(1, OWN, short)) - alone
    long_alone = seconds(Reading(1, OWN, long)) - alone
    long_many = seconds(Reading(MEMBERS, OWN, long)) - many
    token = max(0.0, (long_alone - short_alone) / (long - short))
    row = max(0.0, (long_many - long_alone) / (long * (MEMBERS - 1)))
    return AttentionCosts(
        own_token=max(0.0, (seconds(Reading(MEMBERS, short)) - many) / (MEMBERS * (short - OWN))),
        call=max(0.0, short_alone - token * short),
        token=max(0.0, token - row),
        row=row,
    )
