"""Keys that wait for work: each at most once, none handed out twice at a time, those that failed later and later."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

FIRST_DELAY = 1.0  # after a failure; doubled with each further one
LONGEST_DELAY = 120.0


class WorkQueue(Generic[K]):
    """`add` any time; a worker takes a key with `get` and must give it back with `done` or `failed`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = itertools.count()
        self._at_work: set[K] = set()
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Event()

    def add(self, key: K, delay: float = 0.0) -> None:
        """Wanted within `delay` seconds; an earlier time that it is wanted at stays."""
        due = self._clock() + delay
        if due >= self._due.get(key, float("inf")):
            return
        self._due[key] = due
        if key not in self._at_work:  # else it is put in line when it is given back
            self._line_up(key, due)

    async def get(self) -> K:
        while True:
            while self._heap and not self._counts(self._heap[0]):
                heapq.heappop(self._heap)
            wait = self._heap[0][0] - self._clock() if self._heap else None
            if wait is not None and wait <= 0:
                _, _, key = heapq.heappop(self._heap)
                del self._due[key]
                self._at_work.add(key)
                return key
            self._changed.clear()
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, key: K, again_in: float | None = None) -> None:
        self._failures.pop(key, None)
        self._give_back(key, again_in)

    def failed(self, key: K) -> float:
        """The delay after which it is handed out again, unless it is wanted earlier."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(failures, 16))
        self._give_back(key, delay)
        return delay

    def forget(self, key: K) -> None:
        """It is gone: nothing of it is kept but what is at work."""
        self._due.pop(key, None)
        self._failures.pop(key, None)

    def _give_back(self, key: K, again_in: float | None) -> None:
        self._at_work.discard(key)
        if again_in is not None:
            self.add(key, again_in)
        if key in self._due:
            self._line_up(key, self._due[key])

    def _line_up(self, key: K, due: float) -> None:
        heapq.heappush(self._heap, (due, next(self._order), key))
        self._changed.set()

    def _counts(self, entry: tuple[float, int, K]) -> bool:
        due, _, key = entry
        return key not in self._at_work and self._due.get(key) == due
