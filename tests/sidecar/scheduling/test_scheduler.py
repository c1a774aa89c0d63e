"""The whole scheduler: nothing is lost, nothing is held in vain, and everything has a reason. In virtual time."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cacheaware_api.wire import StepReport
from cacheaware_sidecar.scheduling import Dispatch, EngineView, FlushReason, Scheduler, Slots, Terms, Used, Waiting
from cacheaware_sidecar.scheduling.cost_model import FEWEST_REPORTS, StepPrices
from cacheaware_sidecar.scheduling.scheduler import ENGINE_QUEUE, MOST_HELD, STEPS_AHEAD, URGENCY_STEPS
from cacheaware_sidecar.scheduling.testing import ToyEngine, VirtualClock

TERMS = {"gold": Terms(4, 100, window=0.05), "bronze": Terms(1, 0, window=0.5), "plain": Terms(1, 0)}
PRICES = StepPrices(step=0.02, token=0.001, context=0.0, byte=0.0)
FULL_STEP = 0.02 + 256 * 0.001


def prompt(text: str) -> tuple[bytes, ...]:
    """One checkpoint of 16 chunks of 16 tokens a letter: prompts share what their texts start with."""
    return tuple(f"{text[: letter + 1]}/{n}".encode() for letter in range(len(text)) for n in range(16))


def waiting(name: str, text: str = "", tier: str = "bronze", at: float = 0.0, **more: object) -> Waiting:
    values = {"tenant": "acme", "prompt_tokens": 256.0 * len(text) + 10, "chunks": prompt(text), **more}
    return Waiting(name, tier, arrived=at, **values)  # type: ignore[arg-type]  # values of the fields' own types


@dataclasses.dataclass
class Bench:
    """A scheduler that knows what steps cost, and its clock."""

    clock: VirtualClock = dataclasses.field(default_factory=VirtualClock)
    view: EngineView = dataclasses.field(default_factory=lambda: EngineView(Slots(4)))

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(TERMS, self.clock)

    def fitted(self) -> Bench:
        for number in range(2 * FEWEST_REPORTS):
            tokens = 256 if number % 2 else 8
            seconds = PRICES.step + PRICES.token * tokens
            self.scheduler.step(StepReport(1, tokens, 0, 0, 0, seconds))
        return self

    def add(self, *requests: Waiting) -> list[Dispatch]:
        for request in requests:
            self.scheduler.add(request)
        return self.ask()

    def ask(self, at: float | None = None) -> list[Dispatch]:
        self.clock.now = self.clock.now if at is None else at
        return list(self.scheduler.next(self.view).dispatches)

    def names(self, dispatches: list[Dispatch]) -> list[str]:
        return [dispatch.request.id for dispatch in dispatches]


class TestLeadersAndFollowers:
    def test_a_follower_waits_for_the_one_that_computes_its_prefix(self) -> None:
        bench = Bench()
        (leader,) = bench.add(waiting("leader", "aab"), waiting("follower", "aac"))
        assert leader.request.id == "leader"
        assert bench.scheduler.held == 1
        bench.clock.now = 0.3
        bench.scheduler.first_byte("leader")
        (follower,) = bench.ask()
        assert follower.request.id == "follower"
        assert follower.held == pytest.approx(0.3)
        assert follower.queued == pytest.approx(0.0)
        assert follower.flush_reason is FlushReason.PREFIX_READY
        assert follower.predicted_tokens == 512
        assert follower.group == leader.group

    def test_company_shorter_than_a_checkpoint_is_not_waited_for(self) -> None:
        bench = Bench()
        assert bench.names(bench.add(waiting("one", "ab"), waiting("two", "xb"))) == ["one", "two"]

    def test_what_is_cached_already_is_not_waited_for(self) -> None:
        bench = Bench()
        bench.add(waiting("first", "aab"))
        bench.scheduler.first_byte("first")
        assert bench.names(bench.add(waiting("second", "aac"), waiting("third", "aad"))) == ["second", "third"]

    def test_the_window_is_the_longest_hold(self) -> None:
        bench = Bench()
        bench.add(waiting("leader", "aab"), waiting("follower", "aac"))
        assert bench.scheduler.next(bench.view).wake_at == pytest.approx(0.5)
        assert bench.ask(at=0.499) == []
        (follower,) = bench.ask(at=0.5)
        assert (follower.flush_reason, follower.held) == (FlushReason.WINDOW, 0.5)

    def test_a_tier_without_a_window_is_never_held(self) -> None:
        bench = Bench()
        requests = (waiting("leader", "aab", "plain"), waiting("follower", "aac", "plain"))
        assert bench.names(bench.add(*requests)) == ["leader", "follower"]

    def test_half_of_the_promise_gone_ends_a_hold(self) -> None:
        bench = Bench()
        bench.add(waiting("leader", "aab"))
        bench.add(waiting("follower", "aac", deadline=0.4))
        (follower,) = bench.ask(at=0.2)
        assert follower.flush_reason is FlushReason.SLACK

    def test_the_time_that_its_prompt_takes_is_no_slack(self) -> None:
        bench = Bench().fitted()
        bench.add(waiting("leader", "aab", "plain"))
        own = bench.scheduler.costs.prefill_seconds(778)
        assert own is not None
        start = own - 0.5 * FULL_STEP  # there is room for more, and the leader needs that long still
        bench.clock.now = start
        late = waiting("late", "aac", at=start, deadline=own + own - 0.01)
        soon = waiting("soon", "aad", at=start, deadline=own + own + 0.1)
        assert bench.names(bench.add(late)) == ["late"]  # its first token is late already: it is not held
        bench.scheduler.finished("late")
        assert bench.add(soon) == []
        assert bench.scheduler.held == 1

    def test_nobody_waits_for_a_prefix_that_would_come_too_late(self) -> None:
        bench = Bench(view=EngineView(Slots(9))).fitted()
        bench.add(waiting("leader", "aab", "plain"))  # three steps
        bench.clock.now = 0.72  # there is room for more, and an eighth of a second is left of the leader's prompt
        late = waiting("late", "aac", "gold", at=0.72)  # its window is 50 ms
        assert bench.names(bench.add(late)) == ["late"]

    def test_few_are_held_at_a_time_however_many_share_a_prefix(self) -> None:
        bench = Bench(view=EngineView(Slots(2)))
        bench.add(*(waiting(str(number), f"aa{number}") for number in range(500)))
        assert bench.scheduler.held == MOST_HELD
        assert bench.scheduler.inside == 2

    def test_a_leader_that_is_gone_holds_nobody(self) -> None:
        bench = Bench()
        bench.add(waiting("other", "x", "plain"), waiting("leader", "aab"), waiting("follower", "aac"))
        assert bench.scheduler.held == 1
        bench.scheduler.finished("leader")
        assert bench.names(bench.ask()) == ["follower"]

    def test_an_idle_engine_holds_nothing(self) -> None:
        bench = Bench()
        bench.add(waiting("leader", "aab"), waiting("follower", "aac"), waiting("another", "aad"))
        assert bench.scheduler.held == 2
        bench.scheduler.finished("leader")
        (leader,) = bench.ask()
        assert leader.flush_reason is FlushReason.IDLE
        assert bench.scheduler.held == 1  # behind the new leader, with what is left of its window

    def test_holds_add_up_to_the_window_at_most(self) -> None:
        bench = Bench()
        bench.add(waiting("leader", "aab"), waiting("follower", "aac"), waiting("another", "aad"))
        bench.clock.now = 0.3
        bench.scheduler.finished("leader")
        assert bench.names(bench.ask()) == ["follower"]
        (another,) = bench.ask(at=0.5)
        assert (another.flush_reason, another.held) == (FlushReason.WINDOW, 0.5)


@pytest.mark.parametrize("streams", [True, False])
def test_without_a_stream_the_prompt_counts_as_computed_when_it_should_be(streams: bool) -> None:
    bench = Bench().fitted()
    bench.add(waiting("leader", "a", streams=streams), waiting("follower", "a"))
    sent: list[Dispatch] = []
    while not sent:
        wake = bench.scheduler.next(bench.view).wake_at
        assert wake is not None
        sent = bench.ask(at=wake)
    (follower,) = sent
    assert (bench.clock.now < 0.5) is not streams
    assert follower.flush_reason is (FlushReason.WINDOW if streams else FlushReason.PREFIX_READY)


class TestTheEngineIsKeptShortOfWork:
    def test_more_is_sent_once_half_a_step_is_left_to_compute(self) -> None:
        bench = Bench(view=EngineView(Slots(100))).fitted()
        sent = bench.add(*(waiting(str(n), chr(97 + n), "plain") for n in range(10)))
        assert len(sent) == 1  # 266 tokens each, and a step has 256
        wake = bench.scheduler.next(bench.view).wake_at
        assert wake is not None
        assert wake == pytest.approx((266 / 256 - STEPS_AHEAD) * FULL_STEP, rel=1e-2)
        assert len(bench.ask(at=wake + 1e-6)) == 1

    def test_short_prompts_are_sent_ahead_until_they_fill_half_a_step_together(self) -> None:
        bench = Bench(view=EngineView(Slots(100))).fitted()
        short = (waiting(str(n), chr(97 + n), "plain", prompt_tokens=20.0) for n in range(20))
        assert len(bench.add(*short)) == 7  # 20 tokens each, and a step has 256

    def test_an_engine_that_was_only_seen_with_little_to_do_is_given_more(self) -> None:
        bench = Bench(view=EngineView(Slots(100)))
        for number in range(2 * FEWEST_REPORTS):
            tokens = 8 + number % 2
            bench.scheduler.step(StepReport(1, tokens, 0, 0, 0, 0.1 + 0.0001 * tokens))
        sent = bench.add(*(waiting(str(n), chr(97 + n), "plain") for n in range(20)))
        assert len(sent) > 4, "a step costs as much as a thousand tokens: one prompt a step would waste the engine"

    def test_an_engine_that_reports_no_steps_gets_all_that_it_has_slots_for(self) -> None:
        bench = Bench(view=EngineView(Slots(7)))
        assert len(bench.add(*(waiting(str(n), chr(97 + n), "plain") for n in range(10)))) == 7

    def test_a_prompt_that_takes_longer_than_expected_keeps_nobody_out_for_ever(self) -> None:
        bench = Bench(view=EngineView(Slots(100))).fitted()
        assert bench.names(bench.add(waiting("stuck", "abcdefgh", "plain"))) == ["stuck"]
        assert bench.add(waiting("next", "x", "plain")) == []
        assert bench.names(bench.ask(at=3.0)) == ["next"]

    def test_who_waits_for_blocks_inside_the_engine_keeps_the_others_here(self) -> None:
        view = EngineView(Slots(10, {"gold": 2}), waiting=ENGINE_QUEUE + 1)
        bench = Bench(view=view)
        bench.add(waiting("first", "a", "plain"))
        assert bench.names(bench.add(waiting("second", "b", "plain"), waiting("gold", "c", "gold"))) == ["gold"]
        bench.view = EngineView(Slots(10))
        assert bench.names(bench.ask()) == ["second"]

    def test_who_is_not_admitted_keeps_its_tier_waiting_and_no_other(self) -> None:
        asked: list[str] = []

        def admits(request: Waiting) -> bool:
            asked.append(request.id)
            return request.tier != "plain"

        bench = Bench(view=EngineView(Slots(10), admits=admits))
        assert bench.names(bench.add(waiting("p1", tier="plain"), waiting("p2", tier="plain"), waiting("b"))) == ["b"]
        assert sorted(asked) == ["b", "p1"]


class TestWhoGoesFirst:
    def sent_one_by_one(self, bench: Bench, *requests: Waiting) -> list[str]:
        """The order in which an engine with one slot gets them, when each has ended."""
        for request in requests:
            bench.scheduler.add(request)
        names: list[str] = []
        while sent := bench.ask():
            (dispatch,) = sent
            names.append(dispatch.request.id)
            bench.scheduler.finished(dispatch.request.id, Used(round(dispatch.request.prompt_tokens), 0, 0))
        return names

    def bench(self) -> Bench:
        """It knows that the prompts "a" and "aaaa" are cached."""
        bench = Bench(view=EngineView(Slots(1)))
        self.sent_one_by_one(bench, waiting("known", "aaaa", "plain"))
        return bench

    def test_what_is_cached_goes_before_what_has_to_be_computed(self) -> None:
        names = self.sent_one_by_one(
            self.bench(), waiting("cold", "bbbb", "plain"), waiting("cached", "aaaab", "plain")
        )
        assert names == ["cached", "cold"]

    def test_a_long_prompt_that_is_cached_is_no_better_than_a_short_one(self) -> None:
        names = self.sent_one_by_one(
            self.bench(), waiting("short", "ab", "plain"), waiting("long", "aaaab", "plain", at=0.0)
        )
        assert names == ["short", "long"]

    def test_urgency_puts_a_share_two_steps_ahead_of_the_others_and_no_more(self) -> None:
        bench = Bench(view=EngineView(Slots(1))).fitted()
        bench.clock.now = 8.0
        step = bench.scheduler.costs.step_tokens
        urgent = (waiting(f"urgent-{n}", tier="bronze", prompt_tokens=16.0, deadline=10.0) for n in range(200))
        others = (waiting(f"other-{n}", tier="plain", at=8.0, prompt_tokens=16.0) for n in range(20))
        names = self.sent_one_by_one(bench, *urgent, *others)
        before = names.index("other-0")
        assert URGENCY_STEPS * step <= 16 * before <= URGENCY_STEPS * step + 32


class TestEstimates:
    def test_nothing_is_known_at_first(self) -> None:
        assert Bench().scheduler.time_to_first_token(waiting("a", "a")) is None

    def test_an_idle_engine_takes_as_long_as_the_prompt(self) -> None:
        bench = Bench().fitted()
        estimate = bench.scheduler.time_to_first_token(waiting("a", "aa"))
        assert estimate == pytest.approx(0.522 + 3 * 0.02, rel=0.01)

    def test_what_is_inside_and_what_waits_goes_first(self) -> None:
        bench = Bench(view=EngineView(Slots(100))).fitted()
        bench.add(*(waiting(str(n), chr(97 + n), "plain") for n in range(10)))
        one = 0.266 + 2 * 0.02
        estimate = bench.scheduler.time_to_first_token(waiting("new", "z", "plain"))
        assert estimate == pytest.approx(11 * one, rel=0.02)

    def test_a_tier_waits_for_the_share_of_others_only(self) -> None:
        bench = Bench(view=EngineView(Slots(100))).fitted()
        bench.add(*(waiting(str(n), chr(97 + n), "plain") for n in range(10)))
        one = 0.266 + 2 * 0.02
        estimate = bench.scheduler.time_to_first_token(waiting("gold", "z", "gold"))
        inside = 266 / 256 * FULL_STEP
        assert estimate == pytest.approx(inside + one, rel=0.01)  # what is ahead of it in steps that they share

    def test_a_hit_is_faster(self) -> None:
        bench = Bench().fitted()
        bench.add(waiting("a", "aaaa", "plain"))
        bench.scheduler.finished("a", Used(1034, 1, 0))
        estimate = bench.scheduler.time_to_first_token(waiting("b", "aaaa", "plain"))
        assert estimate is not None
        assert estimate < 0.1


class SchedulerMachine(RuleBasedStateMachine):
    """Requests that come and leave at any moment, in front of an engine that computes them in virtual time."""

    @initialize(
        slots=st.integers(1, 6),
        nominal=st.dictionaries(st.sampled_from(sorted(TERMS)), st.integers(0, 2)),
        reports=st.booleans(),
    )
    def start(self, slots: int, nominal: dict[str, int], reports: bool) -> None:
        self.clock = VirtualClock()
        self.scheduler = Scheduler(TERMS, self.clock)
        self.engine = ToyEngine(PRICES)
        self.reports = reports  # whether the engine tells what its steps cost
        self.slots = Slots(slots, nominal)
        self.waiting: dict[str, Waiting] = {}
        self.ended: set[str] = set()
        self.number = 0
        self.wake_at: float | None = None

    @rule(
        text=st.text("ab", max_size=4),
        tier=st.sampled_from(sorted(TERMS)),
        tenant=st.sampled_from("xyz"),
        promise=st.none() | st.floats(0.01, 5),
        streams=st.booleans(),
        sequences=st.integers(1, 2),
        output=st.integers(1, 20),
    )
    def add(
        self, text: str, tier: str, tenant: str, promise: float | None, streams: bool, sequences: int, output: int
    ) -> None:
        self.number += 1
        request = waiting(
            str(self.number),
            text,
            tier,
            self.clock.now,
            tenant=tenant,
            deadline=None if promise is None else self.clock.now + promise,
            streams=streams,
            sequences=sequences,
            output_tokens=output,
        )
        self.waiting[request.id] = request
        self.scheduler.add(request)
        self.ask()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.scheduler.cancel(request_id)
        assert not self.scheduler.cancel(request_id)
        assert not self.scheduler.finished(request_id)
        del self.waiting[request_id]
        self.ask()

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A client goes away while its request is in the engine."""
        request_id = data.draw(st.sampled_from(sorted(self.engine.running)))
        self.engine.abort(request_id)
        self.finish(request_id, None)
        self.ask()

    @precondition(lambda self: self.engine.running)
    @rule(count=st.integers(1, 10))
    def run_steps(self, count: int) -> None:
        for _ in range(count):
            if self.engine.idle:
                return
            self.step()

    @rule(seconds=st.floats(0, 1))
    def wait(self, seconds: float) -> None:
        """Time in which the engine does nothing. The scheduler is asked when it wanted to be."""
        self.pass_time(self.clock.now + seconds)

    def step(self) -> None:
        streaming = {name for name, one in self.engine.running.items() if one.request.streams}
        used = {name: one.used() for name, one in self.engine.running.items()}
        ends, stepped = self.engine.step(self.clock.now)
        self.pass_time(ends)
        if self.reports:
            self.scheduler.step(stepped.report)
        for request_id in stepped.first_tokens:
            if request_id in streaming:
                self.scheduler.first_byte(request_id)
        for request_id in stepped.ended:
            self.engine.abort(request_id)
            self.finish(request_id, used[request_id])
        self.ask()

    def finish(self, request_id: str, used: Used | None) -> None:
        assert self.scheduler.finished(request_id, used), "released once"
        assert not self.scheduler.finished(request_id, used), "and not again"
        self.ended.add(request_id)

    def pass_time(self, until: float) -> None:
        while self.wake_at is not None and self.wake_at <= until:
            self.clock.now = max(self.clock.now, self.wake_at)
            before = self.wake_at
            self.ask()
            assert self.wake_at is None or self.wake_at > before, "it asked to be woken for nothing"
        self.clock.now = until

    def ask(self) -> None:
        decision = self.scheduler.next(EngineView(self.slots))
        self.wake_at = decision.wake_at
        for dispatch in decision.dispatches:
            request = self.waiting.pop(dispatch.request.id)  # it waited, and goes once
            assert request is dispatch.request
            window = TERMS[request.tier].window
            assert dispatch.held <= window + 1e-9, "held past the window"
            assert (dispatch.held > 0) <= (dispatch.flush_reason is not FlushReason.NOT_HELD)
            self.engine.submit(request)
        self.check_now()

    def check_now(self) -> None:
        """What is true whenever it was asked."""
        now, scheduler = self.clock.now, self.scheduler
        scheduler.check_integrity()
        assert scheduler.waiting == len(self.waiting)
        assert scheduler.inside == len(self.engine.running)
        for held in scheduler._holds.held.values():
            assert now < held.until <= held.request.urgent_at, "held past its slack"
            assert held.until <= held.since + TERMS[held.request.tier].window + 1e-9
            assert held.leader is None or held.leader in self.engine.running, "held behind one that is gone"
        if self.engine.idle:
            assert not self.waiting, "something waits in front of an idle engine"
        elif scheduler.waiting > scheduler.held and scheduler.sequences < self.slots.total:
            full_step = scheduler._full_step
            assert full_step is not None, "it waits though the engine has a slot"
            assert scheduler._computing.backlog(now) > STEPS_AHEAD * full_step, "it waits though the engine has room"
        for tier in TERMS:
            mine = [request for request in self.waiting.values() if request.tier == tier]
            assert scheduler.waiting_of(tier) == len(mine)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(20_000):
            if self.engine.idle:
                break
            self.step()
        assert not self.waiting, "a request was lost"
        assert (self.scheduler.inside, self.scheduler.waiting, self.scheduler.held) == (0, 0, 0)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
