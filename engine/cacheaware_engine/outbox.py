"""The output of one API call on its way from the step loop to the handler that answers its client.

The step loop posts and never waits. What a slow client has not taken yet is merged, so a call holds its text once,
however many steps it took.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable
from dataclasses import replace

from .requests import Delta


class Outbox:
    """Written by the step loop's thread, read by one task of the event loop it was made for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, requests: int = 1) -> None:
        """`requests`: how many requests of the engine post here; the call has ended when all of them have."""
        self._loop = loop
        self._open = requests
        self._lock = threading.Lock()
        self._deltas: dict[int, Delta] = {}
        self._error: Exception | None = None
        self._ready = asyncio.Event()
        self._woken = False
        self.cached_tokens = 0

    def admitted(self, cached_tokens: int) -> None:
        """A request runs for the first time; so many tokens of its prompt were computed already."""
        self.cached_tokens += cached_tokens

    def post(self, deltas: Iterable[Delta]) -> None:
        with self._lock:
            for delta in deltas:
                earlier = self._deltas.get(delta.index)
                self._deltas[delta.index] = delta if earlier is None else merged(earlier, delta)
            self._wake()

    def close(self, error: Exception | None = None) -> None:
        """A request ended. After the last one, or the first error, a reader gets what is there and then that."""
        with self._lock:
            self._open -= 1
            self._error = self._error or error
            if self._open <= 0 or error is not None:
                self._wake()

    async def take(self) -> list[Delta]:
        """What came since the last call; empty once the call has ended. Raises the error it ended with."""
        while True:
            await self._ready.wait()
            with self._lock:
                deltas, self._deltas = list(self._deltas.values()), {}
                if deltas:
                    return deltas
                if self._error is not None:
                    raise self._error
                if self._open <= 0:
                    return []
                self._ready.clear()
                self._woken = False

    def _wake(self) -> None:
        """Under the lock: one call into the event loop until the reader has looked, however much is posted."""
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._ready.set)


def merged(earlier: Delta, later: Delta) -> Delta:
    """Two deltas of one sequence as one."""
    return replace(
        later,
        text=earlier.text + later.text,
        tokens=earlier.tokens + later.tokens,
        reports=earlier.reports + later.reports,
        prompt_reports=earlier.prompt_reports + later.prompt_reports,
    )
