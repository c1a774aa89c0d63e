"""From what the fleet shows, the scraped pages and a spec to what the rebalancer decides on."""

from __future__ import annotations

from typing import Any

import pytest

from cacheaware_api import wire
from cacheaware_api.defaults import RebalancingMode
from cacheaware_api.v1alpha1 import CacheAwarePoolSpec
from cacheaware_operator.fleet import ReplicaSnapshot, Snapshot
from cacheaware_operator.readings import Page, readings_of
from cacheaware_operator.rebalance_terms import TierTerms, terms_of
from cacheaware_operator.testing_rebalance import CurvePool, terms, tier

PAGE = """\
cacheaware_block_reuse_references_bucket{tier="gold",le="4"} 1
cacheaware_block_reuse_references_bucket{tier="gold",le="+Inf"} 3
cacheaware_prefill_seconds_per_block{tier="gold"} 0.02
"""
VIEW = CurvePool(terms(tier("gold", 60))).view


def status(*, ledger: bool = True) -> wire.PoolStatus:
    assert VIEW is not None
    account = wire.TierLedger(
        600, 600, 1000, held=70, cached=5, lapsed=0, borrowed=0, lent=0, slots=wire.Slots(4, 1), evicted_total=0,
        reclaimed_total=0, preempted_total=0, hit_tokens_total=800, query_tokens_total=900,
    )  # fmt: skip
    accounts = wire.Ledger(
        1, VIEW.revision, 16, 100, 1000, 925, wire.PublicLedger(0, 0, 0, {}), {"gold": account}, running=1, waiting=0
    )
    return wire.PoolStatus(
        applied=VIEW.revision,
        capacity=1000,
        ledger=accounts if ledger else None,
        tiers={"gold": wire.TierFigures(queue=0, requests=12, time_to_first_token_p95=0.7)},
        enforcement=wire.Enforcement.ENGINE,
        conditions=(),
        key_algorithm="test",
    )


def one(replica_status: wire.PoolStatus | None, page: Page | None, *, ready: bool = True) -> Any:
    snapshot = Snapshot(VIEW, (ReplicaSnapshot("chat-0", (), ready=ready, status=replica_status),))
    return readings_of(snapshot, {} if page is None else {"chat-0": page})


class TestReadings:
    def test_put_together_what_status_ledger_and_page_say(self) -> None:
        readings = one(status(), Page(PAGE, 17.0))
        (replica,) = readings.replicas
        gold = replica.tiers["gold"]
        assert (replica.name, replica.at, replica.capacity) == ("chat-0", 17.0, 1000)
        assert gold.reuse is not None
        assert gold.reuse.references == 3
        assert (gold.prefill_seconds_per_block, gold.held_blocks, gold.requests) == (0.02, 70, 12)
        assert (gold.hit_tokens, gold.query_tokens, gold.time_to_first_token_p95) == (800, 900, 0.7)
        assert readings.acknowledged
        assert readings.effective == {"gold": 60}
        assert readings.ready == ("chat-0",)

    @pytest.mark.parametrize(
        ("replica_status", "page", "problem"),
        [
            pytest.param(None, Page(PAGE, 1.0), "does not answer", id="no status"),
            pytest.param(status(), None, "does not answer", id="no page"),
            pytest.param(status(ledger=False), Page(PAGE, 1.0), "not told its accounts", id="no ledger"),
            pytest.param(status(), Page(PAGE.replace(" 3\n", " 0\n"), 1.0), "must not fall", id="unreadable page"),
        ],
    )
    def test_of_a_replica_that_tells_too_little_say_why_there_is_none(
        self, replica_status: wire.PoolStatus | None, page: Page | None, problem: str
    ) -> None:
        readings = one(replica_status, page)
        assert readings.replicas == ()
        assert problem in readings.problems["chat-0"]
        assert not readings.acknowledged

    def test_of_a_replica_that_is_not_ready_are_not_waited_for(self) -> None:
        assert one(None, None, ready=False).acknowledged


def spec(rebalancing: dict[str, Any] | None = None, **bronze: Any) -> CacheAwarePoolSpec:
    body: dict[str, Any] = {
        "model": {"name": "m", "source": "hf://org/repo"},
        "engine": {"type": "Torch"},
        "identity": {"type": "Open"},
        "publicPercent": 10,
        "tiers": [
            {"name": "bronze", "quota": bronze},
            {
                "name": "gold",
                "priority": 100,
                "weight": 4,
                "quota": {"nominalPercent": 50, "lendingLimitPercent": 20, "borrowingLimitPercent": 15},
                "sla": {"timeToFirstToken": "800ms"},
            },
        ],
    }
    if rebalancing is not None:
        body["rebalancing"] = rebalancing
    return CacheAwarePoolSpec.model_validate(body)


class TestTerms:
    def test_a_tier_keeps_what_it_does_not_lend_and_gets_what_it_may_borrow(self) -> None:
        gold, bronze = terms_of(spec(nominalPercent=30)).tiers
        assert gold == TierTerms("gold", 4, nominal=50, guaranteed=30, limit=65, time_to_first_token=0.8)
        assert bronze == TierTerms("bronze", 1, nominal=30, guaranteed=0, limit=90)

    @pytest.mark.parametrize(
        ("quota", "guaranteed", "limit"),
        [
            pytest.param({"nominalPercent": 30, "lendingLimitPercent": 0}, 30, 90, id="nothing is lent"),
            pytest.param({"nominalPercent": 30, "lendingLimitPercent": 30}, 0, 90, id="everything is lent"),
            pytest.param({"nominalPercent": 30, "borrowingLimitPercent": 0}, 0, 30, id="nothing is borrowed"),
            pytest.param({"nominalPercent": 30, "borrowingLimitPercent": 80}, 0, 90, id="never the public share"),
            pytest.param({}, 0, 90, id="no quota"),
        ],
    )
    def test_absent_is_no_limit_and_zero_is_none(self, quota: dict[str, Any], guaranteed: int, limit: int) -> None:
        bronze = terms_of(spec(**quota)).tiers[1]
        assert (bronze.guaranteed, bronze.limit) == (guaranteed, limit)

    def test_what_nobody_was_given_is_not_shared_out(self) -> None:
        assert terms_of(spec(nominalPercent=30)).total == 80

    def test_the_section_says_how_calm_and_its_absence_off(self) -> None:
        assert terms_of(spec()).mode is RebalancingMode.OFF
        told = terms_of(spec({"interval": "1m", "maxStepPercent": 5, "minGainPercent": 2, "mode": "DryRun"}))
        assert (told.mode, told.interval, told.max_step_percent, told.min_gain_percent) == (
            RebalancingMode.DRY_RUN, 60.0, 5, 2,
        )  # fmt: skip

    def test_bounds_that_contradict_each_other_are_refused(self) -> None:
        with pytest.raises(ValueError, match="tier gold: guaranteed 20 ≤ nominal 10 ≤ limit 100"):
            tier("gold", 10, guaranteed=20)
