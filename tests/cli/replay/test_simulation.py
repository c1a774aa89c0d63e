"""Whole runs in virtual time: what each policy makes of the same requests."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from cacheaware.replay.comparison import BASELINES, Comparison, compare
from cacheaware.replay.engine_cost import EngineCost
from cacheaware.replay.fairness import largest_lag
from cacheaware.replay.measures import unique_tokens
from cacheaware.replay.policies import PolicyName
from cacheaware.replay.requests import Mapped, Request, merged
from cacheaware.replay.simulation import Outcome, Setup, Simulation
from cacheaware.replay.virtual_operator import view_of
from cacheaware.replay.workloads import Scale, workload
from cacheaware_api.v1alpha1 import CacheAwarePoolSpec, parse_spec
from cacheaware_operator.rebalance_terms import terms_of

COST = EngineCost(1e-3, 2e-3, 5e-5, 0, 1e-8, max_batched_tokens=512, max_sequences=16)
BLOCK = 128
POLICIES = [policy for policy in PolicyName if policy is not PolicyName.BELADY]
SPEC: dict[str, Any] = {
    "model": {"name": "m", "source": "file:///m"},
    "engine": {"type": "Torch"},
    "tiers": [
        {
            "name": "gold",
            "weight": 4,
            "priority": 10,
            "quota": {"nominalPercent": 50},
            "sla": {"timeToFirstToken": "1s"},
        },
        {"name": "bronze", "quota": {"nominalPercent": 50}},
    ],
    "defaultTier": "bronze",
    "identity": {"type": "Open"},
    "sharing": "Tier",
}


def spec(**changes: Any) -> CacheAwarePoolSpec:
    return parse_spec(SPEC | changes)


def requests_of(
    name: str, pool: CacheAwarePoolSpec, *, rate: float = 6.0, seconds: float = 60.0
) -> tuple[Request, ...]:
    trace = workload(name, Scale(rate, seconds, [tier.name for tier in pool.tiers], BLOCK))
    return merged([Mapped(trace)], view_of(pool, terms_of(pool).nominal))


def setup(pool: CacheAwarePoolSpec, capacity: int = 250) -> Setup:
    return Setup(pool, COST, capacity, BLOCK)


def story(outcome: Outcome) -> list[tuple[object, ...]]:
    return [
        (each.request.id, each.sent_at, each.first_token_at, each.ended_at, each.cached_tokens)
        for each in outcome.served
    ]


@pytest.mark.parametrize("policy", POLICIES)
class TestEveryPolicy:
    def test_serves_every_request_once_and_counts_what_it_sent(self, policy: PolicyName) -> None:
        pool = spec(rebalancing={"mode": "Auto", "interval": "10s"})
        requests = requests_of("templated", pool)
        shares = {"gold": 60, "bronze": 40} if policy is PolicyName.BEST_STATIC else None
        done: list[int] = []
        outcome = Simulation(setup(pool), policy, requests, shares=shares, progress=done.append).run()
        assert done == list(range(1, len(requests) + 1))
        for each in outcome.served:
            assert each.first_token_at is not None
            assert each.ended_at is not None
            assert each.request.at <= each.sent_at < each.first_token_at <= each.ended_at
            assert each.output_tokens == each.request.output_tokens
            assert each.cached_tokens <= each.request.prompt_tokens - 1
        assert outcome.everything.requests == sum(tier.requests for tier in outcome.tiers.values()) == len(requests)
        # Without yields, what was computed is what was not hit.
        if not outcome.preempted:
            assert outcome.computed_tokens == outcome.everything.prompt_tokens - outcome.everything.hit_tokens

    def test_does_the_same_every_time(self, policy: PolicyName) -> None:
        pool = spec(rebalancing={"mode": "Auto", "interval": "10s"})
        requests = requests_of("templated", pool, seconds=15)
        shares = {"gold": 60, "bronze": 40} if policy is PolicyName.BEST_STATIC else None
        one, other = (Simulation(setup(pool), policy, requests, shares=shares).run() for _ in range(2))
        assert story(one) == story(other)

    def test_hits_nothing_where_nothing_is_shared(self, policy: PolicyName) -> None:
        pool = spec()
        shares = {"gold": 60, "bronze": 40} if policy is PolicyName.BEST_STATIC else None
        outcome = Simulation(setup(pool), policy, requests_of("nothing-shared", pool, rate=2), shares=shares).run()
        assert outcome.everything.hit_tokens == 0

    def test_hits_all_but_first_uses_where_everything_fits(self, policy: PolicyName) -> None:
        pool = spec()
        requests = requests_of("nothing-to-win", pool, rate=2)
        shares = {"gold": 60, "bronze": 40} if policy is PolicyName.BEST_STATIC else None
        outcome = Simulation(setup(pool, 2500), policy, requests, shares=shares).run()
        best = 100 * (1 - unique_tokens(requests, BLOCK) / sum(each.prompt_tokens for each in requests))
        assert outcome.everything.hit_percent == pytest.approx(best, abs=5)  # some came while the first was computed


class TestRefusals:
    def test_what_can_never_fit_is_refused_and_counts_as_a_promise_that_was_not_kept(self) -> None:
        pool = spec()
        small = Request("small", 0.0, "gold", "t", 100, 4, ())
        large = Request("large", 0.1, "gold", "t", 100_000, 4, ())
        for policy in (PolicyName.CACHEAWARE, PolicyName.FCFS_LRU):
            outcome = Simulation(setup(pool, 100), policy, [small, large]).run()
            assert [each.refused for each in outcome.served] == [False, True]
            assert outcome.tiers["gold"].attainment_percent == 50
            assert outcome.tiers["gold"].refused == 1


class TestRebalancing:
    def test_moves_quota_to_where_hits_are(self) -> None:
        """Bronze shares nothing with itself, gold's templates need more than its half."""
        tiers = [tier | {"weight": 1} for tier in SPEC["tiers"]]
        pool = spec(tiers=tiers, rebalancing={"mode": "Auto", "interval": "10s"})
        view = view_of(pool, terms_of(pool).nominal)
        gold = workload("templated", Scale(4.0, 200.0, ["gold"], BLOCK))
        bronze = workload("nothing-shared", Scale(4.0, 200.0, ["bronze"], BLOCK))
        requests = merged([Mapped(gold, "gold"), Mapped(bronze, "bronze")], view)
        moving = Simulation(setup(pool, 400), PolicyName.CACHEAWARE, requests).run()
        fixed = Simulation(setup(pool, 400), PolicyName.STATIC_QUOTA, requests).run()
        assert moving.effective is not None
        assert moving.effective["gold"] >= 65
        assert fixed.effective == {"gold": 50, "bronze": 50}
        assert not fixed.rounds
        assert moving.everything.hit_tokens > 1.05 * fixed.everything.hit_tokens

    def test_off_in_the_file_is_off_in_the_replay(self) -> None:
        pool = spec()
        outcome = Simulation(setup(pool), PolicyName.CACHEAWARE, requests_of("templated", pool)).run()
        assert not outcome.rounds
        assert outcome.effective == {"gold": 50, "bronze": 50}


