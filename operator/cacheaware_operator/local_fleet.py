"""A pool as local processes: per replica one engine and one sidecar, side by side on loopback.

It carries out plans and reports what is there. What is to run is decided in `plan.py`, how a process is kept alive in
`processes.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from cacheaware_api import wire
from cacheaware_api.v1alpha1 import EngineType
from cacheaware_operator import commands, ports
from cacheaware_operator.commands import ReplicaPlace
from cacheaware_operator.errors import StartFailed, Unreachable, ViewRefused
from cacheaware_operator.fleet import PartName, PartState, ReplicaSnapshot, Snapshot
from cacheaware_operator.local_folder import LocalFolder
from cacheaware_operator.plan import EnginePlan, PoolPlan
from cacheaware_operator.processes import Clock, PartCommand, Probe, SupervisedPart
from cacheaware_operator.readings import Page
from cacheaware_operator.sidecar_client import SidecarClient, engine_health


@dataclass(frozen=True, slots=True)
class Programs:
    """What is started for each part; flags are added. `-P`: no module of the folder we happen to be in is taken."""

    engine: tuple[str, ...] = (sys.executable, "-P", "-m", "cacheaware_engine")
    sidecar: tuple[str, ...] = (sys.executable, "-P", "-m", "cacheaware_sidecar")
    vllm: tuple[str, ...] = (sys.executable, "-P", "-m", "cacheaware_engine.vllm_plugin.launch")
    vllm_python: str = sys.executable  # the one that has vLLM


@dataclass(frozen=True, slots=True)
class Machine:
    """What the processes run on and with."""

    folder: LocalFolder
    logs: Path
    first_port: int  # of the first replica, one more for each further one; 0: any free port
    environment: Mapping[str, str]
    cores: int
    model_folder: Path | None = None  # where the plan's model was fetched to; None: the engine looks itself
    programs: Programs = dataclasses.field(default_factory=Programs)


@dataclass(slots=True)
class _Replica:
    place: ReplicaPlace
    engine: SupervisedPart
    sidecar: SupervisedPart
    client: SidecarClient
    applied: wire.Revision | None = None  # acknowledged by its engine, as last observed
    problem: str | None = None

    @property
    def parts(self) -> tuple[SupervisedPart, SupervisedPart]:
        return self.engine, self.sidecar

    async def stop(self) -> None:
        """The sidecar first: it ends what it streams while its engine still answers."""
        await self.sidecar.stop()
        await self.engine.stop()


class LocalFleet:
    """Runs one pool on this machine. `on_change` is called whenever a part changes its state."""

    def __init__(
        self,
        machine: Machine,
        session: aiohttp.ClientSession,
        *,
        on_change: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self._machine = machine
        self._session = session
        self._on_change = on_change
        self._clock = clock
        self._token = machine.folder.control_token
        self._view: wire.View | None = None
        self._api_keys: wire.ApiKeys | None = None
        self._replicas: list[_Replica] = []
        self._leaving: set[asyncio.Task[None]] = set()

    # -- Fleet -----------------------------------------------------------------------------------------------------

    async def observe(self) -> Snapshot:
        snapshots = await asyncio.gather(*(self._observe_replica(replica) for replica in self._replicas))
        return Snapshot(view=self._view, replicas=tuple(snapshots))

    async def apply(self, plan: PoolPlan) -> None:
        if plan.api_keys != self._api_keys:
            self._machine.folder.write_api_keys(plan.api_keys)  # before the view: new tiers may have new keys
            self._api_keys = plan.api_keys
        if plan.view != self._view:
            for number in range(len(self._replicas)):
                self._machine.folder.write_view(number, plan.view)
            self._view = plan.view
        self._scale(plan)
        await asyncio.gather(*(self._deliver(replica, plan.view) for replica in self._replicas))

    async def pages(self) -> dict[str, Page]:
        pages: dict[str, Page] = {}

        async def read(replica: _Replica) -> None:
            with contextlib.suppress(Unreachable):  # a round without it leaves everything where it is
                text = await replica.client.metrics()
                pages[replica.place.name] = Page(text, asyncio.get_running_loop().time())

        running = (each for each in self._replicas if each.sidecar.snapshot.state is PartState.READY)
        await asyncio.gather(*(read(replica) for replica in running))
        return pages

    # -- for whoever runs it -----------------------------------------------------------------------------------------

    @property
    def places(self) -> list[ReplicaPlace]:
        return [replica.place for replica in self._replicas]

    def require_ports(self, replicas: int) -> None:
        """Raise `PortInUse` if a replica that does not run yet could not have its port."""
        first = self._machine.first_port
        if first:
            ports.require_free(range(first + len(self._replicas), first + replicas), first)

    def start_failure(self) -> StartFailed | None:
        """The first part that could not be started, with the end of its output."""
        for replica in self._replicas:
            for part in replica.parts:
                if part.snapshot.state is PartState.FAILED:
                    name = f"the {part.snapshot.name} of {replica.place.name}"
                    return StartFailed(name, part.snapshot.message, part.snapshot.log, part.last_lines())
        return None

    async def stop(self) -> None:
        """Drain and end everything; returns when no process is left."""
        await asyncio.gather(*(replica.stop() for replica in self._replicas), *self._leaving)
        self._replicas.clear()

    def kill(self) -> None:
        """End everything at once; `stop` still has to be awaited."""
        for replica in self._replicas:
            for part in replica.parts:
                part.kill()

    # -- replicas ------------------------------------------------------------------------------------------------------

    def _scale(self, plan: PoolPlan) -> None:
        for number in range(len(self._replicas), len(plan.replicas)):
            self._replicas.append(self._start(number, plan))
        while len(self._replicas) > len(plan.replicas):
            leaving = asyncio.create_task(self._retire(self._replicas.pop(), len(self._replicas)))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def _retire(self, replica: _Replica, number: int) -> None:
        await replica.stop()
        if number >= len(self._replicas):  # nobody has taken its place meanwhile
            self._machine.folder.remove_replica(number)

    def _start(self, number: int, plan: PoolPlan) -> _Replica:
        place = self._place(number, plan.replicas[number])
        self._machine.folder.write_view(number, plan.view)
        engine = self._part(
            PartName.ENGINE,
            place,
            self._engine_command(plan.engine, place, len(plan.replicas)),
            commands.engine_environment(plan.engine, self._machine.environment),
            lambda: engine_health(self._session, place.engine_url),
        )
        client = SidecarClient(self._session, place.control_url, self._token)
        sidecar = self._part(
            PartName.SIDECAR,
            place,
            self._machine.programs.sidecar + commands.sidecar_arguments(place),
            self._machine.environment,
            client.alive,
        )
        for part in (engine, sidecar):
            part.start()
        return _Replica(place, engine, sidecar, client)

    def _place(self, number: int, name: str) -> ReplicaPlace:
        folder, first = self._machine.folder, self._machine.first_port
        control_port, engine_port, any_port = ports.free_ports(3)
        return ReplicaPlace(
            name=name,
            port=first + number if first else any_port,
            control_port=control_port,
            engine_port=engine_port,
            kv_socket=folder.kv_socket(number),
            view_file=folder.view_file(number),
            secrets_dir=folder.secrets,
        )

    def _engine_command(self, engine: EnginePlan, place: ReplicaPlace, replicas: int) -> tuple[str, ...]:
        programs = self._machine.programs
        if self._machine.model_folder is not None:
            engine = dataclasses.replace(engine, model=str(self._machine.model_folder))
        if engine.type is EngineType.VLLM:
            return programs.vllm + commands.vllm_arguments(engine, place, programs.vllm_python)
        threads = commands.threads_per_engine(self._machine.cores, replicas)
        return programs.engine + commands.engine_arguments(engine, place, threads)

    def _part(
        self,
        name: PartName,
        place: ReplicaPlace,
        arguments: tuple[str, ...],
        environment: Mapping[str, str],
        probe: Callable[[], Awaitable[Probe]],
    ) -> SupervisedPart:
        log = self._machine.logs / f"{place.name}-{name}.log"
        command = PartCommand(name=name, arguments=arguments, environment=environment, log_file=log)
        return SupervisedPart(command, probe, on_change=self._on_change, clock=self._clock)

    async def _observe_replica(self, replica: _Replica) -> ReplicaSnapshot:
        ready, status = False, None
        if replica.sidecar.snapshot.state is PartState.READY:
            ready = await replica.client.ready()
            try:
                status = await replica.client.status()
            except Unreachable:
                ready = False  # it died between the two questions, or is too busy to be told anything
        replica.applied = status.applied if status is not None else None
        return ReplicaSnapshot(
            name=replica.place.name,
            parts=tuple(part.snapshot for part in replica.parts),
            ready=ready,
            status=status,
            problem=replica.problem,
        )

    async def _deliver(self, replica: _Replica, view: wire.View) -> None:
        """The view file is enough for a sidecar to find it; telling it makes it quick."""
        if replica.applied == view.revision or replica.sidecar.snapshot.state is not PartState.READY:
            return
        try:
            await replica.client.put_view(view)
            replica.problem = None
        except Unreachable:
            pass  # the next pass tries again, and the file is there
        except ViewRefused as error:
            replica.problem = str(error)
