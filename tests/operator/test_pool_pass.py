"""One look at one pool: what its status says, what is written and when, and when it is looked at again."""

import copy
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cacheaware_api import wire
from cacheaware_api.testing_time import standing_still
from cacheaware_operator.cluster_store import PoolKey
from cacheaware_operator.errors import ApiRefused
from cacheaware_operator.kinds import CONFIG_MAP, DEPLOYMENT, EVENT, OWNED, POD, POOL, SECRET
from cacheaware_operator.metrics import Metrics
from cacheaware_operator.pool_pass import (
    ACKNOWLEDGED_SECONDS,
    BLOCKED_SECONDS,
    FIGURES_SECONDS,
    LONGEST_ACKNOWLEDGED_SECONDS,
    NOT_READY_SECONDS,
    PAUSED,
    PoolPass,
)
from cacheaware_operator.testing_cluster import FakeCluster, pod_of
from cacheaware_operator.testing_rebalance import loop, reuse_page

CHAT = PoolKey("default", "chat")
STATUS = "PATCH cacheawarepools/chat/status"
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wall(self) -> datetime:
        return BEGIN + timedelta(seconds=self.now)


class Bench:
    """A pool of two replicas, and an operator that looks at it."""

    def __init__(self, there: FakeCluster, clock: Clock, spec: dict[str, Any]) -> None:
        self.there = there
        self.clock = clock
        self.spec = spec
        self.metrics = Metrics()
        self.put_pool()
        self.restart()

    def restart(self) -> None:
        self.cluster = self.there.cluster()
        self.look = PoolPass(self.cluster, self.metrics, self.clock.wall)

    def put_pool(self, **annotations: str) -> None:
        known = self.there.find(POOL, "chat") or {}
        metadata = {"name": "chat", "namespace": "default", "annotations": annotations}
        written = {"metadata": metadata, "spec": copy.deepcopy(self.spec)}
        self.there.put(POOL, {**written, **({"status": known["status"]} if "status" in known else {})})

    def put_pods(self, *, ready: bool = True) -> None:
        for name in ("chat-0", "chat-1"):
            self.there.put(POD, pod_of("chat", name, ready=ready))

    async def run(self) -> float | None:
        """One look, after the watches told everything."""
        for kind in (POOL, POD, *OWNED):
            found = [each for path, each in self.there.objects.items() if f"/{kind.plural}/" in path]
            ours = [each for each in found if kind == POOL or each["metadata"].get("labels")]
            self.cluster.store.replace(kind, None, copy.deepcopy(ours), 10**9)
        with standing_still():  # sidecars are asked for two seconds
            return await self.look.run(CHAT)

    async def settle(self) -> None:
        """Ready, and every engine has acknowledged the view."""
        self.put_pods()
        for _ in range(3):
            await self.run()
        assert self.condition("Ready") == ("True", "AllReplicasReady")
        assert self.condition("Reconciling") is None
        self.there.writes.clear()

    @property
    def status(self) -> dict[str, Any]:
        found = self.there.find(POOL, "chat")
        assert found is not None
        status: dict[str, Any] = found["status"]
        return status

    def condition(self, kind: str) -> tuple[str, str] | None:
        found = (each for each in self.status["conditions"] if each["type"] == kind)
        return next(((each["status"], each["reason"]) for each in found), None)

    @property
    def events(self) -> list[str]:
        return [each["reason"] for path, each in self.there.objects.items() if f"/{EVENT.plural}/" in path]

    def metric(self, name: str) -> str:
        """The sum over its labels."""
        lines = [line for line in self.metrics.page().decode().splitlines() if line.startswith(f"{name}{{")]
        return str(sum(float(line.split()[-1]) for line in lines)) if lines else "absent"


@pytest.fixture
async def bench(spec: dict[str, Any]) -> AsyncIterator[Bench]:
    spec["replicas"] = 2
    spec["rebalancing"] = {"mode": "Off"}
    clock = Clock()
    async with FakeCluster(clock) as there:
        yield Bench(there, clock, spec)


# -- from nothing to ready --------------------------------------------------------------------------------------------


