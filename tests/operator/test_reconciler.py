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
from cacheaware_operator.readings import Page
from cacheaware_operator.reconciler import Pass, Reconciler
from cacheaware_operator.testing_rebalance import loop as loop_over
from cacheaware_operator.testing_rebalance import reuse_page

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
        self.page: Callable[[], str] = str  # the metrics of every replica

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

    async def pages(self) -> dict[str, Page]:
        now = asyncio.get_running_loop().time()
        return {name: Page(self.page(), now) for name in (self._plan.replicas if self._plan is not None else ())}


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
        async with asyncio.timeout(3600):  # of virtual time
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


# -- rebalancing -------------------------------------------------------------------------------------------------------


def gold_wants_more(fleet: MemoryFleet) -> None:
    """Gold walks over more blocks than its half holds, again and again; bronze asks for nothing."""
    looks = 0

    def page() -> str:
        nonlocal looks
        looks += 1
        return reuse_page("gold", loop_over(5000.0 * looks, 65))

    fleet.page = page


@pytest.mark.parametrize(
    ("mode", "gold", "numbers"),
    [
        pytest.param("Auto", 65, {1, 2}, id="Auto: quota moves, and replicas are told"),
        pytest.param("DryRun", 50, {1}, id="DryRun: it is only told what would move"),
    ],
)
async def test_quota_moves_to_where_it_earns_hits(
    make_wanted: MakeWanted,
    make_replica: Callable[..., ReplicaSnapshot],
    spec: dict[str, object],
    mode: str,
    gold: int,
    numbers: set[int],
) -> None:
    fleet = MemoryFleet(make_replica)
    gold_wants_more(fleet)
    wanted = make_wanted({**spec, "rebalancing": {"mode": mode, "interval": "10s"}})
    async with running(fleet, wanted) as loop:
        done = await loop.until(lambda done: done.status.last_rebalance is not None and done.settled)
        assert done.status.last_rebalance is not None
        (told,) = done.status.last_rebalance.moves
        assert (told.from_, told.to) == ("bronze", "gold")
        assert {tier.name: tier.effective_percent for tier in done.status.tiers}["gold"] >= gold
        assert {each.view.revision.number for each in loop.passes} == numbers
        assert [move.to for each in loop.passes for move in each.moves] == ["gold"] * (len(numbers) - 1)


async def test_rebalancing_that_is_switched_off_gives_back_what_it_moved(
    make_wanted: MakeWanted, make_replica: Callable[..., ReplicaSnapshot], spec: dict[str, object]
) -> None:
    fleet = MemoryFleet(make_replica)
    gold_wants_more(fleet)
    wanted = make_wanted({**spec, "rebalancing": {"mode": "Auto", "interval": "10s"}})
    async with running(fleet, wanted) as loop:
        await loop.until(lambda done: bool(done.moves))
        loop.reconciler.want(make_wanted({**spec, "rebalancing": {"mode": "Off"}}, generation=2))
        done = await loop.until(lambda done: done.wanted.generation == 2 and done.settled)
        assert {tier.name: tier.effective_percent for tier in done.view.tiers} == {"gold": 50, "bronze": 30}
