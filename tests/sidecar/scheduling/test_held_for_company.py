"""Held for company: in an engine that reads a prefix once for its group, while it is busy and company pays."""

from __future__ import annotations

import pytest

from cacheaware_api.wire import StepGroup, StepReport
from cacheaware_sidecar.scheduling import Dispatch, EngineView, FlushReason, Scheduler, Slots, Terms, Used, Waiting
from cacheaware_sidecar.scheduling.cost_model import FEWEST_REPORTS
from cacheaware_sidecar.scheduling.holding import LARGEST_GROUP
from cacheaware_sidecar.scheduling.testing import VirtualClock

WINDOW = 0.5
VIEW = EngineView(Slots(256))


def waiting(name: str, text: str, at: float, tokens: float | None = None) -> Waiting:
    """A checkpoint of 256 tokens a letter."""
    chunks = tuple(f"{text[: letter + 1]}/{n}".encode() for letter in range(len(text)) for n in range(16))
    return Waiting(name, "bronze", "acme", at, tokens or 256.0 * len(text) + 10, chunks=chunks)


class Scene:
    """An engine of which a leader's prefix "ab" is cached, and which computes a prompt of three eighths of a step."""

    def __init__(self, *, cascade: bool = True, busy: bool = True, window: float = WINDOW) -> None:
        self.clock = VirtualClock()
        self.scheduler = Scheduler({"bronze": Terms(1, 0, window), "gold": Terms(5, 100)}, self.clock)
        for number in range(4 * FEWEST_REPORTS):
            tokens, context = (256 if number % 2 else 8), (100_000 if number % 4 < 2 else 10)
            seconds = 0.02 + 0.001 * tokens + 1e-6 * context
            groups = (StepGroup(2, 512, cascade),)
            self.scheduler.step(StepReport(1, tokens, context, 0, 0, seconds, groups))
        assert self.add(waiting("leader", "ab", 0.0)) == ["leader"]
        self.scheduler.first_byte("leader")
        if busy:
            assert self.add(waiting("busy", "w", 0.0, tokens=96)) == ["busy"]

    def add(self, request: Waiting) -> list[str]:
        """It comes; who goes then."""
        return [dispatch.request.id for dispatch in self.come(request)]

    def come(self, request: Waiting) -> tuple[Dispatch, ...]:
        self.clock.now = request.arrived
        self.scheduler.add(request)
        return self.ask()

    def ask(self, at: float | None = None) -> tuple[Dispatch, ...]:
        self.clock.now = self.clock.now if at is None else at
        return self.scheduler.next(VIEW).dispatches


def test_a_busy_engine_whose_group_comes_often_is_worth_waiting_for_and_the_window_ends_it() -> None:
    scene = Scene(window=0.03)
    assert scene.add(waiting("member", "abc", 0.0001)) == []
    assert scene.scheduler.held == 1
    assert scene.ask(at=0.03) == ()
    (dispatch,) = scene.ask(at=0.0302)
    assert (dispatch.request.id, dispatch.flush_reason) == ("member", FlushReason.WINDOW)
    assert dispatch.held == pytest.approx(0.03, abs=0.001)
    assert dispatch.group is not None


@pytest.mark.parametrize(
    ("scene", "at"),
    [
        pytest.param({"cascade": False}, 0.001, id="an engine that reads the prefix for each"),
        pytest.param({"busy": False}, 0.001, id="an engine with room"),
        pytest.param({}, 5.0, id="company that comes seldom"),
    ],
)
def test_nobody_is_held_where_company_would_not_pay(scene: dict[str, bool], at: float) -> None:
    made = Scene(**scene)
    if at > 1:
        made.scheduler.finished("busy", Used(96, 1, 0))
        made.add(waiting("busy again", "v", at, tokens=96))
    assert made.add(waiting("member", "abc", at)) == ["member"]


def test_an_engine_that_has_room_again_gets_who_was_held() -> None:
    scene = Scene()
    assert scene.add(waiting("member", "abc", 0.001)) == []
    scene.scheduler.first_byte("busy")
    (dispatch,) = scene.ask(at=0.05)
    assert (dispatch.request.id, dispatch.flush_reason) == ("member", FlushReason.NOT_BUSY)
    assert dispatch.held == pytest.approx(0.049)


def test_they_go_when_the_waiting_of_all_costs_more_than_company_brings() -> None:
    scene = Scene()
    for number in range(5):
        assert scene.add(waiting(f"member {number}", f"ab{chr(99 + number)}", 0.0005 * (number + 1))) == []
    for number in range(5, 20):
        if sent := scene.come(waiting(f"member {number}", f"ab{chr(99 + number)}", 0.0005 * (number + 1))):
            assert {dispatch.flush_reason for dispatch in sent if dispatch.held} == {FlushReason.NO_GAIN}
            return
    pytest.fail("the price rises with each member, and the gain does not")


def test_a_group_that_is_full_goes() -> None:
    scene = Scene()
    for number in range(LARGEST_GROUP):
        if sent := scene.come(waiting(f"member {number}", f"ab{chr(200 + number)}", 0.00002 * (number + 1))):
            assert number == LARGEST_GROUP - 2, "the leader is one of them"
            assert {dispatch.flush_reason for dispatch in sent if dispatch.held} == {FlushReason.GROUP_FULL}
            return
    pytest.fail("nobody went")
