"""A pool that runs on this machine: composition of the local fleet, its reconciler and the state file.

    async with LocalPool.start(pool_file, options) as pool:
        await pool.ready()
        ... pool.replicas[0].url ...
        changes = pool.edit(other_pool_file)
        await pool.acknowledged()

What it shows and when it ends is its caller's business (`up.py`, the demo).
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import aiohttp

from cacheaware import state_file
from cacheaware.state_file import PartRecord, PoolIdentity, ReplicaAddress, State
from cacheaware_api.objects import PoolFile
from cacheaware_api.status import CacheAwarePoolStatus
from cacheaware_operator import changes, ports
from cacheaware_operator.changes import Changes
from cacheaware_operator.commands import ReplicaPlace
from cacheaware_operator.errors import EditRefused, NotOnOneMachine, QuotasRefused
from cacheaware_operator.local_fleet import LocalFleet, Machine, Programs
from cacheaware_operator.local_folder import LocalFolder
from cacheaware_operator.one_machine import not_on_one_machine
from cacheaware_operator.plan import Wanted
from cacheaware_operator.processes import Clock
from cacheaware_operator.reconciler import Pass, Reconciler
from cacheaware_operator.status import written_status

DEFAULT_PORT = 8000
FIGURES_SECONDS = 30.0  # between writes of figures to the state file; conditions are written at once

OnPass = Callable[[Pass], None]


@dataclass(frozen=True, slots=True)
class Options:
    """How a pool is run here."""

    port: int = DEFAULT_PORT  # of the first replica, one more for each further one; 0: any free port
    logs: Path | None = None  # None: beside the state file
    file: Path | None = None  # the pool file, for those who read the state
    state_folder: Path = field(default_factory=state_file.state_folder)
    programs: Programs = field(default_factory=Programs)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    clock: Clock | None = None  # for back-off


class LocalPool:
    """One running pool. Made by `start`."""

    def __init__(
        self, fleet: LocalFleet, wanted: Wanted, state: State, state_path: Path, on_pass: OnPass, wake: asyncio.Event
    ) -> None:
        self._fleet = fleet
        self._state = state
        self._state_path = state_path
        self._on_pass = on_pass
        self._reconciler = Reconciler(fleet, wanted, publish=self._publish, now=lambda: datetime.now(UTC), wake=wake)
        self._last: Pass | None = None
        self._news = asyncio.Event()  # set at the next pass, and then replaced
        self._running: asyncio.Task[None] | None = None
        self._written: CacheAwarePoolStatus | None = None
        self._figures_at: float | None = None

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        pool_file: PoolFile,
        options: Options,
        on_pass: OnPass = lambda done: None,
        fetch: Callable[[str], Awaitable[Path]] | None = None,
    ) -> AsyncIterator[LocalPool]:
        """Run the pool until the block ends; then its streams are drained and nothing is left.

        `fetch` gets the folder of the model for all engines; without it each engine fetches it itself. Raises
        `NotOnOneMachine`, `PortInUse` or `AlreadyRunning` before anything is fetched or started.
        """
        wanted = Wanted.from_file(pool_file, uid=str(uuid.uuid4()), generation=1)
        require_one_machine(wanted)
        if options.port:
            ports.require_free(range(options.port, options.port + wanted.spec.replicas), options.port)
        path = state_file.path_for(wanted.namespace, wanted.name, options.state_folder)
        state = state_file.claim(path, _first_state(wanted, options))
        folder = LocalFolder(Path(state.folder))
        try:
            async with aiohttp.ClientSession(trust_env=False) as session:
                wake = asyncio.Event()
                machine = Machine(
                    folder=folder,
                    logs=_fresh_logs(options, wanted),
                    first_port=options.port,
                    environment=options.environment,
                    cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
                    model_folder=await fetch(wanted.spec.model.source) if fetch is not None else None,
                    programs=options.programs,
                )
                fleet = LocalFleet(machine, session, on_change=wake.set, clock=options.clock)
                pool = cls(fleet, wanted, state, path, on_pass, wake)
                try:
                    pool._running = asyncio.create_task(pool._run(), name="reconcile")
                    yield pool
                finally:
                    await pool._stop()
        finally:
            folder.remove()
            state_file.release(path, state)

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> list[ReplicaPlace]:
        return self._fleet.places

    @property
    def wanted(self) -> Wanted:
        return self._reconciler.wanted

    @property
    def last(self) -> Pass | None:
        return self._last

    @property
    def control_token(self) -> str:
        return self._state.token

    # -- what can be asked of it -----------------------------------------------------------------------------------

    async def ready(self) -> Pass:
        """Wait until every replica serves and has acknowledged the view; raises `StartFailed` or `QuotasRefused` if one
        never will.
        """
        return await self._settled()

    def edit(self, pool_file: PoolFile) -> Changes:
        """Apply what can be applied while it runs, and say what changes.

        Raises `EditRefused`, `NotOnOneMachine` or `PortInUse`; then nothing of the edit is applied.
        """
        running = self._reconciler.wanted
        new = Wanted.from_file(pool_file, uid=running.uid, generation=running.generation + 1)
        found = changes.compare(running, new)
        if found.refused:
            raise EditRefused(found.refused)
        require_one_machine(new)
        self._fleet.require_ports(new.spec.replicas)
        if found.live:
            self._reconciler.want(changes.applied(running, new))
        return found

    async def acknowledged(self, timeout: float = 60.0) -> Pass:
        """Wait until every replica applies the newest edit; raises TimeoutError, or what `ready` raises: an edit may
        ask for further replicas, or for quotas that do not fit.
        """
        generation = self._reconciler.wanted.generation
        async with asyncio.timeout(timeout):
            return await self._settled(generation)

    def check(self) -> None:
        """Raise what ended the loop that keeps the pool as wanted, if anything did."""
        if self._running is not None and self._running.done():
            self._running.result()

    def kill(self) -> None:
        """End every process now instead of draining; the block that started the pool still cleans up."""
        self._fleet.kill()

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._reconciler.run()
        finally:  # whoever waits must learn that no pass will come any more
            self._tell()

    async def _settled(self, generation: int = 0) -> Pass:
        """Wait for a settled pass over this generation or a later one."""
        while True:
            news, last = self._news, self._last
            if last is not None and last.wanted.generation >= generation:
                if last.settled:
                    return last
                if last.refused is not None:
                    raise QuotasRefused(last.refused)
            if (failure := self._fleet.start_failure()) is not None:
                raise failure
            self.check()
            await news.wait()

    def _publish(self, done: Pass) -> None:
        self._last = done
        self._write_state(done)
        self._on_pass(done)
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _write_state(self, done: Pass) -> None:
        now = asyncio.get_running_loop().time()
        due = self._figures_at is None or now - self._figures_at >= FIGURES_SECONDS
        status = written_status(self._written, done.status, figures_due=due)
        if due:
            self._figures_at = now
        self._written = status
        state = dataclasses.replace(
            self._state,
            pool=_identity(done.wanted),
            replicas=tuple(
                ReplicaAddress(each.name, each.url, each.control_url, each.engine_url, str(each.kv_socket))
                for each in self._fleet.places
            ),
            parts=tuple(
                PartRecord(
                    replica=replica.name,
                    name=part.name,
                    state=part.state,
                    restarts=part.restarts,
                    failures=part.failures,
                    message=part.message,
                    pid=part.pid,
                    log=part.log,
                )
                for replica in done.snapshot.replicas
                for part in replica.parts
            ),
            revision=done.view.revision,
            status=status.model_dump(mode="json", exclude_none=True),
        )
        if state != self._state:
            state_file.write(self._state_path, state)
            self._state = state

    async def _stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._fleet.stop()


def require_one_machine(wanted: Wanted) -> None:
    if reasons := not_on_one_machine(wanted.spec):
        raise NotOnOneMachine(reasons)


def _first_state(wanted: Wanted, options: Options) -> Callable[[], State]:
    """What the state says before anything runs; made only once nobody else holds the name."""

    def make() -> State:
        folder = LocalFolder.create()
        return State(
            pid=os.getpid(),
            started=state_file.process_started(os.getpid()) or 0.0,
            folder=str(folder.path),
            file=str(options.file.resolve()) if options.file is not None else "",
            pool=_identity(wanted),
            replicas=(),
            token=folder.control_token,
        )

    return make


def _identity(wanted: Wanted) -> PoolIdentity:
    spec = wanted.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return PoolIdentity(wanted.namespace, wanted.name, wanted.uid, wanted.generation, spec)


def _fresh_logs(options: Options, wanted: Wanted) -> Path:
    """The folder for the parts' output. Our own default one starts empty; a given one is only added to."""
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
        return options.logs
    folder = options.state_folder / f"{wanted.namespace}-{wanted.name}-logs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    return folder
