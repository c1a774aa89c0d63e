"""Requests that arrive while streams run: only a few of them begin in one turn of the event loop.

To begin one takes as long as passing on a dozen chunks. Where many arrive at once, the tokens of all running streams
would wait until the last of them is under way; so they take turns, in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections import deque

A_TURN = 2  # requests, about a millisecond together


class Turns:
    def __init__(self, a_turn: int = A_TURN) -> None:
        self._a_turn = a_turn
        self._begun = 0  # in this turn of the loop
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.streams = 0  # that run

    async def begin(self) -> None:
        """Wait for a turn; none is needed while no stream runs."""
        if not self.streams and not self._waiting:
            return
        loop = asyncio.get_running_loop()
        if self._begun < self._a_turn and not self._waiting:
            if not self._begun:
                loop.call_soon(self._next)
            self._begun += 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        """A new turn of the loop."""
        self._begun = 0
        while self._waiting and self._begun < self._a_turn:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._begun += 1
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next)