async def test_a_pool_becomes_ready_and_its_status_tells_the_way(bench: Bench) -> None:
    await bench.run()
    assert (bench.condition("Ready") or ("",))[0] == "False"
    assert bench.metric("cacheaware_pool_ready") == "0.0"
    bench.put_pods(ready=False)
    await bench.run()
    assert (bench.status["replicas"], bench.status["readyReplicas"]) == (2, 0)
    await bench.settle()
    assert (bench.status["replicas"], bench.status["readyReplicas"], bench.status["revision"]) == (2, 2, 1)
    assert bench.metric("cacheaware_pool_ready") == "1.0"
    assert bench.events == ["AllReplicasReady"]


async def test_a_settled_pool_is_written_no_more(bench: Bench) -> None:
    await bench.settle()
    for _ in range(5):
        bench.clock.now += FIGURES_SECONDS
        await bench.run()
    assert bench.there.writes == []


async def test_a_restart_is_no_change(bench: Bench) -> None:
    await bench.settle()
    before = copy.deepcopy(bench.there.objects)
    bench.restart()
    await bench.run()
    assert bench.there.objects == before


async def test_a_transition_is_stamped_when_it_was_and_not_later(bench: Bench) -> None:
    await bench.settle()
    (ready,) = (each for each in bench.status["conditions"] if each["type"] == "Ready")
    bench.clock.now += 3600
    bench.spec["tiers"][0]["weight"] = 5
    bench.put_pool()
    await bench.settle()
    (still,) = (each for each in bench.status["conditions"] if each["type"] == "Ready")
    assert still["lastTransitionTime"] == ready["lastTransitionTime"]
    assert still["observedGeneration"] == 2


# -- when it is looked at again ---------------------------------------------------------------------------------------


async def test_a_settled_pool_is_looked_at_when_figures_are_due(bench: Bench) -> None:
    await bench.settle()
    bench.clock.now += FIGURES_SECONDS
    assert await bench.run() == FIGURES_SECONDS
    bench.clock.now += 50
    assert await bench.run() == FIGURES_SECONDS - 50


async def test_a_pool_without_all_its_pods_is_looked_at_soon(bench: Bench) -> None:
    assert await bench.run() == NOT_READY_SECONDS


async def test_an_acknowledgement_is_awaited_less_and_less_often(bench: Bench) -> None:
    for name in ("chat-0", "chat-1"):
        bench.there.sidecar(name).acknowledges = False
    bench.put_pods()
    waits = [await bench.run() for _ in range(12)]
    assert waits[0] == ACKNOWLEDGED_SECONDS
    assert waits == sorted(waits)  # type: ignore[type-var]  # none is None
    assert waits[-1] == LONGEST_ACKNOWLEDGED_SECONDS
    for name in ("chat-0", "chat-1"):
        bench.there.sidecar(name).acknowledges = True
    await bench.run()
    bench.spec["tiers"][0]["weight"] = 5
    bench.put_pool()
    assert await bench.run() == ACKNOWLEDGED_SECONDS


# -- edits ------------------------------------------------------------------------------------------------------------


async def test_an_edit_of_quotas_is_two_writes_and_the_sidecars_are_told_at_once(bench: Bench) -> None:
    await bench.settle()
    bench.spec["tiers"][0]["quota"]["nominalPercent"] = 60
    bench.put_pool()
    await bench.run()
    assert bench.there.writes == ["PATCH configmaps/chat-view", STATUS]
    assert [bench.there.sidecar(name).told for name in ("chat-0", "chat-1")] == [[1, 2]] * 2
    assert bench.condition("Reconciling") is not None
    await bench.run()
    assert bench.condition("Reconciling") is None
    assert bench.status["revision"] == 2
    assert {tier["name"]: tier["effectivePercent"] for tier in bench.status["tiers"]} == {"gold": 60, "bronze": 30}


