"""Order: weights under backlog, deadlines inside a share, half a promise gone goes first, and nothing is ever lost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cacheaware_sidecar.scheduling import Terms, Waiting
from cacheaware_sidecar.scheduling.fair_queue import RUN, Effort, FairQueue

GOLD, SILVER, BRONZE = "gold", "silver", "bronze"
TERMS = {GOLD: Terms(4, 100), SILVER: Terms(2, 50), BRONZE: Terms(1, 0)}


def queue_of(
    *requests: Waiting, terms: dict[str, Terms] = TERMS, credit: float = 0.0, effort: Effort | None = None
) -> FairQueue:
    queue = FairQueue(urgency_credit=credit, effort=effort)
    queue.set_terms(terms)
    for request in requests:
        queue.push(request)
    return queue


def waiting(
    name: str, tier: str = GOLD, tenant: str = "acme", at: float = 0.0, cost: float = 1.0, due: float | None = None
) -> Waiting:
    return Waiting(name, tier, tenant, arrived=at, prompt_tokens=cost, deadline=due)


def pop(queue: FairQueue, now: float = 0.0, closed: Collection[str] = ()) -> Waiting | None:
    request = queue.peek(now, closed)
    if request is not None:
        queue.take(request, request.prompt_tokens, closed)
    return request


def drained(queue: FairQueue, now: float = 0.0, most: float = math.inf) -> list[str]:
    names: list[str] = []
    while len(names) < most and (request := pop(queue, now)) is not None:
        names.append(request.id)
    return names


class TestShares:
    @pytest.mark.parametrize(
        ("weights", "costs"),
        [
            pytest.param({GOLD: 4, BRONZE: 1}, {GOLD: 10.0, BRONZE: 10.0}, id="4:1, equal requests"),
            pytest.param({GOLD: 4, BRONZE: 1}, {GOLD: 3.0, BRONZE: 50.0}, id="4:1, the light tier sends large ones"),
            pytest.param({GOLD: 1, SILVER: 1, BRONZE: 1}, {GOLD: 1.0, SILVER: 7.0, BRONZE: 30.0}, id="equal"),
            pytest.param({GOLD: 1000, BRONZE: 1}, {GOLD: 5.0, BRONZE: 5.0}, id="1000:1"),
        ],
    )
    def test_backlogged_tiers_get_work_in_the_ratio_of_their_weights(
        self, weights: dict[str, int], costs: dict[str, float]
    ) -> None:
        terms = {name: Terms(weight) for name, weight in weights.items()}
        queue = queue_of(terms=terms)
        for number in range(3000):
            for tier in weights:
                queue.push(waiting(f"{tier}-{number}", tier, cost=costs[tier]))
        served: Counter[str] = Counter()
        for _ in range(2500):
            request = pop(queue)
            assert request is not None
            served[request.tier] += 1
            # the lag between two shares is at most one request of each, at every moment
            for one in weights:
                for two in weights:
                    lag = served[one] * costs[one] / weights[one] - served[two] * costs[two] / weights[two]
                    assert lag <= costs[one] / weights[one] + 1e-6

    def test_tenants_of_a_tier_share_it_equally_whatever_they_send(self) -> None:
        queue = queue_of(*(waiting(f"flood-{n}", tenant="loud") for n in range(100)))
        for number in range(3):
            queue.push(waiting(f"quiet-{number}", tenant="quiet", at=1.0))
        first = drained(queue, most=6)
        assert sum(name.startswith("quiet") for name in first) == 3

    def test_a_share_that_was_away_saves_nothing_up(self) -> None:
        queue = queue_of(*(waiting(f"gold-{n}") for n in range(200)))
        drained(queue, most=100)
        for number in range(100):
            queue.push(waiting(f"bronze-{number}", BRONZE))
        mixed = drained(queue, most=50)
        assert sum(name.startswith("bronze") for name in mixed) == pytest.approx(10, abs=1)

    def test_a_request_that_cost_less_than_expected_gets_the_difference_back(self) -> None:
        terms = {GOLD: Terms(1), BRONZE: Terms(1)}
        queue = queue_of(*(waiting(f"{tier}-{n}", tier, cost=100.0) for tier in terms for n in range(10)), terms=terms)
        first = pop(queue)
        assert first is not None
        queue.charge(first.tier, first.tenant, -99.0)
        again = pop(queue)
        assert again is not None
        assert again.tier != first.tier  # 1 against 0
        third = pop(queue)
        assert third is not None
        assert third.tier == first.tier  # 1 against 100

    def test_what_is_given_back_does_not_overtake_who_came_meanwhile(self) -> None:
        queue = queue_of(waiting("b-0", BRONZE, cost=100.0))
        assert drained(queue) == ["b-0"]
        queue.push(waiting("b-1", BRONZE))
        queue.push(waiting("g-0", GOLD))
        queue.charge(BRONZE, "acme", -99.0)
        assert drained(queue) == ["g-0", "b-1"]

    def test_priority_breaks_ties(self) -> None:
        terms = {BRONZE: Terms(1, 0), GOLD: Terms(1, 100)}
        assert drained(queue_of(waiting("b", BRONZE), waiting("g", GOLD), terms=terms)) == ["g", "b"]

    def test_only_eligible_tiers_are_picked(self) -> None:
        queue = queue_of(waiting("g", GOLD), waiting("b", BRONZE))
        request = pop(queue, closed={GOLD})
        assert request is not None
        assert request.id == "b"
        assert pop(queue, closed={GOLD}) is None
        assert len(queue) == 1


class TestDeadlines:
    def test_two_deadlines_reorder(self) -> None:
        assert drained(queue_of(waiting("late", due=10.0), waiting("soon", due=5.0))) == ["soon", "late"]

    def test_equal_deadlines_keep_the_order_of_arrival(self) -> None:
        assert drained(queue_of(*(waiting(str(n), due=5.0) for n in range(5)))) == ["0", "1", "2", "3", "4"]

    def test_no_promise_comes_after_every_promise(self) -> None:
        assert drained(queue_of(waiting("whenever"), waiting("soon", at=1.0, due=50.0))) == ["soon", "whenever"]

    def test_half_of_a_promise_gone_goes_before_the_shares(self) -> None:
        requests = (waiting("gold", GOLD), waiting("bronze", BRONZE, due=10.0))
        assert drained(queue_of(*requests, credit=100.0), now=4.9)[0] == "gold"
        assert drained(queue_of(*requests, credit=100.0), now=5.0)[0] == "bronze"

    def test_among_urgent_requests_the_nearest_deadline_goes_first(self) -> None:
        queue = queue_of(waiting("g", GOLD, at=5.0, due=9.0), waiting("b", BRONZE, due=8.0), credit=100.0)
        assert drained(queue, now=7.9) == ["b", "g"]

    @pytest.mark.parametrize(
        ("gold_due", "order"),
        [
            pytest.param(11.0, ["b", "g"], id="due later"),
            pytest.param(9.0, ["g", "b"], id="due earlier: it is its turn anyway"),
            pytest.param(5.5, ["b", "g"], id="late already: of the two only the other can be kept"),
            pytest.param(None, ["b", "g"], id="nothing was promised"),
        ],
    )
    def test_an_urgent_request_overtakes_the_one_whose_turn_it_is_where_that_one(
        self, gold_due: float | None, order: list[str]
    ) -> None:
        queue = queue_of(
            waiting("g", GOLD, at=5.0, due=gold_due), waiting("b", BRONZE, at=0.0, due=10.0), credit=100.0
        )  # fmt: skip
        assert drained(queue, now=6.0) == order

    def test_what_is_late_is_urgent_no_more(self) -> None:
        queue = queue_of(waiting("g", GOLD), waiting("late", BRONZE, due=5.0), credit=100.0)
        assert drained(queue, now=5.1) == ["g", "late"]

    def test_what_can_still_be_kept_goes_before_what_is_late(self) -> None:
        queue = queue_of(waiting("late", due=4.0), waiting("soon", due=6.0), waiting("far", due=60.0), credit=100.0)
        assert drained(queue, now=5.0) == ["soon", "late", "far"]

    def test_what_is_late_is_passed_over_few_times(self) -> None:
        in_time = [waiting(f"in-time-{n}", due=6.0) for n in range(2 * RUN)]
        names = drained(queue_of(waiting("late", due=4.0), *in_time, credit=1e9), now=5.0)
        assert names.index("late") == RUN - 1

    @pytest.mark.parametrize("many", [3, 100])
    def test_who_is_late_hides_nobody_who_can_still_be_kept(self, many: int) -> None:
        late = [waiting(f"late-{n}", tenant=f"late-{n}", due=4.0 + n / 1000) for n in range(many)]
        soon = waiting("soon", BRONZE, "other", due=6.0)
        also = waiting("also", GOLD, "other", due=7.0)
        assert drained(queue_of(*late, also, soon, credit=100.0), now=5.0, most=2) == ["soon", "also"]

    def test_among_the_urgent_of_a_tenant_quick_ones_go_first(self) -> None:
        requests = [waiting("slow", due=8.0), waiting("quick", due=9.0), waiting("quickest, in no hurry", due=50.0)]
        effort = {"slow": 10, "quick": 7, "quickest, in no hurry": 1}
        queue = queue_of(*requests, credit=100.0, effort=lambda request: effort[request.id])
        assert drained(queue, now=7.0) == ["quick", "slow", "quickest, in no hurry"]

    def test_of_equally_quick_ones_the_one_due_first_goes(self) -> None:
        requests = [waiting(str(number), due=float(number)) for number in range(100, 110)]
        assert drained(queue_of(*requests, effort=lambda request: 5)) == [request.id for request in requests]

    def test_urgency_does_not_let_a_tier_own_the_engine(self) -> None:
        queue = queue_of(*(waiting(f"b-{n}", BRONZE, due=150.0) for n in range(1000)), credit=20.0)
        for number in range(1000):
            queue.push(waiting(f"g-{number}", GOLD))
        served = drained(queue, now=100.0, most=500)
        assert all(name.startswith("b") for name in served[:20])  # the credit
        assert sum(name.startswith("b") for name in served) == pytest.approx(100 + 16, abs=2)  # then its fifth

    def test_urgency_does_not_let_a_tenant_own_its_tier(self) -> None:
        queue = queue_of(*(waiting(f"loud-{n}", tenant="loud", due=90.0) for n in range(100)), credit=5.0)
        for number in range(3):
            queue.push(waiting(f"quiet-{number}", tenant="quiet", at=50.0, due=1000.0))
        assert sum(name.startswith("quiet") for name in drained(queue, now=51.0, most=14)) == 3


def test_a_tier_that_left_the_view_is_still_served() -> None:
    queue = queue_of(waiting("b", BRONZE))
    queue.set_terms({GOLD: Terms()})
    queue.push(waiting("g", GOLD))
    assert sorted(drained(queue)) == ["b", "g"]


def test_once_nobody_waits_nobody_is_owed() -> None:
    queue = queue_of(*(waiting(f"g-{n}", GOLD, cost=100.0) for n in range(10)))
    drained(queue)
    for number in range(4):
        queue.push(waiting(f"b-{number}", BRONZE, cost=100.0))
        queue.push(waiting(f"g-{number}", GOLD, cost=100.0))
    assert drained(queue, most=2) == ["g-0", "b-0"]  # level, so priority first


def test_many_tenants_that_came_once_are_forgotten() -> None:
    queue = queue_of()
    for number in range(5000):
        queue.push(waiting(str(number), tenant=f"tenant-{number}"))
        pop(queue)
    assert len(queue._tiers[GOLD].tenants) < 200


class FairQueueMachine(RuleBasedStateMachine):
    """Whatever comes in leaves once, by `take` or by `remove`, and a pick gives something while anything waits."""

    TIERS = (GOLD, SILVER, BRONZE)

    @initialize(credit=st.sampled_from([0.0, 10.0, 1e9]))
    def start(self, credit: float) -> None:
        self.queue = queue_of(credit=credit)
        self.waiting: dict[str, Waiting] = {}
        self.seen: set[str] = set()
        self.now = 0.0
        self.number = 0

    @rule(
        tier=st.sampled_from(TIERS),
        tenant=st.sampled_from(["a", "b", "c"]),
        cost=st.floats(0.1, 100),
        promise=st.none() | st.floats(0.01, 20),
    )
    def push(self, tier: str, tenant: str, cost: float, promise: float | None) -> None:
        self.number += 1
        due = None if promise is None else self.now + promise
        request = Waiting(str(self.number), tier, tenant, self.now, cost, deadline=due)
        self.queue.push(request)
        self.waiting[request.id] = request

    @rule(count=st.integers(1, 5), only=st.none() | st.sampled_from(TIERS))
    def pop(self, count: int, only: str | None) -> None:
        for _ in range(count):
            candidates = {r.tier for r in self.waiting.values() if only in (None, r.tier)}
            request = pop(self.queue, self.now, () if only is None else set(self.TIERS) - {only})
            assert (request is None) == (not candidates), "the queue stopped while something eligible waited"
            if request is None:
                return
            assert request == self.waiting.pop(request.id), "what came out had not come in, or came out twice"
            assert request.tier in candidates
            same_share = [r for r in self.waiting.values() if (r.tier, r.tenant) == (request.tier, request.tenant)]
            in_time = [r for r in same_share if r.due >= self.now]
            assert all(r.due >= request.due for r in in_time), "it was passed over by one that is due later"

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.queue.remove(request_id) is True
        assert self.queue.remove(request_id) is False
        del self.waiting[request_id]

    @rule(tier=st.sampled_from(TIERS), tenant=st.sampled_from(["a", "zz"]), cost=st.floats(-50, 50))
    def charge(self, tier: str, tenant: str, cost: float) -> None:
        self.queue.charge(tier, tenant, cost)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(weights=st.dictionaries(st.sampled_from(TIERS), st.integers(1, 100)))
    def change_the_view(self, weights: dict[str, int]) -> None:
        self.queue.set_terms({name: Terms(weight) for name, weight in weights.items()})

    @invariant()
    def counts_agree(self) -> None:
        self.queue.check_integrity()
        assert len(self.queue) == len(self.waiting)
        for tier in self.TIERS:
            mine = [request for request in self.waiting.values() if request.tier == tier]
            assert self.queue.waiting(tier) == len(mine)


TestFairQueueMachine = FairQueueMachine.TestCase
TestFairQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
