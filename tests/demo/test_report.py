"""The demo's figures are what the clients saw, and its promises can fail."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from cacheaware.demo.drive import Served
from cacheaware.demo.picture import draw
from cacheaware.demo.report import Company, Run, Sample, percentile, report, rows
from cacheaware_api import wire

SLA = {"gold": 1.0, "bronze": None}


def served(tier: str, ttft: float, cached: int, error: str | None = None) -> Served:
    return Served(tier, 0.0, ttft, ttft + 1, 100, cached, 10, error)


def run(kind: str, *requests: Served) -> Run:
    samples = [Sample(0.0, {"gold": 10, "bronze": 5}), Sample(1.0, {"gold": 20, "bronze": 12})]
    return Run(kind, 10.0, requests, samples, {"gold": 20, "bronze": 5}, 32)


def held(hit_tokens: int, reason: str = "prefix-ready") -> wire.Decision:
    return wire.Decision("r", 0.0, "silver", 0.0, 120.0, reason, "answered", "g", 200, 150, hit_tokens, 300.0)


def with_company(one: Run, *decisions: wire.Decision) -> Run:
    return dataclasses.replace(one, held=decisions)


GOOD = [
    run("alone", served("gold", 0.1, 80)),
    run("off", served("gold", 2.0, 10), served("bronze", 3.0, 0)),
    with_company(run("on", served("gold", 0.2, 78), served("bronze", 3.0, 0)), held(160)),
]


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        pytest.param([], 50, None, id="nothing seen"),
        pytest.param([3.0], 95, 3.0, id="one value is every percentile"),
        pytest.param([4.0, 1.0, 3.0, 2.0], 50, 2.0, id="nearest rank, not between two values"),
        pytest.param([float(n) for n in range(1, 101)], 95, 95.0, id="p95 of a hundred"),
    ],
)
def test_percentiles_are_values_that_were_seen(values: list[float], percent: float, expected: float | None) -> None:
    assert percentile(values, percent) == expected


def test_a_tier_is_summed_over_all_runs_of_a_kind() -> None:
    figures = report("?", "!", [*GOOD, run("on", served("gold", 0.4, 58))], SLA).of("on", "gold")
    assert (figures.requests, figures.ttft_p50, figures.ttft_p95) == (2, 0.2, 0.4)
    assert figures.hit_percent == pytest.approx(68)
    assert figures.output_tokens_per_second == pytest.approx(20 / 20)
    assert (figures.used_blocks_max, figures.nominal_blocks) == (20, 20)


def test_openings_do_not_count() -> None:
    opening = dataclasses.replace(served("gold", 9.0, 0), opening=True)
    assert report("?", "!", [*GOOD, run("on", opening)], SLA).of("on", "gold").requests == 1


def test_a_failed_request_misses_its_sla_and_is_counted() -> None:
    runs = [*GOOD, run("on", served("gold", 0.1, 100, error="HTTP 500"))]
    figures = report("?", "!", runs, SLA).of("on", "gold")
    assert (figures.requests, figures.failed, figures.attainment_percent) == (1, 1, 50)
    assert not all(met for _, met in report("?", "!", runs, SLA).checks())


def test_every_promise_holds_on_a_good_run_and_each_can_fail() -> None:
    assert all(met for _, met in report("?", "!", GOOD, SLA).checks())
    swapped = [GOOD[0], run("off", *GOOD[2].served), with_company(run("on", *GOOD[1].served), held(60))]
    broken = [what for what, met in report("?", "!", swapped, SLA).checks() if not met]
    assert len(broken) == 6  # all but throughput and failures, which these runs have in common


def test_only_who_waited_until_the_prefix_was_there_counts_as_company() -> None:
    found = Company.of([held(160), held(100), held(0, "window")])
    assert (found.requests, found.held_ms) == (2, 120.0)
    assert found.hit_percent == pytest.approx(65)
    assert Company.of([]) == Company(0, None, None)


def test_where_nobody_waits_for_company_no_promise_is_broken() -> None:
    alone = [*GOOD[:2], run("on", served("gold", 0.2, 78), served("bronze", 3.0, 0))]
    told = report("?", "!", alone, SLA)
    assert all(met for _, met in told.checks())
    assert told.company_sentence() == "No request waited for another one with the same start."


def test_company_that_found_little_cached_breaks_the_promise() -> None:
    poor = [*GOOD[:2], with_company(GOOD[2], held(60))]
    broken = [what for what, met in report("?", "!", poor, SLA).checks() if not met]
    assert broken == ["who waited for a common prefix found at least half cached"]
    assert "30 %" in report("?", "!", poor, SLA).company_sentence()


def test_the_table_the_json_and_the_picture_come_from_the_same_runs(tmp_path: Path) -> None:
    found = report("?", "Paris.", GOOD, SLA)
    assert [row[:2] for row in rows(found)] == [
        ("off", "gold"),
        ("off", "bronze"),
        ("on", "gold"),
        ("on", "bronze"),
        ("on, alone", "gold"),
    ]
    assert json.loads(json.dumps(found.to_json()))["answer"] == "Paris."
    draw(found, tmp_path / "blocks.png")
    assert (tmp_path / "blocks.png").read_bytes().startswith(b"\x89PNG")
