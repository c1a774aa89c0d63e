"""A place in the engine: waited for in order, given back exactly once, however its holder leaves. In virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any

import looptime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheaware_api import quota
from cacheaware_sidecar.block_budget import BlockBudget, Cache, Demand
from cacheaware_sidecar.budget import Reservation, SlotBudget, slots_of
from cacheaware_sidecar.dispatch import Dispatcher
from cacheaware_sidecar.errors import Busy, Reason, TooLate
from cacheaware_sidecar.gate import Gate
from cacheaware_sidecar.scheduling import Dispatch, FlushReason, Scheduler, Slots, Terms, Waiting
from cacheaware_sidecar.testing import StubEngine
from cacheaware_sidecar.testing_sidecar import CancelledAt, view

pytestmark = pytest.mark.looptime


class CountingBudget(SlotBudget):
    """Counts what is given back, and asserts that nothing is twice."""

    def __init__(self, slots: Slots, blocks: BlockBudget | None = None) -> None:
        super().__init__(slots, blocks)
        self.reserved = 0
        self.released = 0

    def reserve(self, request_id: str, tier: str, sequences: int, demand: Demand | None = None) -> Reservation:
        self.reserved += 1
        return super().reserve(request_id, tier, sequences, demand)

    def _give_back(self, reservation: Reservation) -> None:
        self.released += 1
        super()._give_back(reservation)


def gate_of(
    slots: int = 1,
    max_queue: int = 100,
    nominal: dict[str, int] | None = None,
    max_bytes: int = 10**9,
    blocks: BlockBudget | None = None,
) -> tuple[Gate, CountingBudget]:
    budget = CountingBudget(Slots(slots, nominal or {}), blocks)
    scheduler = Scheduler({"gold": Terms(4, 100), "bronze": Terms(1, 0, window=0.5)}, now)
    dispatcher = Dispatcher(max_queue, scheduler, budget=budget, max_bytes=max_bytes)
    return Gate(dispatcher, now), budget


def now() -> float:
    return asyncio.get_running_loop().time()


def estimated(capacity: int = 100) -> BlockBudget:
    """Blocks of 16 tokens: 50 are gold's, 30 bronze's."""
    blocks = BlockBudget()
    blocks.set_cache(Cache(capacity, 16, quota.quotas_for(view(), capacity)))
    return blocks


def waiting(name: str, tier: str = "gold", due: float | None = None, sequences: int = 1, prompt: str = "") -> Waiting:
    """`prompt`: a checkpoint of 16 chunks a letter."""
    chunks = tuple(f"{prompt[: letter + 1]}/{n}".encode() for letter in range(len(prompt)) for n in range(16))
    deadline = None if due is None else now() + due
    return Waiting(name, tier, "acme", now(), 1.0, deadline=deadline, sequences=sequences, chunks=chunks)


async def hold(
    gate: Gate, request: Waiting, seconds: float, log: list[str], demand: Demand | None = None, **options: Any
) -> Dispatch:
    async with gate.place(request, demand, patience=options.pop("patience", 1000.0), **options) as dispatch:
        log.append(request.id)
        await asyncio.sleep(seconds)
    return dispatch


def assert_empty(gate: Gate, budget: CountingBudget) -> None:
    assert (gate.queued, gate.in_flight, budget.sequences) == (0, 0, 0)
    assert budget.reserved == budget.released
    budget.check_integrity()
    assert budget.blocks is None or budget.blocks.held() == {}


class TestOrder:
    async def test_the_engine_is_never_given_more_than_it_can_run(self) -> None:
        gate, budget = gate_of(slots=2)
        log: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            for number in range(6):
                tasks.create_task(hold(gate, waiting(str(number)), 1.0, log))
            await asyncio.sleep(0.5)
            assert (log, gate.in_flight, gate.queued) == (["0", "1"], 2, 4)
            await asyncio.sleep(1.0)
            assert (log, gate.in_flight, gate.queued) == (["0", "1", "2", "3"], 2, 2)
        assert_empty(gate, budget)

    async def test_an_idle_engine_holds_nothing(self) -> None:
        gate, _ = gate_of()
        dispatch = await hold(gate, waiting("a"), 0.0, [])
        assert (dispatch.queued, dispatch.held) == (0.0, 0.0)

    async def test_sequences_count_and_one_large_request_still_goes(self) -> None:
        gate, budget = gate_of(slots=4)
        log: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hold(gate, waiting("eight", sequences=8), 1.0, log))
            tasks.create_task(hold(gate, waiting("one"), 1.0, log))
            await asyncio.sleep(0.5)
            assert (log, budget.sequences) == (["eight"], 8)
        assert log == ["eight", "one"]

    async def test_a_tier_below_its_nominal_slots_does_not_wait_for_another_tiers_request(self) -> None:
        gate, budget = gate_of(slots=4, nominal={"gold": 2})
        log: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(hold(gate, waiting(f"bronze-{number}", "bronze"), 100.0, log))
            await asyncio.sleep(0.1)
            for number in range(3):
                tasks.create_task(hold(gate, waiting(f"gold-{number}"), 200.0, log))
            await asyncio.sleep(0.1)
            assert log[4:] == ["gold-0", "gold-1"]
            assert budget.sequences == 6
        assert_empty(gate, budget)

    async def test_more_slots_let_more_in_at_once(self) -> None:
        gate, budget = gate_of(slots=1)
        log: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(hold(gate, waiting(str(number)), 10.0, log))
            await asyncio.sleep(1.0)
            budget.slots = Slots(3)
            gate.pump()
            await asyncio.sleep(1.0)
            assert len(log) == 3


class TestBlocksByEstimate:
    async def test_a_borrower_waits_for_blocks_and_the_entitled_go_at_once(self) -> None:
        gate, budget = gate_of(slots=100, blocks=estimated())
        log: list[str] = []
        large = Demand(prompt=39 * 16, output=16)  # 40 blocks
        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(hold(gate, waiting(f"bronze-{number}", "bronze"), 10.0, log, large))
            await asyncio.sleep(1.0)
            assert log == ["bronze-0", "bronze-1"]  # of 100 blocks; gold lends all of its 50
            tasks.create_task(hold(gate, waiting("gold", "gold"), 1.0, log, large))
            await asyncio.sleep(1.0)
            assert log == ["bronze-0", "bronze-1", "gold"]
        assert log[3:] == ["bronze-2"]
        assert_empty(gate, budget)

    async def test_a_large_borrower_is_not_overtaken_by_small_ones_for_ever(self) -> None:
        gate, budget = gate_of(slots=100, blocks=estimated())
        log: list[str] = []
        small, large = Demand(prompt=144, output=16), Demand(prompt=44 * 16, output=16)
        async with asyncio.TaskGroup() as tasks:
            for number in range(30):
                tasks.create_task(hold(gate, waiting(f"small-{number}", "gold"), 1.0 + number / 10, log, small))
            await asyncio.sleep(0.5)
            tasks.create_task(hold(gate, waiting("large", "bronze"), 1.0, log, large))
        assert log.index("large") < 29
        assert_empty(gate, budget)


class TestCompany:
    async def test_a_follower_goes_when_the_first_token_of_its_leader_comes(self) -> None:
        gate, budget = gate_of(slots=4)
        log: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hold(gate, waiting("leader", "bronze", prompt="aab"), 10.0, log))
            follower = tasks.create_task(hold(gate, waiting("follower", "bronze", prompt="aac"), 1.0, log))
            await asyncio.sleep(0.3)
            assert log == ["leader"]
            gate.first_byte("leader")
            await asyncio.sleep(0)
            assert log == ["leader", "follower"]
        assert follower.result().held == pytest.approx(0.3)
        assert follower.result().flush_reason is FlushReason.PREFIX_READY
        assert_empty(gate, budget)

    async def test_a_hold_ends_with_the_window_though_nothing_happens(self) -> None:
        gate, budget = gate_of(slots=4)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hold(gate, waiting("leader", "bronze", prompt="aab"), 10.0, []))
            follower = tasks.create_task(hold(gate, waiting("follower", "bronze", prompt="aac"), 0.0, []))
            await asyncio.sleep(0)
            async with asyncio.timeout(1.0):
                dispatch = await follower
        assert dispatch.held == pytest.approx(0.5)
        assert dispatch.flush_reason is FlushReason.WINDOW
        assert_empty(gate, budget)

    async def test_who_leaves_while_held_leaves_nothing_behind(self) -> None:
        gate, budget = gate_of(slots=4)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hold(gate, waiting("leader", "bronze", prompt="aab"), 1.0, []))
            follower = tasks.create_task(hold(gate, waiting("follower", "bronze", prompt="aac"), 1.0, []))
            await asyncio.sleep(0.1)
            follower.cancel()
            await asyncio.sleep(0)
            assert gate.queued == 0
        assert_empty(gate, budget)


class TestRefusals:
    async def test_a_full_queue_is_429_with_a_time_to_come_back(self) -> None:
        gate, budget = gate_of(slots=1, max_queue=2)
        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(hold(gate, waiting(str(number)), 1.0, []))
            await asyncio.sleep(0.1)
            with pytest.raises(Busy) as caught:
                await hold(gate, waiting("one too many"), 1.0, [])
        assert caught.value.reason is Reason.QUEUE_FULL
        assert caught.value.headers["x-should-retry"] == "true"
        assert 1 <= int(caught.value.headers["Retry-After"]) <= 60
        assert_empty(gate, budget)

    async def test_what_waits_is_bounded_in_bytes_too(self) -> None:
        gate, budget = gate_of(slots=1, max_bytes=1000)

        def large(name: str, size: int) -> Waiting:
            return dataclasses.replace(waiting(name), size=size)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hold(gate, large("runs", 5000), 1.0, []))  # does not wait, so it does not count
            await asyncio.sleep(0.1)
            for number in range(2):
                tasks.create_task(hold(gate, large(str(number), 400), 1.0, []))
            await asyncio.sleep(0.1)
            with pytest.raises(Busy) as caught:
                await hold(gate, large("too much", 400), 1.0, [])
            tasks.create_task(hold(gate, large("fits", 200), 1.0, []))
        assert caught.value.reason is Reason.QUEUE_FULL
        assert_empty(gate, budget)

    async def test_patience_ends_in_504(self) -> None:
        gate, budget = gate_of()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hold(gate, waiting("long"), 100.0, []))
            await asyncio.sleep(0)
            started = asyncio.get_running_loop().time()
            with pytest.raises(TooLate):
                await hold(gate, waiting("impatient"), 1.0, [], patience=7.0)
            assert asyncio.get_running_loop().time() - started == pytest.approx(7.0)
        assert_empty(gate, budget)

    async def test_a_tier_that_rejects_says_so_when_the_promise_is_broken(self) -> None:
        gate, budget = gate_of()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hold(gate, waiting("long"), 100.0, []))
            await asyncio.sleep(0)
            started = asyncio.get_running_loop().time()
            with pytest.raises(Busy) as caught:
                await hold(gate, waiting("late", due=3.0), 1.0, [], reject_late=True)
            assert asyncio.get_running_loop().time() - started == pytest.approx(3.0)
            assert caught.value.reason is Reason.SLA_INFEASIBLE
        assert_empty(gate, budget)

    async def test_a_tier_that_rejects_does_not_wait_behind_one_that_waits_too_long_already(self) -> None:
        gate, budget = gate_of()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hold(gate, waiting("long"), 100.0, []))
            tasks.create_task(hold(gate, waiting("patient", due=50.0), 1.0, []))
            await asyncio.sleep(4.0)
            started = asyncio.get_running_loop().time()
            with pytest.raises(Busy):
                await hold(gate, waiting("late", due=3.0), 1.0, [], reject_late=True)
            assert asyncio.get_running_loop().time() == started
        assert_empty(gate, budget)


class TestGivenBackOnce:
    @pytest.mark.parametrize("number", range(8))
    async def test_cancelled_at_any_moment_it_leaves_nothing_behind(self, number: int) -> None:
        gate, budget = gate_of()
        log: list[str] = []

        async def work() -> None:
            async with gate.place(waiting("victim"), patience=1000.0):
                log.append("victim")
                for _ in range(3):
                    await asyncio.sleep(1.0)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hold(gate, waiting("before"), 1.0, log))
            await asyncio.sleep(0)
            victim = CancelledAt(work(), number)
            tasks.create_task(hold_result(victim))
            await asyncio.sleep(0)
            tasks.create_task(hold(gate, waiting("after"), 1.0, log))
        assert victim.reached == (number < 4)
        assert "after" in log
        assert_empty(gate, budget)

    async def test_cancelled_in_the_tick_before_its_turn_it_gives_its_place_to_the_next(self) -> None:
        gate, budget = gate_of()
        log: list[str] = []
        tasks = [asyncio.create_task(hold(gate, waiting(name), 10.0, log)) for name in ("first", "second", "third")]
        await asyncio.sleep(1.0)
        tasks[0].cancel()  # runs first, and lets the second in, which does not know yet that it is cancelled
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert log == ["first", "third"]
        assert_empty(gate, budget)

    async def test_cancelled_in_the_tick_it_was_let_in_it_gives_its_place_to_the_next(self) -> None:
        gate, budget = gate_of()
        log: list[str] = []
        first = asyncio.create_task(hold(gate, waiting("first"), 1000.0, log))
        await asyncio.sleep(0)
        second = asyncio.create_task(hold(gate, waiting("second"), 1000.0, log))
        third = asyncio.create_task(hold(gate, waiting("third"), 1.0, log))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)  # the first leaves, the second's place is granted, it has not run yet
        second.cancel()
        await third
        with contextlib.suppress(asyncio.CancelledError):
            await first
        with contextlib.suppress(asyncio.CancelledError):
            await second
        assert log == ["first", "third"]
        assert_empty(gate, budget)

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["gold", "bronze"]),
                st.floats(0, 5),  # arrives
                st.floats(0, 3),  # works
                st.none() | st.floats(0, 8),  # is cancelled
                st.integers(1, 4),  # sequences
                st.booleans(),  # fails at its end
                st.builds(  # blocks, where they are estimated
                    Demand,
                    prompt=st.integers(0, 1800),
                    output=st.integers(1, 300),
                    chunks=st.integers(0, 20).map(lambda count: tuple(b"%d" % n for n in range(count))),
                    chunk_tokens=st.just(16),
                ),
            ),
            max_size=25,
        ),
        st.integers(1, 4),
        st.none() | st.integers(80, 200),  # capacity
    )
    @settings(deadline=None, max_examples=80)
    def test_any_crowd_leaves_nothing_behind(self, crowd: list[Any], slots: int, capacity: int | None) -> None:
        async def one(
            gate: Gate, number: int, tier: str, arrives: float, works: float, size: int, fails: bool, demand: Demand
        ) -> None:
            await asyncio.sleep(arrives)
            request = waiting(str(number), tier, 2.0, size, prompt="ab"[: number % 3])
            async with gate.place(request, None if capacity is None else demand, patience=6.0):
                await asyncio.sleep(works)
                if fails:
                    raise RuntimeError("the engine broke")

        async def cancel(task: asyncio.Task[None], at: float) -> None:
            await asyncio.sleep(at)
            task.cancel()

        async def run() -> None:
            gate, budget = gate_of(slots, blocks=None if capacity is None else estimated(capacity))
            tasks = []
            for number, (tier, arrives, works, cancelled, size, fails, demand) in enumerate(crowd):
                task = asyncio.create_task(one(gate, number, tier, arrives, works, size, fails, demand))
                tasks.append(task)
                if cancelled is not None:
                    tasks.append(asyncio.create_task(cancel(task, cancelled)))
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert result is None or isinstance(result, (asyncio.CancelledError, RuntimeError, TooLate)), result
            assert_empty(gate, budget)

        loop = virtual_loop()
        try:
            loop.run_until_complete(run())
        finally:
            loop.close()

    def test_a_reservation_is_released_once(self) -> None:
        budget = SlotBudget()
        reservation = budget.reserve("a", "gold", 3)
        assert [reservation.release(), reservation.release()] == [True, False]
        assert (budget.sequences, budget.requests) == (0, 0)


def virtual_loop() -> asyncio.AbstractEventLoop:
    return looptime.patch_event_loop(asyncio.new_event_loop())  # type: ignore[no-any-return]  # looptime has no stubs


async def hold_result(victim: CancelledAt) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await victim


class TestSlots:
    def test_before_the_ledger_is_known_the_engines_default_is_assumed(self) -> None:
        assert slots_of(None, None).total == 32
        assert slots_of(None, 5) == Slots(5)

    async def test_the_ledger_tells_how_many_there_are_and_who_may_always_have_them(self, folder: Any) -> None:
        engine = StubEngine(folder / "kv.sock", max_sequences=8)
        engine.slots = {"gold": 4, "bronze": 2}
        engine.quotas = quota.quotas_for(view(), 1000)
        assert slots_of(engine.ledger(), None) == Slots(8, {"gold": 4, "bronze": 2})
        assert slots_of(engine.ledger(), 4) == Slots(4, {"gold": 2, "bronze": 1})
        engine.max_sequences = None
        assert slots_of(engine.ledger(), None).total == 32
