"""Alerts: rules that Prometheus takes, that fire when they should, and are silent otherwise."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

BuildPool = Callable[..., Any]

SHARED = Path(os.environ.get("CACHEAWARE_SHARED", Path(__file__).parents[3].parent / "shared"))
POOL = 'namespace="default",pool="chat"'


@pytest.fixture(scope="session")
def promtool() -> Path:
    unpack = SHARED / "tools" / "unpack"
    if not unpack.exists():
        pytest.skip(f"{unpack} is missing: promtool comes from it (CACHEAWARE_SHARED names the folder)")
    done = subprocess.run([unpack], capture_output=True, text=True, timeout=120, check=True)
    return Path(done.stdout.strip()) / "promtool"


def rules_of(pool: Any) -> dict[str, dict[str, Any]]:
    """By name, and by tier where a tier has its own."""
    (group,) = pool("PrometheusRule")["spec"]["groups"]
    return {
        f"{rule['alert']}{'/' + rule['labels']['tier'] if 'tier' in rule['labels'] else ''}": rule
        for rule in group["rules"]
    }


def test_each_alert_names_its_pool_so_that_pools_share_none(build_pool: BuildPool) -> None:
    for rule in rules_of(build_pool()).values():
        for selector in re.findall(r"\{([^}]*)\}", rule["expr"]):
            assert selector.startswith(POOL)
    (one,) = build_pool()("PrometheusRule")["spec"]["groups"]
    (other,) = build_pool(wanted={"namespace": "team-b"})("PrometheusRule")["spec"]["groups"]
    assert one["name"] != other["name"]


def test_only_a_tier_that_was_promised_something_can_miss_it(build_pool: BuildPool) -> None:
    rules = rules_of(build_pool())
    assert "CacheAwareSLAMissed/gold" in rules
    assert "CacheAwareSLAMissed/bronze" not in rules


def test_an_edited_promise_is_an_edited_rule(build_pool: BuildPool) -> None:
    tier = {"name": "gold", "sla": {"timePerOutputToken": "50ms", "attainmentPercent": 99}}
    rules = rules_of(build_pool(tiers=[tier], defaultTier="gold"))
    assert "> 1 and" in rules["CacheAwareSLAMissed/gold"]["expr"]


@pytest.mark.parametrize("engine", ["Torch", "VLLM"])
def test_either_engine_that_shows_no_ledger_is_told(build_pool: BuildPool, engine: str) -> None:
    pool = build_pool(engine={"type": engine, "args": [], "kvCache": {}})
    assert "CacheAwareQuotaNotEnforced" in rules_of(pool)


def test_only_a_pool_that_rebalances_can_be_frozen(build_pool: BuildPool) -> None:
    assert "CacheAwareRebalancingFrozen" not in rules_of(build_pool())
    assert "CacheAwareRebalancingFrozen" in rules_of(build_pool(rebalancing={"mode": "DryRun"}))


def test_every_alert_says_what_is_wrong_and_what_to_do(build_pool: BuildPool) -> None:
    for name, rule in rules_of(build_pool(rebalancing={"mode": "Auto"})).items():
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        assert "chat" in rule["annotations"]["summary"], name
        assert len(rule["annotations"]["description"]) > 60, name


def test_a_cache_that_nothing_hits_is_a_condition_and_no_alarm(build_pool: BuildPool) -> None:
    for name, rule in rules_of(build_pool(rebalancing={"mode": "Auto"})).items():
        assert "cached" not in rule["expr"], name
        assert "hits" not in rule["expr"], name


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inner = ",".join([POOL, *(f'{key}="{value}"' for key, value in labels.items())])
    return {"series": f"{name}{{{inner}}}", "values": values}


def sla(met: int, missed: int | None, pool_wide: int = 60) -> list[dict[str, str]]:
    """Judged requests of gold, so many a minute for an hour."""
    judged = [series("cacheaware_sla_total", f"0+{met}x{pool_wide}", tier="gold", sla="ttft", met="true")]
    if missed is not None:
        judged.append(series("cacheaware_sla_total", f"0+{missed}x{pool_wide}", tier="gold", sla="ttft", met="false"))
    return judged


POD = {"pod": "chat-1"}
CASES = [
    pytest.param("CacheAwarePoolNotReady", [series("cacheaware_pool_ready", "0x60")], True, id="not ready"),
    pytest.param("CacheAwarePoolNotReady", [series("cacheaware_pool_ready", "1x60")], False, id="ready"),
    pytest.param(
        "CacheAwarePoolNotReady", [series("cacheaware_pool_ready", "1x50 0x10")], False, id="not ready for a moment"
    ),
    pytest.param("CacheAwareSLAMissed", sla(met=90, missed=10), True, id="10 % late where 5 % may be"),
    pytest.param("CacheAwareSLAMissed", sla(met=97, missed=3), False, id="3 % late"),
    pytest.param("CacheAwareSLAMissed", sla(met=50, missed=None), False, id="none late"),
    pytest.param("CacheAwareSLAMissed", sla(met=0, missed=5), True, id="all late"),
    pytest.param("CacheAwareSLAMissed", sla(met=0, missed=0), False, id="no traffic"),
    pytest.param("CacheAwareQuotaNotEnforced", [series("up", "1x60", **POD)], True, id="a sidecar that sees no ledger"),
    pytest.param(
        "CacheAwareQuotaNotEnforced",
        [series("up", "1x60", **POD), series("cacheaware_kv_capacity_blocks", "100x60", **POD)],
        False,
        id="a sidecar that sees one",
    ),
    pytest.param(
        "CacheAwareQuotaNotEnforced",
        [series("up", "1x60", **POD), series("cacheaware_kv_capacity_blocks", "100x60", pod="chat-2")],
        True,
        id="a ledger on another pod only",
    ),
    pytest.param("CacheAwareMetricsStale", [series("up", "0x60", **POD)], True, id="a pod that is not scraped"),
    pytest.param("CacheAwareMetricsStale", [series("up", "1x60", **POD)], False, id="a pod that is"),
    pytest.param(
        "CacheAwareRebalancingFrozen",
        [series("cacheaware_rebalance_skipped_total", "0+2x60", reason="StaleMetrics")],
        True,
        id="stale metrics round after round",
    ),
    pytest.param(
        "CacheAwareRebalancingFrozen",
        [
            series("cacheaware_rebalance_skipped_total", "0+2x60", reason="GainTooSmall"),
            series("cacheaware_rebalance_skipped_total", "5x60", reason="StaleMetrics"),
        ],
        False,
        id="rounds without a reason to move",
    ),
]


@pytest.fixture
def rule_file(build_pool: BuildPool, tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(build_pool(rebalancing={"mode": "Auto"})("PrometheusRule")["spec"]))
    return path


def test_prometheus_takes_the_rules(promtool: Path, rule_file: Path) -> None:
    done = subprocess.run(
        [promtool, "check", "rules", "--lint=all", "--lint-fatal", rule_file],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("alert", "input_series", "fires"), CASES)
def test_it_fires_when_it_should(
    promtool: Path, rule_file: Path, alert: str, input_series: list[dict[str, str]], fires: bool
) -> None:
    """promtool compares labels and annotations of what fires: an empty expectation fails exactly if something does."""
    test = {
        "rule_files": [rule_file.name],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": input_series,
                "alert_rule_test": [{"eval_time": "58m", "alertname": alert, "exp_alerts": []}],
            }
        ],
    }
    path = rule_file.with_name("test.yaml")
    path.write_text(yaml.safe_dump(test))
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, timeout=60)
    said = done.stdout + done.stderr
    assert "alertname" in said or done.returncode == 0, said
    assert (done.returncode != 0) is fires, said
