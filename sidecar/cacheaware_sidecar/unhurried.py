"""Work that nobody waits for, cut into steps: one of them in each turn of the event loop, so that requests go on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator


class Unhurried:
    """What was added first is done first. What is left when the loop stops is never done."""

    def __init__(self) -> None:
        self._work: deque[Iterator[None]] = deque()

    def add(self, steps: Iterator[None]) -> None:
        """Its first step is done at once, if nothing else waits: most work has no other."""
        self._work.append(steps)
        if len(self._work) == 1:
            self._step()

    def _step(self) -> None:
        goes_on = False
        try:
            for _ in self._work[0]:
                goes_on = True
                break
        finally:  # what fails is over, and no reason to leave the rest
            if not goes_on:
                self._work.popleft()
            if self._work:
                asyncio.get_running_loop().call_soon(self._step)
