"""Requests in progress, and the end of it all: a draining sidecar refuses new ones and lets those inside finish."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager

from cacheaware_sidecar.errors import NoEngine, Reason


class Traffic:
    def __init__(self) -> None:
        self._inside = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def inside(self) -> int:
        return self._inside

    def request(self) -> AbstractContextManager[None]:
        """Count a request in and out; raises `NoEngine` while draining."""
        return self

    def __enter__(self) -> None:
        self.refuse_if_draining()
        self._inside += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._idle.set()

    def refuse_if_draining(self) -> None:
        if self.draining:
            raise NoEngine("this replica is shutting down: send the request again", reason=Reason.DRAINING)

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for those inside; False if some were left after `timeout` seconds."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
