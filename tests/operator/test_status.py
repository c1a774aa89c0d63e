"""The status is what was decided and seen: sums over ready replicas, rounded figures, conditions with their reasons."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cacheaware_api import wire
from cacheaware_api.conditions import ConditionStatus, ConditionType, Reason
from cacheaware_api.status import CacheAwarePoolStatus, Capacity, Condition
from cacheaware_operator.fleet import PartName, PartSnapshot, PartState, ReplicaSnapshot, Snapshot
from cacheaware_operator.plan import Wanted
from cacheaware_operator.status import blocked_status, pool_status, written_status
from cacheaware_operator.status_conditions import Finding

MakeWanted = Callable[..., Wanted]
MakeReplica = Callable[..., ReplicaSnapshot]
MakeAccount = Callable[..., wire.TierLedger]

NOON = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


def status_of(
    wanted: Wanted,
    *replicas: ReplicaSnapshot,
    number: int = 1,
    previous: CacheAwarePoolStatus | None = None,
    now: datetime = NOON,
) -> CacheAwarePoolStatus:
    effective = {tier.name: tier.quota.nominal_percent for tier in wanted.spec.tiers}
    revision = wire.Revision("uid-1", number)
    return pool_status(wanted, revision, effective, Snapshot(replicas=replicas), previous, now)


def condition(status: CacheAwarePoolStatus, type_: str) -> Condition | None:
    return next((each for each in status.conditions if each.type == type_), None)


def told(status: CacheAwarePoolStatus, type_: str) -> tuple[str, str]:
    found = condition(status, type_)
    assert found is not None
    return found.status, found.reason


def figures(requests: int, **known: Any) -> wire.TierFigures:
    return wire.TierFigures(queue=0, requests=requests, **known)


def loading() -> PartSnapshot:
    return PartSnapshot(PartName.ENGINE, PartState.STARTING, message="loading")


# -- figures ----------------------------------------------------------------------------------------------------------


def test_blocks_are_summed_over_replicas_that_are_ready_and_answered(
    make_wanted: MakeWanted, make_replica: MakeReplica, make_account: MakeAccount
) -> None:
    accounts = {"gold": make_account(held=3, cached=10, borrowed=2, lent=1), "bronze": make_account(cached=5)}
    status = status_of(
        make_wanted(),
        make_replica("chat-0", accounts=accounts),
        make_replica("chat-1", accounts=accounts),
        make_replica("chat-2", accounts=accounts, ready=False),
        make_replica("chat-3", answers=False),
    )
    gold, bronze = status.tiers
    assert (gold.held_blocks, gold.cached_blocks, gold.borrowed_blocks, gold.lent_blocks) == (6, 20, 4, 2)
    assert (bronze.held_blocks, bronze.cached_blocks) == (0, 10)
    assert (status.replicas, status.ready_replicas) == (4, 3)


def test_of_an_estimate_idle_blocks_are_not_known(
    make_wanted: MakeWanted, make_replica: MakeReplica, make_account: MakeAccount
) -> None:
    accounts = {"gold": make_account(held=3), "bronze": make_account(held=1)}
    replica = make_replica(accounts=accounts, enforcement=wire.Enforcement.ESTIMATE_ONLY)
    status = status_of(make_wanted(), replica)
    assert [(tier.held_blocks, tier.cached_blocks) for tier in status.tiers] == [(3, None), (1, None)]
    assert told(status, "QuotaEnforced") == ("False", "EstimateOnly")
    assert told(status, "Ready") == ("True", "AllReplicasReady")


def test_capacity_tells_the_smallest_and_the_largest_replica(
    make_wanted: MakeWanted, make_replica: MakeReplica
) -> None:
    status = status_of(make_wanted(), make_replica(capacity=90), make_replica("chat-1", capacity=120))
    assert status.capacity == Capacity(min_blocks=90, max_blocks=120, block_size=16, bytes_per_token=1000)


def test_percentages_are_weighted_by_requests_and_the_slowest_replica_counts(
    make_wanted: MakeWanted, make_replica: MakeReplica
) -> None:
    busy = {"gold": figures(90, hit_percent=80.0, time_to_first_token_p95=0.1234, attainment_percent=100.0)}
    slow = {"gold": figures(10, hit_percent=30.0, time_to_first_token_p95=1.5678, attainment_percent=46.0)}
    status = status_of(make_wanted(), make_replica(figures=busy), make_replica("chat-1", figures=slow))
    gold = status.tiers[0]
    assert gold.hit_percent == 75
    assert status.hit_percent == 75
    assert gold.time_to_first_token_p95 == "1s600ms"
    assert gold.attainment_percent == 94  # 94.6: rounded down, or a missed 95 would read as kept
    assert status.tiers[1].hit_percent is None


def test_nothing_is_known_before_a_replica_answers(make_wanted: MakeWanted) -> None:
    status = status_of(make_wanted())
    assert status.capacity is None
    assert status.hit_percent is None
    assert [tier.held_blocks for tier in status.tiers] == [None, None]
    assert {(each.status, each.reason) for each in status.conditions if each.type == "MetricsFresh"} == {
        ("Unknown", "NotKnownYet")
    }


def test_a_status_fits_the_object_and_names_what_was_decided(
    make_wanted: MakeWanted, make_replica: MakeReplica
) -> None:
    status = status_of(make_wanted(generation=7), make_replica(number=4), number=4)
    assert CacheAwarePoolStatus.model_validate_json(status.model_dump_json(exclude_none=True)) == status
    assert (status.observed_generation, status.revision, status.tier_count) == (7, 4, 2)
    assert [(tier.name, tier.nominal_percent, tier.effective_percent) for tier in status.tiers] == [
        ("gold", 50, 50),
        ("bronze", 30, 30),
    ]
    assert {each.observed_generation for each in status.conditions} == {7}


# -- Ready, Reconciling, Stalled --------------------------------------------------------------------------------------


def test_a_pool_is_ready_when_every_replica_is(make_wanted: MakeWanted, make_replica: MakeReplica) -> None:
    status = status_of(make_wanted(), make_replica())
    assert told(status, "Ready") == ("True", "AllReplicasReady")
    assert condition(status, "Reconciling") is None
    assert condition(status, "Stalled") is None


def test_a_pool_that_is_not_ready_says_which_part_is_missing(
    make_wanted: MakeWanted, make_replica: MakeReplica
) -> None:
    status = status_of(make_wanted(), make_replica(ready=False, engine=loading()))
    ready = condition(status, "Ready")
    assert ready is not None
    assert (ready.status, ready.reason) == ("False", "ReplicasNotReady")
    assert ready.message == "0 of 1 replicas are ready; chat-0: the engine is Starting (loading)"
    assert told(status, "Reconciling") == ("True", "Starting")


def test_a_pool_without_replicas_is_as_it_was_asked_to_be(make_wanted: MakeWanted, spec: dict[str, Any]) -> None:
    assert told(status_of(make_wanted(spec | {"replicas": 0})), "Ready") == ("True", "ScaledToZero")


def test_missed_slas_do_not_make_a_pool_unready(make_wanted: MakeWanted, make_replica: MakeReplica) -> None:
    missed = make_replica(figures={"gold": figures(50, attainment_percent=10.0)})
    status = status_of(make_wanted(), missed)
    assert told(status, "Ready")[0] == "True"
    assert told(status, "SLAMet") == ("False", "TiersMissed")


@pytest.mark.parametrize(
    ("state", "message", "reason"),
    [
        pytest.param(PartState.RESTARTING, "ended; starts again in 2 s", "Restarting", id="restarting"),
        pytest.param(PartState.STARTING, "loading", "Starting", id="starting"),
    ],
)
def test_a_part_that_is_not_there_yet_is_being_reconciled(
    make_wanted: MakeWanted, make_replica: MakeReplica, state: PartState, message: str, reason: str
) -> None:
    engine = PartSnapshot(PartName.ENGINE, state, message=message)
    status = status_of(make_wanted(), make_replica(ready=False, engine=engine))
    assert told(status, "Reconciling") == ("True", reason)


def test_a_view_that_is_not_acknowledged_is_being_reconciled_while_the_pool_stays_ready(
    make_wanted: MakeWanted, make_replica: MakeReplica
) -> None:
    status = status_of(make_wanted(), make_replica(number=1), number=2)
    assert told(status, "Reconciling") == ("True", "ApplyingView")
    assert told(status, "Ready")[0] == "True"


def test_a_missing_replica_is_scaling(make_wanted: MakeWanted, make_replica: MakeReplica, spec: dict[str, Any]) -> None:
    status = status_of(make_wanted(spec | {"replicas": 2}), make_replica())
    assert told(status, "Reconciling") == ("True", "Scaling")
    assert told(status, "Ready")[0] == "False"


def test_a_part_that_cannot_start_stalls_the_pool_and_its_log_is_named(
    make_wanted: MakeWanted, make_replica: MakeReplica
) -> None:
    failed = PartSnapshot(PartName.ENGINE, PartState.FAILED, message="ended (exit code 2)", log="/logs/engine.log")
    stalled = condition(status_of(make_wanted(), make_replica(ready=False, engine=failed)), "Stalled")
    assert stalled is not None
    assert (stalled.status, stalled.reason) == ("True", "CrashLoop")
    assert "exit code 2" in stalled.message
    assert "/logs/engine.log" in stalled.message


def test_a_view_that_a_sidecar_refuses_stalls_the_pool(make_wanted: MakeWanted, make_replica: MakeReplica) -> None:
    status = status_of(make_wanted(), make_replica(problem="the sidecar refused the view (400): tiers"))
    assert told(status, "Stalled") == ("True", "NotSupported")


def test_a_part_that_ends_again_and_again_stalls_the_pool(make_wanted: MakeWanted, make_replica: MakeReplica) -> None:
    def engine(failures: int) -> PartSnapshot:
        return PartSnapshot(PartName.ENGINE, PartState.RESTARTING, failures=failures, log="/logs/engine.log")

    often = status_of(make_wanted(), make_replica(ready=False, engine=engine(5)))
    assert told(often, "Stalled") == ("True", "CrashLoop")
    assert condition(often, "Reconciling") is None  # kstatus would read it as still on its way
    assert condition(status_of(make_wanted(), make_replica(ready=False, engine=engine(4))), "Stalled") is None


def test_quotas_that_an_engine_refuses_stall_the_pool_with_its_arithmetic(
    make_wanted: MakeWanted, make_replica: MakeReplica
) -> None:
    refused = wire.Condition("QuotaEnforced", "False", "QuotaRefused", "3 tiers and 2 sequences")
    status = status_of(make_wanted(), make_replica(conditions=(refused,)), number=2)
    assert told(status, "QuotaEnforced") == ("False", "QuotaRefused")
    stalled = condition(status, "Stalled")
    assert stalled is not None
    assert (stalled.reason, stalled.message) == ("QuotaRefused", "chat-0: 3 tiers and 2 sequences")


def test_a_replica_whose_sidecar_still_waits_for_its_engine_is_being_reconciled(
    make_wanted: MakeWanted, make_replica: MakeReplica
) -> None:
    assert told(status_of(make_wanted(), make_replica(ready=False)), "Reconciling") == ("True", "ApplyingView")


# -- the other conditions ---------------------------------------------------------------------------------------------


def test_quotas_are_enforced_when_engines_say_so(make_wanted: MakeWanted, make_replica: MakeReplica) -> None:
    estimate = make_replica("chat-1", enforcement=wire.Enforcement.ESTIMATE_ONLY)
    assert told(status_of(make_wanted(), make_replica()), "QuotaEnforced") == ("True", "EnforcedByEngine")
    assert told(status_of(make_wanted(), make_replica(), estimate), "QuotaEnforced") == ("False", "EstimateOnly")
    assert told(status_of(make_wanted()), "QuotaEnforced") == ("Unknown", "NotKnownYet")


def test_a_vllm_that_the_plugin_does_not_know_is_told_apart_from_a_plain_one(
    make_wanted: MakeWanted, make_replica: MakeReplica
) -> None:
    said = wire.Condition("QuotaEnforced", "False", "UnsupportedVersion", "vLLM 0.99.0 is not supported")
    estimate = make_replica("chat-1", enforcement=wire.Enforcement.ESTIMATE_ONLY, conditions=(said,))
    status = status_of(make_wanted(), make_replica(), estimate)
    assert told(status, "QuotaEnforced") == ("False", "UnsupportedVersion")
    (found,) = [each for each in status.conditions if each.type == "QuotaEnforced"]
    assert found.message == "chat-1: vLLM 0.99.0 is not supported"


def test_an_open_pool_says_that_nobody_is_asked(
    make_wanted: MakeWanted, make_replica: MakeReplica, spec: dict[str, Any]
) -> None:
    assert told(status_of(make_wanted()), "IdentityEnforced") == ("False", "Open")
    spec["identity"] = {"type": "APIKeys", "apiKeys": {"secretRef": {"name": "keys"}}}
    assert told(status_of(make_wanted(spec), make_replica()), "IdentityEnforced") == ("True", "APIKeys")
    assert told(status_of(make_wanted(spec)), "IdentityEnforced") == ("Unknown", "NotKnownYet")


def test_a_replica_that_does_not_answer_makes_metrics_stale(make_wanted: MakeWanted, make_replica: MakeReplica) -> None:
    status = status_of(make_wanted(), make_replica(), make_replica("chat-1", answers=False))
    assert told(status, "MetricsFresh") == ("False", "Stale")
    assert told(status_of(make_wanted(), make_replica()), "MetricsFresh") == ("True", "Fresh")


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param({}, ("Unknown", "NoTraffic"), id="no traffic"),
        pytest.param({"gold": figures(9, attainment_percent=95.0)}, ("True", "AllTiersMet"), id="just met"),
        pytest.param({"gold": figures(9, attainment_percent=94.9)}, ("False", "TiersMissed"), id="just missed"),
        pytest.param({"bronze": figures(9, attainment_percent=1.0)}, ("Unknown", "NoTraffic"), id="nothing promised"),
        pytest.param({"gold": figures(9)}, ("Unknown", "NotMeasured"), id="nobody streams"),
    ],
)
def test_slas_are_judged_by_the_tiers_that_were_promised_something(
    make_wanted: MakeWanted, make_replica: MakeReplica, seen: dict[str, wire.TierFigures], expected: tuple[str, str]
) -> None:
    assert told(status_of(make_wanted(), make_replica(figures=seen)), "SLAMet") == expected


def test_without_any_promise_every_sla_is_met(
    make_wanted: MakeWanted, make_replica: MakeReplica, spec: dict[str, Any]
) -> None:
    del spec["tiers"][0]["sla"]
    assert told(status_of(make_wanted(spec), make_replica()), "SLAMet") == ("True", "NoSLA")


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param({}, ("Unknown", "NoTraffic"), id="no traffic"),
        pytest.param({"gold": figures(19, hit_percent=0.0)}, ("Unknown", "NoTraffic"), id="too few to tell"),
        pytest.param({"gold": figures(20, hit_percent=0.0)}, ("False", "NoHits"), id="no hit at all"),
        pytest.param({"gold": figures(1, hit_percent=3.0)}, ("True", "HitsSeen"), id="a hit"),
    ],
)
def test_prefix_caching_is_effective_when_something_is_hit(
    make_wanted: MakeWanted, make_replica: MakeReplica, seen: dict[str, wire.TierFigures], expected: tuple[str, str]
) -> None:
    assert told(status_of(make_wanted(), make_replica(figures=seen)), "PrefixCachingEffective") == expected


@pytest.mark.parametrize(
    ("block_size", "reason"),
    [
        pytest.param(8320, "BlocksTooLarge", id="a block for seventeen prompts"),
        pytest.param(480, "BlocksTooLarge", id="a block as long as the prompt, whose last token is always computed"),
        pytest.param(479, "NoHits", id="a block that could be hit"),
    ],
)
def test_where_no_prompt_fills_a_block_it_is_the_blocks_that_are_to_blame(
    make_wanted: MakeWanted, make_replica: MakeReplica, block_size: int, reason: str
) -> None:
    seen = {
        "gold": figures(30, hit_percent=0.0, longest_prompt_tokens=480),
        "bronze": figures(10, hit_percent=0.0, longest_prompt_tokens=300),
    }
    status = status_of(make_wanted(), make_replica(figures=seen, block_size=block_size))
    assert told(status, "PrefixCachingEffective") == ("False", reason)
    found = condition(status, "PrefixCachingEffective")
    assert found is not None
    assert ("480" in found.message and str(block_size) in found.message) == (reason == "BlocksTooLarge")
    assert told(status, "Ready") == ("True", "AllReplicasReady")


@pytest.mark.parametrize(
    ("prefixes", "expected"),
    [
        pytest.param({"a": wire.PrefixLedger(blocks=3, resident=3)}, ("True", "Resident"), id="all of it"),
        pytest.param({"a": wire.PrefixLedger(blocks=3, resident=2)}, ("False", "NotResident"), id="a part of it"),
        pytest.param({}, ("False", "NotResident"), id="unknown to the engine"),
    ],
)
def test_public_prefixes_are_resident_when_all_their_blocks_are(
    make_wanted: MakeWanted,
    make_replica: MakeReplica,
    spec: dict[str, Any],
    prefixes: dict[str, wire.PrefixLedger],
    expected: tuple[str, str],
) -> None:
    spec |= {"publicPercent": 10, "publicPrefixes": [{"name": "a", "text": "You help."}]}
    status = status_of(make_wanted(spec), make_replica(prefixes=prefixes))
    assert told(status, "PublicPrefixesResident") == expected


def test_what_a_sidecar_reports_itself_counts_and_the_worst_replica_wins(
    make_wanted: MakeWanted, make_replica: MakeReplica
) -> None:
    good = wire.Condition(type="QuotaEnforced", status="True", reason="EnforcedByEngine")
    bad = wire.Condition(type="QuotaEnforced", status="False", reason="QuotaRefused", message="more tiers than slots")
    status = status_of(make_wanted(), make_replica(conditions=(good,)), make_replica("chat-1", conditions=(bad,)))
    found = condition(status, "QuotaEnforced")
    assert found is not None
    assert (found.status, found.reason) == ("False", "QuotaRefused")
    assert found.message == "chat-1: more tiers than slots"


# -- time and writing -------------------------------------------------------------------------------------------------


def test_the_transition_time_changes_only_with_the_status(make_wanted: MakeWanted, make_replica: MakeReplica) -> None:
    first = status_of(make_wanted(), make_replica(ready=False, engine=loading()))
    later = status_of(make_wanted(), make_replica(ready=False), previous=first, now=NOON + timedelta(minutes=1))
    ready = status_of(make_wanted(), make_replica(), previous=later, now=NOON + timedelta(minutes=2))
    times = [found.last_transition_time for each in (first, later, ready) if (found := condition(each, "Ready"))]
    assert times == ["2026-01-01T12:00:00Z", "2026-01-01T12:00:00Z", "2026-01-01T12:02:00Z"]


def test_figures_are_written_once_an_interval_and_decisions_at_once(
    make_wanted: MakeWanted, make_replica: MakeReplica, make_account: MakeAccount
) -> None:
    written = status_of(make_wanted(), make_replica(accounts={"gold": make_account(cached=1)}))
    trembling = status_of(make_wanted(), make_replica(accounts={"gold": make_account(cached=2)}), previous=written)
    assert written_status(written, trembling, figures_due=False) == written
    assert written_status(written, trembling, figures_due=True) == trembling
    decided = status_of(make_wanted(generation=2), make_replica(number=2), number=2, previous=written)
    assert written_status(written, decided, figures_due=False).revision == 2
    broken = status_of(make_wanted(), make_replica(ready=False), previous=written)
    assert told(written_status(written, broken, figures_due=False), "Ready")[0] == "False"


def test_the_first_figures_are_written_at_once(make_wanted: MakeWanted, make_replica: MakeReplica) -> None:
    none_yet = status_of(make_wanted(), make_replica(answers=False))
    now = status_of(make_wanted(), make_replica(), previous=none_yet)
    assert written_status(none_yet, now, figures_due=False).tiers[0].held_blocks == 0


# -- a cluster's own words ---------------------------------------------------------------------------------------------

CONFLICT = Finding(ConditionType.STALLED, ConditionStatus.TRUE, Reason.FIELD_CONFLICT, "somebody has it")


def test_a_rollout_is_told_and_does_not_make_a_pool_unready(make_wanted: MakeWanted, make_replica: MakeReplica) -> None:
    snapshot = Snapshot(replicas=(make_replica("a"), make_replica("b")), rollout="1 pod is being replaced")
    status = pool_status(make_wanted(), wire.Revision("uid-1", 1), {"gold": 50, "bronze": 30}, snapshot, None, NOON)
    assert told(status, "Reconciling") == ("True", "RollingOut")
    assert told(status, "Ready") == ("True", "AllReplicasReady")


def test_a_blocked_pool_keeps_its_figures_and_says_that_what_ran_still_serves(
    make_wanted: MakeWanted, make_replica: MakeReplica
) -> None:
    before = status_of(make_wanted(), make_replica())
    blocked = blocked_status(2, CONFLICT, 1, 1, before, NOON + timedelta(hours=1))
    assert told(blocked, "Stalled") == ("True", "FieldConflict")
    assert told(blocked, "Ready") == ("True", "AllReplicasReady")
    assert told(blocked, "QuotaEnforced") == told(before, "QuotaEnforced")
    assert blocked.tiers == before.tiers
    assert blocked.observed_generation == 2
    assert {each.observed_generation for each in blocked.conditions} == {2}
    ready, quota = condition(blocked, "Ready"), condition(before, "Ready")
    assert ready is not None
    assert quota is not None
    assert ready.last_transition_time == quota.last_transition_time


@pytest.mark.parametrize(("replicas", "ready"), [(0, 0), (2, 1), (1, 0)])
def test_a_blocked_pool_with_too_few_replicas_is_not_ready_for_that_reason(replicas: int, ready: int) -> None:
    blocked = blocked_status(1, CONFLICT, replicas, ready, None, NOON)
    assert told(blocked, "Ready") == ("False", "FieldConflict")
    assert (blocked.replicas, blocked.ready_replicas) == (replicas, ready)


def test_a_blocked_pool_is_never_reconciling_too(make_wanted: MakeWanted) -> None:
    starting = status_of(make_wanted())
    assert condition(starting, "Reconciling") is not None
    assert condition(blocked_status(1, CONFLICT, 0, 0, starting, NOON), "Reconciling") is None


def test_a_closer_look_counts_before_what_is_derived(make_wanted: MakeWanted, make_replica: MakeReplica) -> None:
    stale = Finding(ConditionType.METRICS_FRESH, ConditionStatus.FALSE, Reason.STALE, "a is silent")
    status = pool_status(
        make_wanted(),
        wire.Revision("uid-1", 1),
        {"gold": 50, "bronze": 30},
        Snapshot(replicas=(make_replica(),)),
        None,
        NOON,
        overrides=[stale],
    )
    assert told(status, "MetricsFresh") == ("False", "Stale")
    assert len(status.conditions) == len({each.type for each in status.conditions})
