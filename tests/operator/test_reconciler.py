"""The loop: observe, plan, apply, tell. On virtual time, over a fleet that exists only in memory."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest

from cacheaware_api import wire
from cacheaware_operator.fleet import ReplicaSnapshot, Snapshot
from cacheaware_operator.plan import PoolPlan, Wanted
from cacheaware_operator.reconciler import Pass, Reconciler

MakeWanted = Callable[..., Wanted]

pytestmark = pytest.mark.looptime


class MemoryFleet:
    """Replicas that are ready at once and acknowledge a view `delay` passes after they got it."""

    def __init__(self, make_replica: Callable[..., ReplicaSnapshot], delay: int = 1) -> None:
        self._make_replica = make_replica
        self._delay = delay
        self._plan: PoolPlan | None = None
        self._since = 0
        self.applied: list[PoolPlan] = []
        self.failures: list[Exception] = []

    async def observe(self) -> Snapshot:
        if self._plan is None:
            return Snapshot()
        self._since += 1
        number = self._plan.view.revision.number if self._since >= self._delay else 0
        replicas = tuple(self._make_replica(name, number=number) for name in self._plan.replicas)
        return Snapshot(view=self._plan.view, replicas=replicas)

    async def apply(self, plan: PoolPlan) -> None:
        if self.failures:
            raise self.failures.pop()
        if plan != self._plan:
            self._plan, self._since = plan, 0
        self.applied.append(plan)


class Loop:
    """A reconciler that runs, and everything it told."""

    def __init__(self, fleet: MemoryFleet, wanted: Wanted) -> None:
        self.passes: list[Pass] = []
        self.reconciler = Reconciler(
            fleet, wanted, publish=self._publish, now=lambda: datetime(2026, 1, 1, tzinfo=UTC), wake=asyncio.Event()
        )
        self._told = asyncio.Event()

    def _publish(self, done: Pass) -> None:
        self.passes.append(done)
        self._told.set()

    async def until(self, condition: Callable[[Pass], bool]) -> Pass:
        while True:
            if self.passes and condition(self.passes[-1]):
                return self.passes[-1]
            self._told.clear()
            await self._told.wait()


@asynccontextmanager
async def running(fleet: MemoryFleet, wanted: Wanted) -> AsyncIterator[Loop]:
    loop = Loop(fleet, wanted)
    task = asyncio.create_task(loop.reconciler.run())
    try:
        yield loop
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_it_settles_when_every_replica_has_acknowledged_the_view(
    make_wanted: MakeWanted, make_replica: Callable[..., ReplicaSnapshot]
) -> None:
    async with running(MemoryFleet(make_replica, delay=5), make_wanted()) as loop:
        done = await loop.until(lambda done: done.settled)
    assert done.view.revision == wire.Revision("uid-1", 1)
    assert not any(each.settled for each in loop.passes[:-1])


async def test_an_edit_is_acted_on_at_once_and_gets_the_next_number(
    make_wanted: MakeWanted, make_replica: Callable[..., ReplicaSnapshot]
) -> None:
    wanted = make_wanted()
    async with running(MemoryFleet(make_replica), wanted) as loop:
        await loop.until(lambda done: done.settled)
        before = asyncio.get_running_loop().time()
        spec = wanted.spec.model_copy(update={"public_percent": 10})
        loop.reconciler.want(dataclasses.replace(wanted, generation=2, spec=spec))
        done = await loop.until(lambda done: done.settled and done.wanted.generation == 2)
        assert done.view.revision.number == 2
        assert asyncio.get_running_loop().time() - before <= 0.5


async def test_in_calm_it_looks_once_a_second_and_never_changes_the_plan(
    make_wanted: MakeWanted, make_replica: Callable[..., ReplicaSnapshot]
) -> None:
    fleet = MemoryFleet(make_replica)
    async with running(fleet, make_wanted()) as loop:
        await loop.until(lambda done: done.settled)
        passes = len(fleet.applied)
        await asyncio.sleep(10)
        assert 9 <= len(fleet.applied) - passes <= 11
    assert all(plan == fleet.applied[0] for plan in fleet.applied)


async def test_a_full_disk_is_tried_again(
    make_wanted: MakeWanted, make_replica: Callable[..., ReplicaSnapshot], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = MemoryFleet(make_replica)
    fleet.failures.append(OSError("no space left"))
    async with running(fleet, make_wanted()) as loop:
        await loop.until(lambda done: done.settled)
    assert "no space left" in caplog.text


async def test_a_fault_of_our_own_ends_the_loop_instead_of_hiding(
    make_wanted: MakeWanted, make_replica: Callable[..., ReplicaSnapshot]
) -> None:
    fleet = MemoryFleet(make_replica)
    fleet.failures.append(KeyError("a fault"))
    loop = Loop(fleet, make_wanted())
    with pytest.raises(KeyError, match="a fault"):
        await loop.reconciler.run()


async def test_quotas_refused_for_an_earlier_view_say_nothing_of_the_new_one(
    make_wanted: MakeWanted, make_replica: Callable[..., ReplicaSnapshot]
) -> None:
    refused = wire.Condition("QuotaEnforced", "False", "QuotaRefused", "they do not fit")

    def refusing(name: str, number: int) -> ReplicaSnapshot:
        return make_replica(name, number=number, conditions=(refused,))

    wanted = make_wanted()
    async with running(MemoryFleet(refusing, delay=1_000_000), wanted) as loop:
        told = await loop.until(lambda done: done.refused is not None)
        assert told.refused == "chat-0: they do not fit"
        spec = wanted.spec.model_copy(update={"public_percent": 10})
        loop.reconciler.want(dataclasses.replace(wanted, generation=2, spec=spec))
        first = await loop.until(lambda done: done.wanted.generation == 2)
        assert first.refused is None  # asked before it was given the new view
        await loop.until(lambda done: done.refused is not None)