async def test_figures_are_written_once_an_interval_and_with_whatever_is_written_anyway(bench: Bench) -> None:
    def held() -> int:
        return sum(tier["heldBlocks"] for tier in bench.status["tiers"])

    await bench.settle()
    for name in ("chat-0", "chat-1"):
        bench.there.sidecar(name).held = 10
    await bench.run()
    assert bench.there.writes == []
    bench.clock.now += FIGURES_SECONDS
    await bench.run()
    assert (bench.there.writes, held()) == ([STATUS], 40)
    bench.there.sidecar("chat-0").held = 0
    bench.there.put(POD, pod_of("chat", "chat-1", ready=False))
    await bench.run()
    assert held() == 0  # of the ready replica; nothing is left of the other one


# -- what a pool refers to --------------------------------------------------------------------------------------------


async def test_a_missing_secret_stalls_the_pool_until_it_is_there(bench: Bench) -> None:
    bench.spec["identity"] = {"type": "APIKeys", "apiKeys": {"secretRef": {"name": "keys"}}}
    bench.put_pool()
    assert await bench.run() == BLOCKED_SECONDS
    assert bench.condition("Stalled") == ("True", "SecretNotFound")
    assert [write for write in bench.there.writes if "events" not in write] == [STATUS]
    bench.there.put(SECRET, {"metadata": {"name": "keys", "namespace": "default"}, "data": {}})
    await bench.run()
    assert bench.condition("Stalled") is None
    assert bench.there.find(DEPLOYMENT, "chat") is not None


async def test_the_text_of_a_public_prefix_reaches_the_view(bench: Bench) -> None:
    bench.spec["publicPercent"] = 10
    reference = {"name": "prompts", "key": "assistant.txt"}
    bench.spec["publicPrefixes"] = [{"name": "assistant", "configMapKeyRef": reference}]
    bench.put_pool()
    bench.there.put(
        CONFIG_MAP,
        {"metadata": {"name": "prompts", "namespace": "default"}, "data": {"assistant.txt": "You are kind."}},
    )
    await bench.settle()
    view = bench.there.sidecar("chat-0").view
    assert view is not None
    assert view.public_prefixes == (wire.ViewPrefix("assistant", "You are kind."),)


# -- blocked ----------------------------------------------------------------------------------------------------------


async def test_a_pool_that_cannot_be_as_it_is_wanted_goes_on_as_it_was(bench: Bench) -> None:
    await bench.settle()
    deployment = bench.there.find(DEPLOYMENT, "chat")
    bench.look.schema_problem = "the installed CRD lacks spec.tiers: apply it"
    bench.spec["tiers"][0]["quota"]["nominalPercent"] = 60
    bench.put_pool()
    await bench.run()
    assert bench.condition("Stalled") == ("True", "SchemaOutdated")
    assert bench.condition("Ready") == ("True", "AllReplicasReady")
    assert bench.status["revision"] == 1
    assert bench.there.find(DEPLOYMENT, "chat") == deployment
    assert bench.there.sidecar("chat-0").told == [1]


async def test_an_object_that_no_schema_checked_is_refused_by_field(bench: Bench) -> None:
    bench.spec["tiers"][0]["quota"]["nominalPercent"] = 95
    bench.put_pool()
    await bench.run()
    assert bench.condition("Stalled") == ("True", "InvalidSpec")
    assert bench.there.find(DEPLOYMENT, "chat") is None


async def test_a_paused_pool_is_left_as_it_is(bench: Bench) -> None:
    await bench.settle()
    bench.spec["tiers"][0]["quota"]["nominalPercent"] = 60
    bench.put_pool(**{PAUSED: "true"})
    bench.there.remove(DEPLOYMENT, "chat")
    assert await bench.run() is None
    assert bench.there.writes == []
    bench.put_pool()
    await bench.run()
    assert bench.there.find(DEPLOYMENT, "chat") is not None


async def test_a_status_that_cannot_be_written_is_an_error_to_try_again(bench: Bench) -> None:
    path = f"PATCH {POOL.path('default', 'chat')}/status"
    bench.there.refusals[path] = (500, {"reason": "InternalError", "message": "etcd is away"})
    with pytest.raises(ApiRefused, match="etcd is away"):
        await bench.run()
    del bench.there.refusals[path]
    await bench.settle()


