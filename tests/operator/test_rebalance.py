"""The rebalancer: what holds whatever is read, when it moves and when it does not, and what it says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cacheaware_api import defaults, wire
from cacheaware_api.conditions import ConditionStatus, ConditionType, Reason
from cacheaware_api.defaults import RebalancingMode
from cacheaware_operator.hit_worth import LEAST_URGENCY, MOST_URGENCY, hit_worth
from cacheaware_operator.readings import Readings, ReplicaReading, TierReading
from cacheaware_operator.rebalance import (
    DISTRUST_EPOCHS,
    LEARNING_EPOCHS,
    LEAST_REFERENCES,
    MOST_FAILURES,
    REVERSAL_EPOCHS,
    decide,
)
from cacheaware_operator.rebalance_terms import Terms
from cacheaware_operator.rebalance_values import Decision, MoveReason, Skip, State
from cacheaware_operator.reuse_curves import ReuseCounts
from cacheaware_operator.reuse_memory import Memory, remembered
from cacheaware_operator.share_search import total_worth
from cacheaware_operator.testing_rebalance import CurvePool, loop, terms, tier, traffic

GOLD_NEEDS_MORE = {"gold": traffic(2000, 2000), "bronze": traffic(2000, 100)}
BRONZE_NEEDS_MORE = {"gold": traffic(2000, 100), "bronze": traffic(2000, 2000)}
TWO = terms(tier("gold", 50), tier("bronze", 50))


def run(pool: CurvePool, flow: Mapping[str, ReuseCounts], epochs: int) -> list[Decision]:
    return [pool.epoch(flow) for _ in range(epochs)]


def learned(wanted: Terms = TWO, **pool: object) -> CurvePool:
    """A pool past its first epochs, with no reason to move so far."""
    made = CurvePool(wanted, **pool)  # type: ignore[arg-type]  # the fields of CurvePool
    run(made, {each.name: traffic(2000, 10) for each in wanted.tiers}, LEARNING_EPOCHS + 3)
    assert made.shares == wanted.nominal
    return made


# -- whatever is read --------------------------------------------------------------------------------------------------

NAMES = ("gold", "silver", "bronze", "spot")
FLOWS = st.one_of(
    st.builds(traffic, st.floats(0, 5000), st.floats(1, 10_000), repeats=st.floats(0, 1)),
    st.builds(loop, st.floats(0, 5000), st.floats(1, 3000)),
)


@st.composite
def any_terms(draw: st.DrawFn) -> Terms:
    tiers, left = [], 100 - draw(st.sampled_from([0, 0, 10]))  # the public share
    for name in NAMES[: draw(st.integers(2, 4))]:
        nominal = draw(st.integers(0, left))
        left -= nominal
        tiers.append(
            tier(
                name,
                nominal,
                weight=draw(st.sampled_from([1, 1, 4])),
                guaranteed=draw(st.sampled_from([0, 0, nominal // 2, nominal])),
                limit=draw(st.sampled_from([100, 100, nominal, min(100, nominal + 20)])),
                time_to_first_token=draw(st.sampled_from([None, 1.0])),
            )
        )
    return terms(*tiers, max_step=draw(st.sampled_from([1, 5, 10, 30])), min_gain=draw(st.sampled_from([0, 1, 5])))


class AnyPool(RuleBasedStateMachine):
    """Any traffic, any silence, any edit: what the module promises holds at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = CurvePool(TWO, replicas=("chat-0", "chat-1"))
        self.flow: dict[str, ReuseCounts] = {}
        self.turned: dict[str, tuple[int, bool]] = {}  # tier: epoch and direction of its last move
        self.quiet = 0  # epochs without an acknowledgement

    @rule(flows=st.lists(FLOWS, min_size=4, max_size=4))
    def change_traffic(self, flows: list[ReuseCounts]) -> None:
        self.flow = dict(zip(NAMES, flows, strict=True))

    @rule(held=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 1000)))
    def hold(self, held: dict[str, int]) -> None:
        self.pool.held = held

    @rule(seconds=st.dictionaries(st.sampled_from(NAMES), st.floats(0, 20)))
    def be_slow(self, seconds: dict[str, float]) -> None:
        self.pool.first_token_p95 = seconds

    @rule(pace=st.dictionaries(st.sampled_from(NAMES), st.floats(0.001, 0.1)))
    def cost(self, pace: dict[str, float]) -> None:
        self.pool.pace = pace

    @rule(honest=st.booleans())
    def disappoint(self, honest: bool) -> None:
        self.pool.honest = honest

    @rule(silent=st.sets(st.sampled_from(["chat-0", "chat-1"])))
    def fall_silent(self, silent: set[str]) -> None:
        self.pool.silent = silent

    @rule(replicas=st.sets(st.sampled_from(["chat-0", "chat-1", "chat-2"])))
    def scale(self, replicas: set[str]) -> None:
        self.pool.replicas = tuple(sorted(replicas))

    @rule(wanted=any_terms(), mode=st.sampled_from([*RebalancingMode, RebalancingMode.AUTO]))
    def edit(self, wanted: Terms, mode: RebalancingMode) -> None:
        self.pool.terms = dataclasses.replace(wanted, mode=mode)
        decision = self.pool.epoch(self.flow)
        assert decision.moves == () or mode is not RebalancingMode.OFF
        self.turned = {}

    @rule(acknowledged=st.booleans())
    def pass_one(self, acknowledged: bool) -> None:
        self._epoch(acknowledged)

    @rule(count=st.integers(2, 12))
    def pass_many(self, count: int) -> None:
        for _ in range(count):
            self._epoch(True)

    def _epoch(self, acknowledged: bool) -> None:
        pool = self.pool
        before, was_acknowledged = pool.shares, acknowledged or pool.readings().acknowledged
        hurried = pool.state.hurries and pool.state.learned < LEARNING_EPOCHS
        decision = pool.epoch({name: self.flow[name] for name in self.flow}, acknowledged=acknowledged)
        after, epoch = decision.effective, decision.state.epoch
        grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}

        told = dict(before)
        for move in decision.moves:
            assert move.percent > 0
            told[move.from_] -= move.percent
            told[move.to] += move.percent
        if decision.skipped is None:
            assert told == after
            assert decision.moves
        else:
            assert not grown
            assert bool(decision.moves) == (decision.skipped is Skip.DRY_RUN)
        if pool.terms.mode is not RebalancingMode.AUTO or not was_acknowledged:
            assert not grown
        if grown and not hurried:
            assert sum(max(0, change) for change in grown.values()) <= pool.terms.max_step_percent
        for name, change in grown.items():
            held = -(-100 * pool.held.get(name, 0) // pool.capacity)
            assert change > 0 or after[name] >= min(before[name], held)
            if name in self.turned and self.turned[name][1] != (change > 0):
                assert epoch - self.turned[name][0] > REVERSAL_EPOCHS
            self.turned[name] = (epoch, change > 0)
        if any(move.reason is not MoveReason.PREDICTIONS_FAILED for move in decision.moves):
            worth = hit_worth(decision.state.memory, decision.state.urgency, pool.terms).worth
            assert total_worth(worth, told) > total_worth(worth, before)

    @invariant()
    def shares_are_conserved_and_within_their_bounds(self) -> None:
        shares, wanted = self.pool.shares, self.pool.terms
        assert sum(shares.values()) == wanted.total <= 100
        for each in wanted.tiers:
            assert each.guaranteed <= shares[each.name] <= each.limit

    @precondition(lambda self: self.pool.silent & set(self.pool.replicas))
    @rule()
    def pass_in_silence(self) -> None:
        """From the third epoch on what is known is too old."""
        if self.pool.terms.mode is RebalancingMode.OFF:
            return
        for _ in range(3):
            decision = self.pool.epoch(self.flow)
        before = self.pool.shares
        decision = self.pool.epoch(self.flow)
        assert decision.skipped is Skip.STALE_METRICS
        assert decision.effective == before
        (condition,) = decision.conditions
        assert (condition.type, condition.status) == (ConditionType.METRICS_FRESH, ConditionStatus.FALSE)


AnyPool.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestWhateverIsRead = AnyPool.TestCase


class TestCalm:
    @settings(max_examples=25, deadline=None)
    @given(any_terms(), st.lists(FLOWS, min_size=4, max_size=4))
    def test_on_traffic_that_does_not_change_shares_settle_and_never_come_back(
        self, wanted: Terms, flows: list[ReuseCounts]
    ) -> None:
        pool = CurvePool(wanted)
        flow = dict(zip(NAMES, flows, strict=True))
        path = [tuple(pool.epoch(flow).effective.values()) for _ in range(100)]
        steps = [shares for shares, before in zip(path[1:], path, strict=False) if shares != before]
        if pool.state.distrusted_until is None:
            assert len(set(steps)) == len(steps)
        assert len(set(path[-15:])) == 1

    def test_small_gains_move_nothing(self) -> None:
        pool = learned()
        decision = run(pool, {"gold": traffic(2000, 500), "bronze": traffic(2000, 480)}, 10)[-1]
        assert decision.skipped is Skip.GAIN_TOO_SMALL
        assert "minGainPercent is 1" in decision.message
        assert pool.shares == TWO.nominal

    def test_a_step_is_no_larger_than_allowed(self) -> None:
        pool = learned()
        before = pool.shares
        for decision in run(pool, GOLD_NEEDS_MORE, 12):
            moved = decision.effective["gold"] - before["gold"]
            assert abs(moved) <= 10
            before = dict(decision.effective)
        assert before["gold"] >= 80

    def test_the_first_epochs_go_the_whole_way(self) -> None:
        pool = CurvePool(TWO)
        decisions = run(pool, GOLD_NEEDS_MORE, 3)
        (move,) = next(decision.moves for decision in decisions if decision.moves)
        assert move.percent > 30

    def test_an_operator_that_starts_again_takes_the_shares_over_and_goes_in_steps(self) -> None:
        pool = CurvePool(TWO)
        run(pool, GOLD_NEEDS_MORE, 8)
        shares = pool.shares
        assert shares != TWO.nominal
        pool.state = State()
        assert pool.epoch(GOLD_NEEDS_MORE).effective == shares
        for decision in run(pool, BRONZE_NEEDS_MORE, 4):
            assert sum(move.percent for move in decision.moves) <= 10

    def test_what_moved_does_not_move_back_at_once(self) -> None:
        pool = learned()
        while not pool.epoch(GOLD_NEEDS_MORE).moves:
            pass
        flood = {"gold": traffic(0, 1), "bronze": traffic(200_000, 2000)}
        spaced = run(pool, flood, REVERSAL_EPOCHS)
        assert [decision.skipped for decision in spaced] == [Skip.REVERSAL_TOO_SOON] * REVERSAL_EPOCHS
        (move,) = pool.epoch(flood).moves
        assert (move.from_, move.to) == ("gold", "bronze")

    def test_a_gain_behind_a_valley_is_told_and_not_walked_into(self) -> None:
        pool = learned(terms(tier("gold", 20), tier("bronze", 80)))
        decision = run(pool, {"gold": loop(9000, 800), "bronze": traffic(2000, 10_000)}, 20)[-1]
        assert decision.skipped is Skip.STEP_TOO_SMALL
        assert "raise maxStepPercent" in decision.message
        assert pool.shares["gold"] <= 20


class TestFloors:
    def test_what_is_not_lent_stays(self) -> None:
        pool = CurvePool(terms(tier("gold", 50, guaranteed=40), tier("bronze", 50)))
        run(pool, BRONZE_NEEDS_MORE, 12)
        assert pool.shares == {"gold": 40, "bronze": 60}

    def test_what_may_not_be_borrowed_is_not_given(self) -> None:
        pool = CurvePool(terms(tier("gold", 50, limit=60), tier("bronze", 50)))
        run(pool, GOLD_NEEDS_MORE, 12)
        assert pool.shares == {"gold": 60, "bronze": 40}

    def test_what_running_requests_hold_stays(self) -> None:
        pool = CurvePool(TWO, held={"bronze": 331})
        run(pool, GOLD_NEEDS_MORE, 12)
        assert pool.shares == {"gold": 66, "bronze": 34}

    def test_a_tier_that_borrows_is_not_given_more_for_it(self) -> None:
        pool = CurvePool(TWO, held={"bronze": 800})
        run(pool, GOLD_NEEDS_MORE, 12)
        assert pool.shares == TWO.nominal


class TestStopAndWait:
    def test_nothing_moves_before_every_replica_has_applied_the_last_move(self) -> None:
        pool = learned(replicas=("chat-0", "chat-1"))
        while not pool.epoch(GOLD_NEEDS_MORE).moves:
            pass
        moved = pool.shares
        pool.acknowledge()
        pool.applied["chat-1"] = wire.Revision("pool-1", 1)
        for _ in range(3):
            decision = pool.epoch(GOLD_NEEDS_MORE, acknowledged=False)
            assert decision.skipped is Skip.NOT_ACKNOWLEDGED
            assert decision.effective == moved
        assert pool.epoch(GOLD_NEEDS_MORE).moves

    def test_a_view_of_somebody_elses_making_is_waited_for_too(self) -> None:
        pool = learned()
        pool.hand_out({"gold": 40, "bronze": 60})
        assert pool.epoch(GOLD_NEEDS_MORE).skipped is Skip.NOT_ACKNOWLEDGED
        assert pool.shares == TWO.nominal

    def test_a_replica_that_is_not_ready_is_not_waited_for(self) -> None:
        pool = learned(replicas=("chat-0", "chat-1"))
        pool.applied["chat-1"] = None
        pool.replicas = ("chat-0",)
        assert any(decision.moves for decision in run(pool, GOLD_NEEDS_MORE, 3))


class TestStaleMetrics:
    def test_freeze_the_shares_and_say_whose_are_missing(self) -> None:
        pool = learned(replicas=("chat-0", "chat-1"))
        pool.silent = {"chat-1"}
        decision = run(pool, GOLD_NEEDS_MORE, 3)[-1]
        assert decision.skipped is Skip.STALE_METRICS
        (condition,) = decision.conditions
        assert (condition.status, condition.reason) == (ConditionStatus.FALSE, Reason.STALE)
        assert "chat-1 (last 90 s ago)" in condition.message
        assert "chat-0" not in condition.message
        frozen = pool.shares
        run(pool, GOLD_NEEDS_MORE, 10)
        assert pool.shares == frozen

    def test_that_come_back_unfreeze_them(self) -> None:
        pool = learned()
        pool.silent = {"chat-0"}
        run(pool, GOLD_NEEDS_MORE, 5)
        pool.silent = set()
        decisions = run(pool, GOLD_NEEDS_MORE, 3)
        assert any(decision.moves for decision in decisions)
        assert decisions[-1].conditions[0].status is ConditionStatus.TRUE

    def test_of_a_replica_that_never_told_any_say_why(self) -> None:
        readings = Readings(ready=("chat-0",), problems={"chat-0": "its engine has not told its accounts"})
        decision = decide(State(), readings, TWO, 0.0)
        assert decision.skipped is Skip.STALE_METRICS
        assert "chat-0 (its engine has not told its accounts)" in decision.message

    def test_without_replicas_are_not_called_stale(self) -> None:
        decision = decide(State(), Readings(), TWO, 0.0)
        assert decision.skipped is Skip.NO_REPLICAS
        assert decision.conditions == ()
        assert decision.effective == TWO.nominal


class TestModes:
    def test_dry_run_tells_moves_and_makes_none(self) -> None:
        pool = CurvePool(terms(tier("gold", 50), tier("bronze", 50), mode=RebalancingMode.DRY_RUN))
        decisions = run(pool, GOLD_NEEDS_MORE, 10)
        assert all(decision.effective == TWO.nominal for decision in decisions)
        assert decisions[-1].skipped is Skip.DRY_RUN
        (move,) = decisions[-1].moves
        assert (move.from_, move.to) == ("bronze", "gold")

    def test_from_auto_to_dry_run_shares_stay_where_they_are(self) -> None:
        pool = CurvePool(TWO)
        run(pool, GOLD_NEEDS_MORE, 8)
        moved = pool.shares
        pool.terms = dataclasses.replace(TWO, mode=RebalancingMode.DRY_RUN)
        run(pool, BRONZE_NEEDS_MORE, 8)
        assert pool.shares == moved != TWO.nominal

    def test_off_means_nominal_and_forgets(self) -> None:
        pool = CurvePool(TWO)
        run(pool, GOLD_NEEDS_MORE, 8)
        assert pool.shares != TWO.nominal
        pool.terms = dataclasses.replace(TWO, mode=RebalancingMode.OFF)
        decision = pool.epoch(GOLD_NEEDS_MORE)
        assert decision.skipped is Skip.OFF
        assert decision.effective == TWO.nominal
        assert decision.state == State()


class TestEdits:
    def test_count_at_once_and_keep_the_distance_from_nominal(self) -> None:
        pool = CurvePool(TWO)
        run(pool, GOLD_NEEDS_MORE, 10)
        above = pool.shares["gold"] - 50
        assert above > 10
        pool.terms = terms(tier("gold", 30), tier("bronze", 60))
        decision = pool.epoch(GOLD_NEEDS_MORE)
        assert decision.effective == {"gold": 30 + above, "bronze": 60 - above}
        assert decision.skipped is Skip.NOT_ACKNOWLEDGED

    def test_of_bounds_are_obeyed_at_once(self) -> None:
        pool = CurvePool(TWO)
        run(pool, GOLD_NEEDS_MORE, 10)
        pool.terms = terms(tier("gold", 50), tier("bronze", 50, guaranteed=45))
        assert pool.epoch(GOLD_NEEDS_MORE).effective == {"gold": 55, "bronze": 45}

    def test_that_add_a_tier_give_it_its_nominal_share(self) -> None:
        pool = CurvePool(terms(tier("gold", 40), tier("bronze", 40)))
        run(pool, {name: traffic(2000, 10) for name in ("gold", "bronze")}, 3)
        pool.terms = terms(tier("gold", 40), tier("bronze", 40), tier("silver", 20))
        assert pool.epoch({}).effective == {"gold": 40, "bronze": 40, "silver": 20}


class TestWorth:
    def test_few_references_are_no_reason(self) -> None:
        pool = CurvePool(TWO)
        few = {"gold": traffic(LEAST_REFERENCES / 20, 2000), "bronze": traffic(LEAST_REFERENCES / 20, 10)}
        assert {decision.skipped for decision in run(pool, few, 5)} == {Skip.LEARNING}

    @pytest.mark.parametrize(
        ("weights", "pace", "richer"),
        [
            pytest.param((4, 1), {}, "gold", id="weight"),
            pytest.param((1, 4), {}, "bronze", id="the other weight"),
            pytest.param((1, 1), {"gold": 0.04, "bronze": 0.01}, "gold", id="what a block costs"),
            pytest.param((1, 4), {"gold": 0.16, "bronze": 0.01}, "gold", id="both"),
            pytest.param((4, 1), {"bronze": 0.01}, "gold", id="a cost that is not known is the others'"),
        ],
    )
    def test_of_tiers_that_are_alike_the_worthier_gets_more(
        self, weights: tuple[int, int], pace: dict[str, float], richer: str
    ) -> None:
        pool = CurvePool(terms(tier("gold", 50, weight=weights[0]), tier("bronze", 50, weight=weights[1])), pace=pace)
        run(pool, {"gold": traffic(2000, 2000), "bronze": traffic(2000, 2000)}, 10)
        assert max(pool.shares, key=lambda name: pool.shares[name]) == richer
        assert pool.shares[richer] > 60

    def test_a_missed_promise_makes_hits_worth_more_within_bounds(self) -> None:
        wanted = terms(tier("gold", 50, time_to_first_token=1.0), tier("bronze", 50, time_to_first_token=1.0))
        pool = learned(wanted, first_token_p95={"gold": 1.0, "bronze": 1.0})
        alike = {"gold": traffic(2000, 2000), "bronze": traffic(2000, 2000)}
        assert not any(decision.moves for decision in run(pool, alike, 5))
        pool.first_token_p95 = {"gold": 3.0, "bronze": 0.1}
        decisions = run(pool, alike, 30)
        moves = [move for decision in decisions for move in decision.moves]
        assert {(move.from_, move.to, move.reason) for move in moves} == {("bronze", "gold", MoveReason.SLA_MISSED)}
        assert "gold misses its time to first token" in moves[0].why
        assert decisions[-1].state.urgency == {"gold": MOST_URGENCY, "bronze": LEAST_URGENCY}

    def test_without_a_promise_nothing_is_urgent(self) -> None:
        pool = learned(first_token_p95={"gold": 100.0})
        assert pool.state.urgency == {"gold": 1.0, "bronze": 1.0}

    def test_every_replica_counts_with_its_own_capacity(self) -> None:
        pool = CurvePool(TWO, replicas=("chat-0", "chat-1", "chat-2"))
        decisions = run(pool, GOLD_NEEDS_MORE, 4)
        memory = decisions[-1].state.memory
        one = dataclasses.replace(memory, replicas={"chat-0": memory.replicas["chat-0"]})
        assert memory.hits("gold") == pytest.approx([3 * each for each in one.hits("gold")])


class TestMemory:
    def _reading(self, at: float, references: float, hits: int = 0, queries: int = 0) -> Readings:
        figures = TierReading(traffic(references, 100), hit_tokens=hits, query_tokens=queries)
        return Readings(ready=("chat-0",), replicas=(ReplicaReading("chat-0", at, 1000, None, {"gold": figures}),))

    def _after(self, *readings: Readings) -> Memory:
        memory = Memory()
        for each in readings:
            memory = remembered(memory, each, frozenset({"gold"}))
        return memory

    def test_begins_with_what_comes_after_the_first_look(self) -> None:
        assert self._after(self._reading(0, 5000)).references("gold") == 0
        assert self._after(self._reading(0, 5000), self._reading(30, 5600)).references("gold") == pytest.approx(600)

    def test_fades_by_a_fifth_in_half_a_minute(self) -> None:
        memory = self._after(self._reading(0, 0), self._reading(30, 1000, 80, 100), self._reading(60, 1000, 80, 100))
        assert memory.references("gold") == pytest.approx(800)
        assert memory.hit_ratio("gold") == pytest.approx(0.8)

    def test_takes_nothing_from_a_reading_older_than_the_last(self) -> None:
        memory = self._after(self._reading(0, 0), self._reading(60, 1000))
        assert remembered(memory, self._reading(30, 500), frozenset({"gold"})) == memory

    def test_counts_a_sidecar_and_an_engine_that_started_anew_from_zero(self) -> None:
        memory = self._after(self._reading(0, 5000, 4000, 5000), self._reading(30, 300, 10, 40))
        assert memory.references("gold") == pytest.approx(300)
        assert memory.hit_ratio("gold") == pytest.approx(0.25)

    def test_of_a_time_alone_is_what_was_counted_in_it(self) -> None:
        early = self._after(self._reading(0, 0), self._reading(30, 1000, 100, 100))
        late = remembered(early, self._reading(60, 1500, 100, 200), frozenset({"gold"}))
        assert late.since(early).references("gold") == pytest.approx(500)
        assert late.since(early).hit_ratio("gold") == pytest.approx(0)

    def test_forgets_replicas_and_tiers_that_are_gone(self) -> None:
        memory = self._after(self._reading(0, 0), self._reading(30, 1000))
        assert remembered(memory, Readings(), frozenset({"gold"})) == Memory()
        assert remembered(memory, self._reading(60, 1000), frozenset()).references("gold") == 0


class TestWhatItSays:
    def test_of_a_move(self) -> None:
        pool = learned()
        decision = next(decision for decision in run(pool, GOLD_NEEDS_MORE, 5) if decision.moves)
        (move,) = decision.moves
        assert (move.from_, move.to, move.reason) == ("bronze", "gold", MoveReason.MORE_HITS)
        assert 0 < move.percent <= 10
        assert move.gain_percent is not None
        assert move.gain_percent > 0
        assert move.why.startswith(f"gold gains more by {move.percent} % than bronze loses: {move.gain_percent:.1f} %")
        assert len(move.why) <= 256

    @pytest.mark.parametrize("missed", [pytest.param(0.0, id="exact"), pytest.param(0.2, id="always off by as much")])
    def test_of_what_became_of_it(self, missed: float) -> None:
        pool = learned(dataclasses.replace(TWO, mode=RebalancingMode.DRY_RUN), missed=missed)
        run(pool, GOLD_NEEDS_MORE, 25)
        pool.terms = TWO
        verdicts = [decision.verdict for decision in run(pool, GOLD_NEEDS_MORE, 25) if decision.verdict]
        assert verdicts
        for verdict in verdicts:
            assert verdict.predicted_percent > TWO.min_gain_percent
            assert verdict.expected_percent == pytest.approx(verdict.predicted_percent, rel=0.05)
            assert verdict.realised_percent == pytest.approx(verdict.expected_percent, rel=0.05)

    def test_of_moves_that_followed_traffic_which_had_changed(self) -> None:
        pool = learned()
        verdicts = [decision.verdict for decision in run(pool, GOLD_NEEDS_MORE, 25) if decision.verdict]
        assert verdicts
        assert not any(verdict.failed for verdict in verdicts)

    def test_nothing_of_moves_that_the_traffic_has_overtaken(self) -> None:
        """Gold was given more and needs it no longer: whatever hits do now, the move is not to blame."""
        pool = learned()
        while not pool.epoch(GOLD_NEEDS_MORE).moves:
            pass
        pool.terms = dataclasses.replace(TWO, mode=RebalancingMode.DRY_RUN)  # so that it stays as it is
        decisions = run(pool, BRONZE_NEEDS_MORE, 6)
        assert decisions[-1].state.trial is None
        assert [decision.verdict for decision in decisions] == [None] * 6


class TestPredictionsThatFail:
    def _lose_trust(self) -> tuple[CurvePool, Decision]:
        """Traffic that turns again and again, and hits that fall where they should rise."""
        pool = learned(honest=False)
        flow, other = GOLD_NEEDS_MORE, BRONZE_NEEDS_MORE
        for _ in range(200):
            decision = pool.epoch(flow)
            if decision.verdict is not None:
                flow, other = other, flow
            if decision.state.distrusted_until is not None:
                return pool, decision
        raise AssertionError("trust was never lost")

    def test_lead_back_to_nominal_in_steps_and_to_a_pause(self) -> None:
        pool, decision = self._lose_trust()
        assert decision.state.failures == MOST_FAILURES
        decisions = [decision, *run(pool, GOLD_NEEDS_MORE, DISTRUST_EPOCHS - 1)]
        moves = [move for each in decisions for move in each.moves]
        assert all(move.reason is MoveReason.PREDICTIONS_FAILED and move.percent <= 10 for move in moves)
        assert decisions[-1].skipped is Skip.PREDICTIONS_FAILED
        assert pool.shares == TWO.nominal

    def test_are_forgiven_after_a_while(self) -> None:
        pool, _ = self._lose_trust()
        pool.honest = True
        decisions = run(pool, GOLD_NEEDS_MORE, DISTRUST_EPOCHS + 5)
        assert decisions[-1].state.distrusted_until is None
        assert decisions[-1].state.failures == 0
        assert pool.shares["gold"] > 50

    def test_are_not_told_from_traffic_that_stopped(self) -> None:
        pool = learned()
        while not pool.epoch(GOLD_NEEDS_MORE).moves:
            pass
        decisions = run(pool, {}, 8)
        assert [decision.verdict for decision in decisions] == [None] * 8
        assert decisions[-1].state.trial is None
        assert decisions[-1].state.failures == 0


def test_the_defaults_of_the_object_are_those_tested_here() -> None:
    assert (TWO.max_step_percent, TWO.min_gain_percent) == (
        defaults.REBALANCING_MAX_STEP_PERCENT,
        defaults.REBALANCING_MIN_GAIN_PERCENT,
    )
