"""One request's output on its way from the step loop to the handler that answers its client.

The step loop posts and never waits. What a slow client has not taken yet is merged, so a request holds its text once,
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

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._deltas: dict[int, Delta] = {}
        self._ended = False
        self._error: Exception | None = None
        self._ready = asyncio.Event()
        self._woken = False
        self.cached_tokens = 0

    def admitted(self, cached_tokens: int) -> None:
        """The request runs; so many tokens of its prompt were computed already."""
        self.cached_tokens = cached_tokens

    def post(self, deltas: Iterable[Delta]) -> None:
        with self._lock:
            for delta in deltas:
                earlier = self._deltas.get(delta.index)
                self._deltas[delta.index] = delta if earlier is None else merged(earlier, delta)
            self._wake()

    def close(self, error: Exception | None = None) -> None:
        """Nothing more comes; a reader gets what is there, then the end or the error. A second call does nothing."""
        with self._lock:
            if not self._ended:
                self._ended, self._error = True, error
                self._wake()

    async def take(self) -> list[Delta]:
        """What came since the last call; empty once the request has ended. Raises the error it ended with."""
        while True:
            await self._ready.wait()
            with self._lock:
                deltas, self._deltas = list(self._deltas.values()), {}
                if deltas:
                    return deltas
                if self._error is not None:
                    raise self._error
                if self._ended:
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
    return replace(later, text=earlier.text + later.text, tokens=earlier.tokens + later.tokens)
