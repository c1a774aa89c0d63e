"""Asks the sidecars of pods: many at once, each with little time, and one that does not answer less and less often.

So a dead or slow one costs its pool two seconds once in a while, and other pools nothing. One that missed a single
question is taken to be as it was before: a busy moment is no news for those who watch the pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

import aiohttp

from cacheaware_api import wire
from cacheaware_operator.cluster.names import CONTROL_PORT
from cacheaware_operator.errors import SidecarError, Unreachable
from cacheaware_operator.kinds import Object
from cacheaware_operator.pod_parts import address
from cacheaware_operator.readings import Page
from cacheaware_operator.sidecar_client import SidecarClient

AddressOf = Callable[[Object], str | None]
T = TypeVar("T")

_TIMEOUT = aiohttp.ClientTimeout(total=2)
_CONCURRENT = 64
_FIRST_REST, _LONGEST_REST = 1.0, 15.0  # seconds in which one that did not answer is not asked


def control_url(pod: Object) -> str | None:
    """Where a pod's control side is: at its own address, since it must be reached before the pod is ready."""
    ip = address(pod)
    if ip is None:
        return None
    return f"http://[{ip}]:{CONTROL_PORT}" if ":" in ip else f"http://{ip}:{CONTROL_PORT}"


@dataclass(frozen=True, slots=True)
class _Silence:
    until: float
    failures: int
    why: str


class Sidecars:
    """The session is the caller's."""

    def __init__(
        self, session: aiohttp.ClientSession, clock: Callable[[], float], address_of: AddressOf = control_url
    ) -> None:
        self._session = session
        self._clock = clock
        self._address_of = address_of
        self._slots = asyncio.Semaphore(_CONCURRENT)
        self._silent: dict[str, _Silence] = {}  # by the pod's uid
        self._last: dict[str, wire.PoolStatus] = {}  # likewise: what it said last

    async def statuses(self, pods: Collection[Object], token: str) -> dict[str, wire.PoolStatus]:
        """By pod name; one that does not answer, a second time in a row, is left out."""
        answers = await self._ask_all(pods, token, lambda client: client.status())
        for pod in pods:
            uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
            if name in answers:
                self._last[uid] = answers[name]
            elif uid in self._last and uid in self._silent and self._silent[uid].failures == 1:
                answers[name] = self._last[uid]
            else:
                self._last.pop(uid, None)
        return answers

    async def pages(self, pods: Collection[Object], token: str) -> dict[str, Page]:
        """The metrics pages, by pod name."""

        async def page(client: SidecarClient) -> Page:
            return Page(await client.metrics(), self._clock())

        return await self._ask_all(pods, token, page)

    async def put_view(self, pods: Collection[Object], token: str, view: wire.View) -> dict[str, SidecarError | None]:
        """By pod name: None where the view was taken, else why not."""

        async def put(client: SidecarClient) -> SidecarError | None:
            try:
                await client.put_view(view)
            except Unreachable:
                raise
            except SidecarError as error:
                return error
            return None

        taken = await self._ask_all(pods, token, put)
        gone = {pod["metadata"]["name"]: Unreachable("does not answer") for pod in pods}
        return {**gone, **taken}

    def keep_only(self, uids: Collection[str]) -> None:
        """Forget pods that are gone."""
        self._silent = {uid: silence for uid, silence in self._silent.items() if uid in uids}
        self._last = {uid: status for uid, status in self._last.items() if uid in uids}

    async def _ask_all(
        self, pods: Collection[Object], token: str, ask: Callable[[SidecarClient], Awaitable[T]]
    ) -> dict[str, T]:
        answers: dict[str, T] = {}

        async def one(pod: Object, url: str) -> None:
            uid = pod["metadata"]["uid"]
            async with self._slots:
                try:
                    answers[pod["metadata"]["name"]] = await ask(SidecarClient(self._session, url, token, _TIMEOUT))
                except Unreachable as error:
                    failures = self._silent[uid].failures + 1 if uid in self._silent else 1
                    rest = min(_LONGEST_REST, _FIRST_REST * 2.0 ** min(failures - 1, 10))
                    self._silent[uid] = _Silence(self._clock() + rest, failures, str(error))
                else:
                    self._silent.pop(uid, None)

        await asyncio.gather(*(one(pod, url) for pod, url in self._worth_asking(pods).values()))
        return answers

    def _worth_asking(self, pods: Collection[Object]) -> Mapping[str, tuple[Object, str]]:
        found = {}
        for pod in pods:
            uid, url = pod["metadata"]["uid"], self._address_of(pod)
            silence = self._silent.get(uid)
            if url is not None and (silence is None or silence.until <= self._clock()):
                found[uid] = (pod, url)
        return found
