"""Quota that moves, and one story of it in status, Event, metric and view. The sidecars' histograms are made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from e2e.operators import RunningOperator
from e2e.space import POOL, SPEC, Space, metrics_page, pool
from e2e.stand_ins import CAPACITY, StandInSidecars

from cacheaware_operator.testing_rebalance import loop, reuse_page

REBALANCING = {"interval": "1s", "maxStepPercent": 10, "minGainPercent": 1}


def growing_page() -> Callable[[], str]:
    """Gold walks over more blocks than its half of the cache holds, again and again; bronze asks for nothing."""
    seen = 0

    def page() -> str:
        nonlocal seen
        seen += 1
        return reuse_page("gold", loop(5000.0 * seen, CAPACITY * 0.65))

    return page


@pytest.fixture
def flooded(space: Space, sidecars: StandInSidecars, operator: RunningOperator) -> Callable[[str], list[str]]:
    """A ready pool in a mode, whose gold tier would gain by more cache."""

    def begin(mode: str) -> list[str]:
        space.apply(pool(rebalancing={"mode": mode, **REBALANCING}))
        names = space.become_ready()
        for name in names:
            sidecars.of(name).page = growing_page()
        return names

    return begin


def effective(space: Space) -> dict[str, int]:
    return {tier["name"]: tier["effectivePercent"] for tier in space.get(POOL)["status"]["tiers"]}


def test_quota_moves_to_where_it_earns_hits_and_everybody_tells_the_same(
    space: Space, sidecars: StandInSidecars, operator: RunningOperator, flooded: Callable[[str], list[str]]
) -> None:
    names = flooded("Auto")
    space.wait("quota moves", lambda: effective(space)["gold"] > 50)
    status = space.get(POOL)["status"]
    moves = status["lastRebalance"]["moves"]
    assert {(move["from"], move["to"]) for move in moves} == {("bronze", "gold")}
    assert moves[0]["reason"].startswith("MoreHits")
    space.wait("an Event", lambda: "QuotaMoved" in dict(space.events()))
    assert "from bronze to gold: MoreHits" in dict(space.events())["QuotaMoved"]
    labels = f'{{from="bronze",namespace="{space.name}",pool="chat",reason="MoreHits",to="gold"}}'
    assert f"cacheaware_quota_moves_total{labels}" in metrics_page(operator)
    space.wait("it is in force", lambda: space.settled())
    shares = effective(space)
    assert sum(shares.values()) == 80
    assert space.get(POOL)["spec"]["tiers"] == SPEC["tiers"]  # only the status tells of it
    for name in names:
        last = sidecars.of(name).views[-1]
        assert sum(tier.effective_percent for tier in last.tiers) == 80
        assert last.revision.number >= 2


def test_dry_run_tells_what_would_move_and_moves_nothing(
    space: Space, sidecars: StandInSidecars, operator: RunningOperator, flooded: Callable[[str], list[str]]
) -> None:
    names = flooded("DryRun")
    told = space.wait("what would move", lambda: space.get(POOL)["status"].get("lastRebalance"))
    assert "DryRun" in told["moves"][0]["reason"]
    assert effective(space) == {"gold": 50, "bronze": 30}
    assert space.get(POOL)["status"]["revision"] == 1
    assert all([view.revision.number for view in sidecars.of(name).views] == [1] for name in names)
    assert "QuotaMoved" not in dict(space.events())
    page = metrics_page(operator)
    assert "cacheaware_quota_moves_total{" not in page
    assert f'cacheaware_rebalance_skipped_total{{namespace="{space.name}",pool="chat",reason="DryRun"}}' in page


def test_shares_stay_where_they_are_while_a_sidecar_is_silent(
    space: Space, sidecars: StandInSidecars, operator: RunningOperator, flooded: Callable[[str], list[str]]
) -> None:
    names = flooded("Auto")
    space.wait("quota moves", lambda: effective(space)["gold"] > 50)
    sidecars.of(names[0]).silent = True
    space.wait("it says so", lambda: space.condition("MetricsFresh") == ("False", "Stale"))
    shares = effective(space)
    skipped = f'cacheaware_rebalance_skipped_total{{namespace="{space.name}",pool="chat",reason="StaleMetrics"}}'
    space.wait("rounds that move nothing", lambda: skipped in metrics_page(operator))
    assert effective(space) == shares