@functools.cache
def everything() -> Comparison:
    pool = spec(rebalancing={"mode": "Auto", "interval": "10s"})
    return compare(setup(pool), requests_of("templated", pool), [PolicyName.CACHEAWARE, *BASELINES])


class TestComparison:
    def test_nobody_hits_more_than_who_knows_the_future(self) -> None:
        bound = everything().limits.belady_hit_percent
        assert bound is not None
        assert bound <= everything().limits.infinite_hit_percent
        for outcome in everything().outcomes:
            assert outcome.everything.hit_percent <= bound

    def test_nobody_computes_less_than_what_is_unique(self) -> None:
        for outcome in everything().outcomes:
            assert outcome.computed_tokens >= everything().limits.unique_tokens

    def test_the_best_static_split_is_handed_out_and_stays(self) -> None:
        assert everything().of(PolicyName.BEST_STATIC).effective == everything().best_shares


class TestSharing:
    @pytest.mark.parametrize(
        ("sharing", "identity", "hits"),
        [
            pytest.param("Pool", "Open", 3, id="Pool: whoever asks"),
            pytest.param("Tier", "Open", 2, id="Tier: the same tier"),
            pytest.param("None", "Open", 0, id="None: nobody"),
        ],
    )
    def test_who_may_hit_whose_blocks_is_the_pools_word(self, sharing: str, identity: str, hits: int) -> None:
        pool = spec(sharing=sharing, identity={"type": identity})
        trace = replace(workload("nothing-to-win", Scale(1.0, 10.0, ["gold"], BLOCK)))
        (first, *_) = trace.requests
        same = [replace(first, at=float(n), tier="gold" if n % 2 else "bronze", tenant=f"t{n % 2}") for n in range(4)]
        requests = merged([Mapped(replace(trace, requests=same))], view_of(pool, terms_of(pool).nominal))
        outcome = Simulation(setup(pool), PolicyName.CACHEAWARE, requests).run()
        assert sum(each.cached_tokens > 0 for each in outcome.served) == hits


class TestFlooder:
    def test_quiet_tenants_wait_for_few_steps_and_fall_behind_no_further_than_is_proved(self) -> None:
        pool = spec(tiers=[{"name": "bronze", "quota": {"nominalPercent": 100}}])
        requests = requests_of("flooder", pool, rate=1.0, seconds=30.0)  # 1.7 times what the engine can compute
        full_step = COST.step(COST.max_batched_tokens, 0, 0)
        waits: dict[PolicyName, float] = {}
        for policy in (PolicyName.CACHEAWARE, PolicyName.FCFS_LRU):
            outcome = Simulation(setup(pool, 2500), policy, requests).run()
            quiet = sorted(s.time_to_first_token or 0.0 for s in outcome.served if "quiet-" in s.request.tenant)
            waits[policy] = quiet[len(quiet) * 9 // 10] / full_step
            lag = largest_lag(outcome.served, credit=0.0)
            assert lag is not None
            assert (lag.part <= 1) == (policy is PolicyName.CACHEAWARE)
        assert waits[PolicyName.CACHEAWARE] < 8.5, "a prompt of a quiet tenant has four chunks itself"
        assert waits[PolicyName.FCFS_LRU] > 100, "the engine was overloaded, or this shows nothing"
