"""The bounds that docs/designs/0003-scheduling.md derives: how far shares lag, and how long anybody waits."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheaware_sidecar.scheduling import EngineView, Scheduler, Slots, Terms, Waiting
from cacheaware_sidecar.scheduling.fair_queue import RUN, FairQueue
from cacheaware_sidecar.scheduling.testing import VirtualClock


@given(
    weights=st.lists(st.integers(1, 20), min_size=2, max_size=4),
    costs=st.lists(st.lists(st.floats(1, 500), min_size=40, max_size=40), min_size=4, max_size=4),
    credit=st.sampled_from([0.0, 100.0, 1000.0]),
    urgent=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_backlogged_shares_lag_by_a_request_and_the_credit_at_most(
    weights: list[int], costs: list[list[float]], credit: float, urgent: int
) -> None:
    """|S(u)/w(u) - S(v)/w(v)| <= credit + L/w(u) + L/w(v), with L the most that a request costs."""
    names = [f"t{number}" for number in range(len(weights))]
    queue = FairQueue(urgency_credit=credit)
    queue.set_terms({name: Terms(weight) for name, weight in zip(names, weights, strict=True)})
    for number, name in enumerate(names):
        for place, cost in enumerate(costs[number]):
            due = 1.5 if number == urgent else None  # one of them is urgent all the time
            queue.push(Waiting(f"{name}-{place}", name, "x", 0.0, cost, deadline=due))
    served = dict.fromkeys(names, 0.0)
    largest = {name: max(costs[number]) for number, name in enumerate(names)}
    while all(queue.waiting(name) for name in names):
        request = queue.peek(1.0)
        assert request is not None
        queue.take(request, request.prompt_tokens)
        served[request.tier] += request.prompt_tokens
        for one, weight in zip(names, weights, strict=True):
            for other, other_weight in zip(names, weights, strict=True):
                lag = served[one] / weight - served[other] / other_weight
                assert lag <= credit + largest[one] / weight + largest[other] / other_weight + 1e-6


@given(effort=st.lists(st.integers(1, 100), min_size=20, max_size=3 * RUN))
@settings(max_examples=100, deadline=None)
def test_the_one_that_is_due_first_is_passed_over_few_times(effort: list[int]) -> None:
    queue = FairQueue(effort=lambda request: effort[int(request.id)])
    for number in range(len(effort)):
        queue.push(Waiting(str(number), "gold", "acme", float(number), 1.0))
    passed_over = 0
    waiting = list(range(len(effort)))
    while (request := queue.peek(0.0)) is not None:
        queue.take(request, 1.0)
        passed_over = 0 if int(request.id) == waiting[0] else passed_over + 1
        waiting.remove(int(request.id))
        assert passed_over < RUN


def test_who_never_gets_to_be_quick_waits_for_others_just_as_long_as_that() -> None:
    """The bound is met, so the property above can fail."""
    queue = FairQueue(effort=lambda request: 9 if request.id == "0" else 1)
    for number in range(2 * RUN):
        queue.push(Waiting(str(number), "gold", "acme", float(number), 1.0))
    order = []
    while (request := queue.peek(0.0)) is not None:
        queue.take(request, 1.0)
        order.append(request.id)
    assert order.index("0") == RUN - 1


def test_quick_prompts_go_first_otherwise() -> None:
    queue = FairQueue(effort=lambda request: -int(request.id))
    for number in range(4):
        queue.push(Waiting(str(number), "gold", "acme", 0.0, 1.0))
    order = []
    while (request := queue.peek(0.0)) is not None:
        queue.take(request, 1.0)
        order.append(request.id)
    assert order == ["3", "2", "1", "0"]


def simulated(
    clock: VirtualClock, scheduler: Scheduler, coming: list[Waiting], seconds_each: float
) -> dict[str, float]:
    """One slot, each request takes as long as it is told. When each one went."""
    went: dict[str, float] = {}
    view = EngineView(Slots(1))
    free_at = 0.0
    inside: str | None = None
    coming = sorted(coming, key=lambda request: request.arrived)
    while coming or scheduler.waiting or inside is not None:
        arrival = coming[0].arrived if coming else float("inf")
        if inside is not None and free_at <= arrival:
            clock.now = free_at
            scheduler.finished(inside)
            inside = None
        elif coming:
            clock.now = arrival
            scheduler.add(coming.pop(0))
        for dispatch in scheduler.next(view).dispatches:
            inside, free_at = dispatch.request.id, clock.now + seconds_each
            went[inside] = clock.now
    return went


def test_a_tier_with_a_twentieth_of_the_load_waits_no_longer_than_it_was_promised() -> None:
    """95 % of the load is of the high tier and more than the engine can do, for ten minutes."""
    clock, rng = VirtualClock(), random.Random(7)
    scheduler = Scheduler({"high": Terms(4, 100), "low": Terms(1, 0)}, clock)
    promise = {"high": 1.0, "low": 10.0}
    coming = []
    for number in range(6000):
        tier = "low" if rng.random() < 0.05 else "high"
        at = rng.uniform(0, 600)
        coming.append(Waiting(f"{tier}-{number}", tier, "acme", at, 1000.0, deadline=at + promise[tier]))
    went = simulated(clock, scheduler, coming, seconds_each=0.125)  # 8 a second; 10 come
    waits = [went[request.id] - request.arrived for request in coming if request.tier == "low"]
    assert max(waits) <= promise["low"]
    backlogged = [went[request.id] - request.arrived for request in coming if request.tier == "high"]
    assert max(backlogged) > 30, "the engine was overloaded, or this shows nothing"


def test_a_flooder_delays_quiet_tenants_by_one_request_each() -> None:
    clock = VirtualClock()
    scheduler = Scheduler({"gold": Terms()}, clock)
    flood = [Waiting(f"flood-{n}", "gold", "loud", 0.0, 1000.0) for n in range(1000)]
    quiet = [Waiting(f"quiet-{t}-{n}", "gold", f"t{t}", 1.0 + n, 1000.0) for t in range(9) for n in range(20)]
    went = simulated(clock, scheduler, flood + quiet, seconds_each=0.05)
    # ten tenants: at most every other one goes before, and the one that is inside
    assert max(went[r.id] - r.arrived for r in quiet) <= 11 * 0.05 + 1e-9


@pytest.mark.parametrize(("high", "low"), [pytest.param(4, 1, id="4:1"), pytest.param(1000, 1, id="1000:1")])
def test_every_weight_gets_its_share(high: int, low: int) -> None:
    clock = VirtualClock()
    scheduler = Scheduler({"high": Terms(high), "low": Terms(low)}, clock)
    coming = [Waiting(f"{t}-{n}", t, "acme", 0.0, 10.0) for t in ("high", "low") for n in range(3000)]
    went = simulated(clock, scheduler, coming, seconds_each=1.0)
    first = sorted(went, key=went.__getitem__)[:2002]
    shares = Counter(name.split("-")[0] for name in first)
    assert shares["low"] == pytest.approx(2002 * low / (high + low), abs=2)
