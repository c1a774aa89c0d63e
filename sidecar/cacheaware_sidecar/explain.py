"""The last decisions, for `GET /pool/explain`: how requests were treated and why. It holds no prompt and no key."""

from __future__ import annotations

from collections import deque

from cacheaware_api import wire

KEPT = 1000


class Decisions:
    def __init__(self, kept: int = KEPT) -> None:
        self._decisions: deque[wire.Decision] = deque(maxlen=kept)

    def add(self, decision: wire.Decision) -> None:
        self._decisions.append(decision)

    def last(self, count: int) -> list[wire.Decision]:
        """The newest first."""
        return [decision for decision, _ in zip(reversed(self._decisions), range(count), strict=False)]
