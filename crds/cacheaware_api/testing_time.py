"""The running event loop's time, for tests: it is later at once, or it stands still. Sockets work as ever.

A limit of a second is waited for without a second, and no limit ends because the machine was busy. What is waited for
in a frozen moment must come by itself: there, sleeping has no end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator


class _LoopTime:
    """Takes the place of a loop's `time`."""

    def __init__(self, real: Callable[[], float]) -> None:
        self._real = real
        self._ahead = 0.0
        self._still: float | None = None

    def __call__(self) -> float:
        return self._real() + self._ahead if self._still is None else self._still

    def let_pass(self, seconds: float) -> None:
        if self._still is None:
            self._ahead += seconds
        else:
            self._still += seconds

    def stand_still(self) -> None:
        self._still = self()

    def go_on(self) -> None:
        assert self._still is not None
        self._ahead, self._still = self._still - self._real(), None


def let_pass(seconds: float) -> None:
    """It is so many seconds later from now on: what is due by then happens next."""
    _time_of(asyncio.get_running_loop()).let_pass(seconds)


@contextlib.contextmanager
def standing_still() -> Iterator[None]:
    """However long it takes, no time passes meanwhile, and nothing comes too late."""
    time = _time_of(asyncio.get_running_loop())
    time.stand_still()
    try:
        yield
    finally:
        time.go_on()


def _time_of(loop: asyncio.AbstractEventLoop) -> _LoopTime:
    known: object = loop.time
    if isinstance(known, _LoopTime):
        return known
    time = _LoopTime(loop.time)
    loop.time = time  # type: ignore[method-assign]  # each test has a loop of its own
    return time
