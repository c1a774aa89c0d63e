"""The whole operator, put together: wait for the lease, read the cluster, watch it, act; end when any of that ends.

Nothing is watched and nothing written but the Lease before this process leads. One that does not lead any more, or
whose watches failed for good, ends with code 1: a new one begins with what is in the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import aiohttp
from aiohttp import web

from cacheaware_operator import handlers
from cacheaware_operator.app import create_app
from cacheaware_operator.cluster.images import Images
from cacheaware_operator.cluster_store import ClusterStore
from cacheaware_operator.errors import ApiUnreachable, OperatorError
from cacheaware_operator.kubernetes_api import KubernetesApi
from cacheaware_operator.kubernetes_credentials import Credentials
from cacheaware_operator.kubernetes_fleet import Cluster
from cacheaware_operator.leader import Leadership
from cacheaware_operator.metrics import Metrics
from cacheaware_operator.pool_loop import PoolLoop
from cacheaware_operator.pool_pass import PoolPass
from cacheaware_operator.settings import Settings
from cacheaware_operator.sidecars import AddressOf, Sidecars, control_url

log = logging.getLogger(__name__)

BEGIN_AGAIN_SECONDS = 5.0  # after the API server did not answer at the start


def _now() -> datetime:
    return datetime.now(UTC)


class OperatorProcess:
    """`run` once. `address_of` tells where a pod's control side is; `on_serving` gets the port of the metrics."""

    def __init__(
        self,
        settings: Settings,
        credentials: Credentials,
        *,
        address_of: AddressOf = control_url,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = _now,
    ) -> None:
        self._settings = settings
        self._credentials = credentials
        self._address_of = address_of
        self._clock = clock
        self._now = now
        self._fault: str | None = None
        self.metrics = Metrics()
        self.port: int | None = None  # of the metrics, once it serves
        self._api: KubernetesApi | None = None

    @property
    def writes(self) -> int:
        """To the API server since it leads; the Lease has a client of its own."""
        return 0 if self._api is None else self._api.writes

    async def run(self, stop: asyncio.Event) -> int:
        """Until `stop`; the process's exit code."""
        async with aiohttp.ClientSession() as session, self._serving():
            self._api = KubernetesApi(session, self._credentials)
            leadership = Leadership(
                # its own, so that a queue of requests never delays the renewal
                KubernetesApi(session, self._credentials),
                namespace=self._settings.lease_namespace,
                name=self._settings.lease_name,
                identity=self._settings.identity,
                clock=self._clock,
                now=self._now,
            )
            waiting = asyncio.create_task(leadership.acquire())
            if not await _first(waiting, stop):
                return 0
            try:
                return await self._lead(self._api, session, leadership, stop)
            finally:
                await leadership.release()

    async def _lead(
        self, api: KubernetesApi, session: aiohttp.ClientSession, leadership: Leadership, stop: asyncio.Event
    ) -> int:
        settings = self._settings
        cluster = Cluster(
            api=api,
            store=ClusterStore(),
            sidecars=Sidecars(session, self._clock, self._address_of),
            images=Images(engine=settings.engine_image, sidecar=settings.sidecar_image),
            operator_namespace=settings.operator_namespace,
            clock=self._clock,
        )
        look = PoolPass(cluster, self.metrics, self._now)
        loop = PoolLoop(cluster, look, self.metrics, settings.namespaces, self._clock)

        async def act() -> None:
            await _prepared(loop)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(handlers.watch(loop, self._credentials, settings.namespaces))
                tasks.create_task(loop.run())

        stopping = asyncio.create_task(stop.wait())
        work: set[asyncio.Task[Any]] = {asyncio.create_task(leadership.keep()), asyncio.create_task(act())}
        try:
            await asyncio.wait({stopping, *work}, return_when=asyncio.FIRST_COMPLETED)
            for task in work:
                if task.done():
                    self._fault = _words(task)
                    log.error("the operator ends: %s", self._fault, exc_info=task.exception())
            return 0 if self._fault is None else 1
        finally:
            tasks: list[asyncio.Task[Any]] = [stopping, *work]
            for task in tasks:
                task.cancel()
            await asyncio.gather(stopping, *work, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        runner = web.AppRunner(create_app(self.metrics, lambda: self._fault), access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._settings.metrics_host or None, self._settings.metrics_port)
            await site.start()
            self.port = runner.addresses[0][1]
            yield
        finally:
            await runner.cleanup()


async def _prepared(loop: PoolLoop) -> None:
    while True:
        try:
            await loop.prepare()
        except ApiUnreachable as error:
            log.warning("%s; again in %.0f s", error, BEGIN_AGAIN_SECONDS)
            await asyncio.sleep(BEGIN_AGAIN_SECONDS)
        else:
            return


async def _first(waiting: asyncio.Task[None], stop: asyncio.Event) -> bool:
    """Whether `waiting` ended before `stop` was set."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            waiting.result()
            return True
        return False
    finally:
        for task in (waiting, stopping):
            task.cancel()
        await asyncio.gather(waiting, stopping, return_exceptions=True)


def _words(task: asyncio.Task[Any]) -> str:
    error = None if task.cancelled() else task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is None:
        return "its watches ended"
    return str(error) if isinstance(error, OperatorError) else f"{type(error).__name__}: {error}"