async def test_an_event_that_cannot_be_written_is_logged_and_holds_nothing_up(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.there.refusals[f"POST {EVENT.path('default')}"] = (403, {"reason": "Forbidden", "message": "no rights"})
    await bench.settle()
    assert bench.events == []
    assert "could not write an Event" in caplog.text


async def test_a_pool_that_is_gone_is_forgotten(bench: Bench) -> None:
    await bench.settle()
    bench.there.remove(POOL, "chat")
    assert await bench.run() is None
    assert bench.metric("cacheaware_pool_ready") == "absent"
    assert bench.there.writes == []


# -- rebalancing ------------------------------------------------------------------------------------------------------


async def rounds(bench: Bench, count: int) -> None:
    """Bronze walks over more blocks than its share holds, again and again; gold asks for nothing."""
    for number in range(count):
        for name in ("chat-0", "chat-1"):
            bench.there.sidecar(name).page = reuse_page("bronze", loop(5000.0 * (number + 1), 450.0))
        bench.clock.now += 30
        await bench.run()
        await bench.run()  # the acknowledgement


async def test_quota_moves_and_status_event_metric_and_view_tell_the_same(bench: Bench) -> None:
    bench.spec["rebalancing"] = {"mode": "Auto", "interval": "30s"}
    bench.put_pool()
    await bench.settle()
    await rounds(bench, 4)
    moves = bench.status["lastRebalance"]["moves"]
    effective = {tier["name"]: tier["effectivePercent"] for tier in bench.status["tiers"]}
    assert {(move["from"], move["to"]) for move in moves} == {("gold", "bronze")}
    assert effective["bronze"] > 30
    assert sum(effective.values()) == 80
    view = bench.there.sidecar("chat-0").view
    assert view is not None
    assert {tier.name: tier.effective_percent for tier in view.tiers} == effective
    assert "QuotaMoved" in bench.events
    assert float(bench.metric("cacheaware_quota_moves_total")) >= 1


async def test_a_dry_run_moves_nothing(bench: Bench) -> None:
    bench.spec["rebalancing"] = {"mode": "DryRun", "interval": "30s"}
    bench.put_pool()
    await bench.settle()
    await rounds(bench, 4)
    assert "DryRun" in bench.status["lastRebalance"]["moves"][0]["reason"]
    assert bench.status["revision"] == 1
    assert "QuotaMoved" not in bench.events


async def test_a_round_is_held_once_an_interval(bench: Bench) -> None:
    bench.spec["rebalancing"] = {"mode": "Auto", "interval": "30s"}
    bench.put_pool()
    await bench.settle()
    before = float(bench.metric("cacheaware_rebalance_skipped_total"))
    bench.clock.now += 29
    assert await bench.run() == pytest.approx(1.0)
    assert float(bench.metric("cacheaware_rebalance_skipped_total")) == before
    bench.clock.now += 1
    await bench.run()
    assert float(bench.metric("cacheaware_rebalance_skipped_total")) == before + 1


@pytest.mark.parametrize(
    "before",
    [
        pytest.param({"mode": "Off"}, id="it was off"),
        pytest.param({"mode": "Auto", "interval": "10m"}, id="it was longer"),
    ],
)
async def test_a_new_interval_counts_from_the_edit_on(bench: Bench, before: dict[str, str]) -> None:
    bench.spec["rebalancing"] = before
    bench.put_pool()
    await bench.settle()
    bench.spec["rebalancing"] = {"mode": "Auto", "interval": "30s"}
    bench.put_pool()
    bench.clock.now += 40
    assert await bench.run() == 30
    held = float(bench.metric("cacheaware_rebalance_skipped_total"))
    bench.clock.now += 30
    assert await bench.run() == 30
    assert float(bench.metric("cacheaware_rebalance_skipped_total")) == held + 1


async def test_turning_it_off_gives_every_tier_its_nominal_share_back(bench: Bench) -> None:
    bench.spec["rebalancing"] = {"mode": "Auto", "interval": "30s"}
    bench.put_pool()
    await bench.settle()
    await rounds(bench, 4)
    bench.spec["rebalancing"] = {"mode": "Off"}
    bench.put_pool()
    await bench.run()
    assert {tier["name"]: tier["effectivePercent"] for tier in bench.status["tiers"]} == {"gold": 50, "bronze": 30}
