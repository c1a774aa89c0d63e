"""What would happen to a request now: the scheduler tells, as it would do, and nothing in it changes by telling."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cacheaware_api.wire import StepReport
from cacheaware_sidecar.scheduling import (
    Decision,
    EngineView,
    FlushReason,
    Foreseen,
    Scheduler,
    Slots,
    Terms,
    Used,
    Waiting,
    WaitsFor,
)
from cacheaware_sidecar.scheduling.cost_model import FEWEST_REPORTS
from cacheaware_sidecar.scheduling.testing import VirtualClock

TERMS = {"gold": Terms(4, 100, window=0.05), "bronze": Terms(1, 0, window=0.5), "plain": Terms(1, 0)}
WIDE = EngineView(Slots(100))


def waiting(name: str, text: str = "", tier: str = "bronze", at: float = 0.0, **more: object) -> Waiting:
    """One checkpoint of 16 chunks of 16 tokens a letter: prompts share what their texts start with."""
    chunks = tuple(f"{text[: letter + 1]}/{n}".encode() for letter in range(len(text)) for n in range(16))
    values = {"tenant": "acme", "prompt_tokens": 256.0 * len(text) + 10, "chunks": chunks, **more}
    return Waiting(name, tier, arrived=at, **values)  # type: ignore[arg-type]  # values of the fields' own types


def fit(scheduler: Scheduler) -> None:
    for number in range(2 * FEWEST_REPORTS):
        tokens = 256 if number % 2 else 8
        scheduler.step(StepReport(1, tokens, 0, 0, 0, 0.02 + 0.001 * tokens))


def state(scheduler: Scheduler) -> bytes:
    """All of it."""
    return pickle.dumps(scheduler)


def run(scheduler: Scheduler, view: EngineView, *requests: Waiting) -> None:
    for request in requests:
        scheduler.add(request)
    scheduler.next(view)


class TestCourse:
    def test_an_idle_engine_takes_it_at_once(self) -> None:
        assert Scheduler(TERMS, VirtualClock()).foresee(waiting("a", "a"), WIDE) == Foreseen()

    def test_a_follower_would_be_held_until_its_prefix_is_ready_or_its_window_ends(self) -> None:
        scheduler = Scheduler(TERMS, VirtualClock())
        run(scheduler, WIDE, waiting("leader", "aab"))
        foreseen = scheduler.foresee(waiting("follower", "aac"), WIDE)
        assert foreseen == Foreseen(FlushReason.PREFIX_READY, FlushReason.WINDOW, 0.5)

    def test_its_promise_may_end_the_hold_before_the_window(self) -> None:
        scheduler = Scheduler(TERMS, VirtualClock())
        run(scheduler, WIDE, waiting("leader", "aab"))
        foreseen = scheduler.foresee(waiting("follower", "aac", deadline=0.4), WIDE)
        assert foreseen.hold_ends is FlushReason.SLACK
        assert foreseen.hold_seconds == pytest.approx(0.2)

    @pytest.mark.parametrize(
        ("view", "waits_for"),
        [
            pytest.param(EngineView(Slots(1)), WaitsFor.SLOTS, id="no slot is free"),
            pytest.param(EngineView(Slots(9), waiting=5), WaitsFor.SLOTS, id="others wait inside the engine"),
            pytest.param(EngineView(Slots(1, {"plain": 2})), None, id="its tier is owed a slot"),
            pytest.param(
                EngineView(Slots(9), admits=lambda request: request.id != "late"), WaitsFor.BLOCKS, id="no blocks"
            ),
            pytest.param(WIDE, None, id="there is room"),
        ],
    )
    def test_what_it_would_wait_for_is_named(self, view: EngineView, waits_for: WaitsFor | None) -> None:
        scheduler = Scheduler(TERMS, VirtualClock())
        run(scheduler, view, waiting("first", "a", "plain"))
        assert scheduler.foresee(waiting("late", "b", "plain"), view).waits_for is waits_for

    def test_prompts_that_were_sent_ahead_are_waited_for(self) -> None:
        scheduler = Scheduler(TERMS, VirtualClock())
        fit(scheduler)
        run(scheduler, WIDE, *(waiting(str(n), chr(97 + n), "plain") for n in range(9)))
        assert scheduler.foresee(waiting("late", "x", "plain"), WIDE).waits_for is WaitsFor.PROMPTS

    def test_who_would_go_first_and_waits_for_blocks_is_waited_for(self) -> None:
        view = EngineView(Slots(9), admits=lambda request: request.id != "large")
        scheduler = Scheduler(TERMS, VirtualClock())
        run(scheduler, view, waiting("large", "a", "plain"))
        assert scheduler.foresee(waiting("late", "b", "plain"), view).waits_for is WaitsFor.TURN


def test_prompts_as_long_as_they_may_be_can_be_asked_about() -> None:
    scheduler = Scheduler(TERMS, VirtualClock())
    text = "".join(chr(200 + number) for number in range(512))
    run(scheduler, EngineView(Slots(1)), *(waiting(str(number), text, "plain") for number in range(3)))
    foreseen = scheduler.foresee(waiting("late", text, "plain"), EngineView(Slots(1)))
    assert foreseen.waits_for is WaitsFor.SLOTS


def test_a_prompt_that_should_be_computed_by_now_is_not_taken_for_computed_by_asking() -> None:
    """No first token of it will be seen; the next `next` notices."""
    clock = VirtualClock()
    scheduler = Scheduler(TERMS, clock)
    fit(scheduler)
    run(scheduler, WIDE, waiting("whole", "aab", streams=False))
    clock.now = 60.0
    before = state(scheduler)
    scheduler.foresee(waiting("late", "aac", at=60.0), WIDE)
    assert state(scheduler) == before


class AskingChangesNothing(RuleBasedStateMachine):
    """Two schedulers live the same life, and one of them is asked again and again: they decide the same. And what was
    foreseen of a request is what happens when it comes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.view = EngineView(Slots(3, {"gold": 1}))
        self.asked, self.twin = Scheduler(TERMS, self.clock), Scheduler(TERMS, self.clock)
        self.inside: list[str] = []
        self.queued: list[str] = []
        self.requests: dict[str, Waiting] = {}
        self.wake_at: float | None = None

    @initialize(fitted=st.booleans(), slots=st.integers(1, 5))
    def begin(self, fitted: bool, slots: int) -> None:
        self.view = EngineView(Slots(slots, {"gold": 1}))
        for scheduler in (self.asked, self.twin) if fitted else ():
            fit(scheduler)

    def made(self, text: str, tier: str, tenant: str, promise: float | None, streams: bool) -> Waiting:
        now = self.clock.now
        deadline = None if promise is None else now + promise
        name = f"r{len(self.requests)}"
        return waiting(name, text, tier, now, tenant=tenant, deadline=deadline, streams=streams, output_tokens=8.0)

    def next(self) -> Decision:
        decision = self.asked.next(self.view)
        assert decision == self.twin.next(self.view)
        for dispatch in decision.dispatches:
            self.queued.remove(dispatch.request.id)
            self.inside.append(dispatch.request.id)
        self.wake_at = decision.wake_at
        return decision

    def foreseen(self, request: Waiting) -> Foreseen:
        before = state(self.asked)
        foreseen = self.asked.foresee(request, self.view)
        assert state(self.asked) == before
        return foreseen

    @rule(
        text=st.text("ab", max_size=4),
        tier=st.sampled_from(sorted(TERMS)),
        tenant=st.sampled_from(["acme", "other"]),
        promise=st.none() | st.floats(0.1, 2.0),
        streams=st.booleans(),
        comes=st.booleans(),
    )
    def ask(self, text: str, tier: str, tenant: str, promise: float | None, streams: bool, comes: bool) -> None:
        request = self.made(text, tier, tenant, promise, streams)
        foreseen = self.foreseen(request)
        if not comes:
            return
        self.requests[request.id] = request
        self.queued.append(request.id)
        for scheduler in (self.asked, self.twin):
            scheduler.add(request)
        went = [dispatch.request.id for dispatch in self.next().dispatches]
        held = self.asked._holds.held.get(request.id)
        assert (request.id in went) is (foreseen == Foreseen())
        assert (held is not None) is (foreseen.hold_reason is not None)
        if held is not None:
            assert foreseen.hold_ends is held.at_end
            assert foreseen.hold_seconds == pytest.approx(held.until - self.clock.now)

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), ends=st.booleans())
    def hear_from_the_engine(self, data: st.DataObject, ends: bool) -> None:
        name = data.draw(st.sampled_from(self.inside))
        for scheduler in (self.asked, self.twin):
            if ends:
                scheduler.finished(name, Used(round(self.requests[name].prompt_tokens), 8, 0))
            else:
                scheduler.first_byte(name)
        if ends:
            self.inside.remove(name)
        self.next()

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.queued))
        self.queued.remove(name)
        for scheduler in (self.asked, self.twin):
            assert scheduler.cancel(name)
        self.next()

    @rule(seconds=st.floats(0.001, 0.6))
    def wait(self, seconds: float) -> None:
        """It is asked whenever it wants to be, as its contract says."""
        end = self.clock.now + seconds
        while self.wake_at is not None and self.clock.now < self.wake_at <= end:
            self.clock.now = self.wake_at
            self.next()
        self.clock.now = end
        self.next()

    @invariant()
    def accounts_are_right(self) -> None:
        self.asked.check_integrity()


AskingChangesNothing.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAskingChangesNothing = AskingChangesNothing.TestCase
