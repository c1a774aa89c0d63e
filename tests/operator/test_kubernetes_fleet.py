"""A pool as pods: what is applied, what is left alone, what is taken away, and what the sidecars are told."""

import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from cacheaware_api.testing_time import standing_still
from cacheaware_operator.cluster.objects import Discovered, OptionalKind
from cacheaware_operator.errors import PoolBlocked, PoolGone
from cacheaware_operator.fleet import Snapshot
from cacheaware_operator.kinds import CONFIG_MAP, DEPLOYMENT, OPTIONAL, OWNED, POD, POOL, SECRET, Kind
from cacheaware_operator.kubernetes_fleet import CONFLICT_REST, TOLD_AGAIN_AFTER, Cluster, FleetMemory, KubernetesFleet
from cacheaware_operator.plan import PoolPlan, Wanted, plan_pool
from cacheaware_operator.testing_cluster import FakeCluster, pod_of

MakeWanted = Callable[..., Wanted]
ACCOUNT = next(kind for kind in OWNED if kind.kind == "ServiceAccount")
SERVICE = next(kind for kind in OWNED if kind.kind == "Service")
POD_MONITOR, RULE = OPTIONAL[OptionalKind.POD_MONITOR], OPTIONAL[OptionalKind.PROMETHEUS_RULE]
MONITORED = Discovered(frozenset(OptionalKind))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """One pool, chat, looked at again and again by an operator that remembers."""

    def __init__(self, there: FakeCluster, clock: Clock, wanted: Wanted) -> None:
        self.there = there
        self.clock = clock
        self.wanted = wanted
        self.cluster: Cluster = there.cluster()
        self.memory = FleetMemory()
        self.discovered = Discovered()

    async def pass_(self) -> tuple[Snapshot, PoolPlan]:
        """Observe and apply."""
        self.watch()
        fleet = KubernetesFleet(self.cluster, self.wanted, self.memory, self.discovered)
        with standing_still():  # sidecars are asked for two seconds
            snapshot = await fleet.observe()
            plan = plan_pool(self.wanted, snapshot)
            await fleet.apply(plan)
        self.watch()
        return snapshot, plan

    async def writes(self) -> list[str]:
        """Of one more pass."""
        self.there.writes.clear()
        await self.pass_()
        return list(self.there.writes)

    def watch(self) -> None:
        """What watches would tell by now."""
        kinds = (POD, *OWNED, POD_MONITOR, RULE)
        for kind in kinds:
            found = [each for path, each in self.there.objects.items() if f"/{kind.plural}/" in path]
            labelled = [each for each in found if "cacheaware.dev/pool" in (each["metadata"].get("labels") or {})]
            self.cluster.store.replace(kind, None, copy.deepcopy(labelled), 10**9)

    def put_pods(self, count: int, *, ready: bool = True) -> None:
        for number in range(count):
            self.there.put(POD, pod_of("chat", f"chat-{number}", ready=ready))


@pytest.fixture
async def bench(make_wanted: MakeWanted, spec: dict[str, Any]) -> AsyncIterator[Bench]:
    clock = Clock()
    async with FakeCluster(clock) as there:
        pool = there.put(POOL, {"metadata": {"name": "chat", "namespace": "default", "uid": "uid-1"}, "spec": spec})
        assert pool["metadata"]["uid"] == "uid-1"
        yield Bench(there, clock, make_wanted(spec))


def owned_by(bench: Bench, kind: Kind, name: str, **more: Any) -> dict[str, Any]:
    owner = {"kind": "CacheAwarePool", "name": "chat", "uid": bench.wanted.uid, "controller": True}
    labels = {"cacheaware.dev/pool": "chat"}
    metadata = {"name": name, "namespace": "default", "labels": labels, "ownerReferences": [owner]}
    return bench.there.put(kind, {"apiVersion": "v1", "kind": kind.kind, "metadata": metadata, **more})


# -- applying ---------------------------------------------------------------------------------------------------------


async def test_everything_a_pool_consists_of_is_applied_once(bench: Bench) -> None:
    await bench.pass_()
    assert sorted({path.split("/")[-2] for path in bench.there.objects} - {"cacheawarepools"}) == [
        "configmaps",
        "deployments",
        "networkpolicies",
        "poddisruptionbudgets",
        "secrets",
        "serviceaccounts",
        "services",
    ]
    assert len(bench.there.writes) == 8  # there are two Services
    assert await bench.writes() == []


async def test_what_pods_mount_is_there_before_there_are_pods(bench: Bench) -> None:
    await bench.pass_()
    order = [write.split()[1].split("/")[0] for write in bench.there.writes]
    assert order.index("deployments") > max(order.index("secrets"), order.index("configmaps"))


async def test_only_what_drifted_is_applied_again(bench: Bench) -> None:
    await bench.pass_()
    service = bench.there.find(SERVICE, "chat")
    assert service is not None
    service["spec"]["ports"][0]["port"] = 1
    bench.there.put(SERVICE, service)
    assert await bench.writes() == ["PATCH services/chat"]


async def test_only_what_an_edit_concerns_is_applied(
    bench: Bench, make_wanted: MakeWanted, spec: dict[str, Any]
) -> None:
    await bench.pass_()
    spec["tiers"][0]["quota"]["nominalPercent"] = 60
    bench.wanted = make_wanted(spec)
    assert await bench.writes() == ["PATCH configmaps/chat-view"]


async def test_what_others_add_beside_our_fields_stays_and_is_no_drift(bench: Bench) -> None:
    await bench.pass_()
    deployment = bench.there.find(DEPLOYMENT, "chat")
    assert deployment is not None
    deployment["spec"]["minReadySeconds"] = 5
    deployment["metadata"]["annotations"] = {"somebody": "else"}
    bench.there.put(DEPLOYMENT, deployment)
    assert await bench.writes() == []
    assert bench.there.find(DEPLOYMENT, "chat")["metadata"]["annotations"] == {"somebody": "else"}  # type: ignore[index]  # it is there


async def test_what_was_deleted_is_put_back_with_the_same_keys(bench: Bench) -> None:
    await bench.pass_()
    bench.there.remove(SERVICE, "chat")
    bench.there.remove(CONFIG_MAP, "chat-view")
    keys = bench.there.find(SECRET, "chat-internal")
    assert sorted(await bench.writes()) == ["PATCH configmaps/chat-view", "PATCH services/chat"]
    assert bench.there.find(SECRET, "chat-internal") == keys


async def test_a_restarted_operator_changes_nothing(bench: Bench) -> None:
    await bench.pass_()
    before = copy.deepcopy(bench.there.objects)
    bench.memory, bench.cluster = FleetMemory(), bench.there.cluster()
    await bench.pass_()
    assert bench.there.objects == before


# -- what is not ours -------------------------------------------------------------------------------------------------


async def test_nothing_is_written_where_one_object_of_our_names_is_anothers(bench: Bench) -> None:
    bench.there.put(SERVICE, {"metadata": {"name": "chat", "namespace": "default"}, "spec": {}})
    with pytest.raises(PoolBlocked, match="Service chat exists and is not this pool's") as blocked:
        await bench.pass_()
    assert blocked.value.reason == "FieldConflict"
    assert bench.there.writes == []


async def test_a_field_of_another_is_never_forced_and_the_rest_is_applied(bench: Bench) -> None:
    await bench.pass_()
    path = DEPLOYMENT.path("default", "chat")
    deployment = bench.there.find(DEPLOYMENT, "chat")
    assert deployment is not None
    deployment["spec"]["paused"] = True
    deployment["spec"]["selector"] = {"matchLabels": {"a": "b"}}
    bench.there.put(DEPLOYMENT, deployment)
    bench.there.foreign[path] = ("kubectl-edit", "spec.selector")
    bench.there.remove(SERVICE, "chat")
    bench.there.writes.clear()
    with pytest.raises(PoolBlocked, match=r"spec\.selector of Deployment chat is managed by kubectl-edit"):
        await bench.pass_()
    assert sorted(bench.there.writes) == ["PATCH deployments/chat", "PATCH services/chat"]
    assert bench.there.find(DEPLOYMENT, "chat") == bench.there.objects[path]


async def test_a_conflict_is_tried_again_after_a_rest_and_not_before(bench: Bench) -> None:
    await bench.pass_()
    path = DEPLOYMENT.path("default", "chat")
    bench.there.objects[path]["spec"]["selector"] = {}
    bench.there.objects[path]["metadata"]["resourceVersion"] = "999"
    bench.there.foreign[path] = ("kubectl-edit", "spec.selector")

    async def tries() -> int:
        bench.there.writes.clear()
        with pytest.raises(PoolBlocked):
            await bench.pass_()
        return len(bench.there.writes)

    assert [await tries(), await tries()] == [1, 0]
    bench.clock.now += CONFLICT_REST
    assert [await tries(), await tries()] == [1, 0]
    bench.clock.now += CONFLICT_REST  # the second rest is longer
    assert await tries() == 0
    del bench.there.foreign[path]
    bench.clock.now += CONFLICT_REST
    assert await bench.writes() == ["PATCH deployments/chat"]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda pool: pool["metadata"].update(uid="uid-2"), id="another of its name"),
        pytest.param(lambda pool: pool["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"), id="it ends"),
    ],
)
async def test_a_pool_that_is_gone_gets_no_objects(bench: Bench, change: Callable[[dict[str, Any]], None]) -> None:
    change(bench.there.objects[POOL.path("default", "chat")])
    with pytest.raises(PoolGone):
        await bench.pass_()
    assert bench.there.writes == []


# -- what is needed no more -------------------------------------------------------------------------------------------


async def test_our_service_account_goes_when_the_pool_names_one_of_its_own(
    bench: Bench, make_wanted: MakeWanted, spec: dict[str, Any]
) -> None:
    await bench.pass_()
    spec["podTemplate"] = {"serviceAccountName": "mine"}
    bench.wanted = make_wanted(spec)
    assert sorted(await bench.writes()) == ["DELETE serviceaccounts/chat", "PATCH deployments/chat"]
    assert bench.there.find(ACCOUNT, "chat") is None
    assert await bench.writes() == []


async def test_monitors_that_are_built_no_more_go(bench: Bench) -> None:
    bench.discovered = MONITORED
    await bench.pass_()
    assert bench.there.find(POD_MONITOR, "chat") is not None
    bench.discovered = Discovered()
    assert sorted(await bench.writes()) == ["DELETE podmonitors/chat", "DELETE prometheusrules/chat"]
    assert await bench.writes() == []


async def test_what_an_earlier_version_of_the_operator_made_goes(bench: Bench) -> None:
    await bench.pass_()
    owned_by(bench, SERVICE, "chat-of-an-earlier-release")
    assert await bench.writes() == ["DELETE services/chat-of-an-earlier-release"]


async def test_what_only_carries_our_label_stays(bench: Bench) -> None:
    await bench.pass_()
    mine = owned_by(bench, SERVICE, "mine")
    del bench.there.objects[SERVICE.path("default", "mine")]["metadata"]["ownerReferences"]
    assert await bench.writes() == []
    assert bench.there.find(SERVICE, mine["metadata"]["name"]) is not None


async def test_what_may_not_be_deleted_stays_and_keeps_nobody_from_serving(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.put_pods(1)
    await bench.pass_()
    owned_by(bench, SERVICE, "old")
    forbidden = (403, {"reason": "Forbidden", "message": "services is forbidden"})
    bench.there.refusals[f"DELETE {SERVICE.path('default', 'old')}"] = forbidden
    bench.there.sidecar("chat-0").view = None
    bench.clock.now += TOLD_AGAIN_AFTER
    await bench.pass_()
    assert bench.there.sidecar("chat-0").told == [1, 1]
    assert "services is forbidden" in caplog.text


# -- what is there ----------------------------------------------------------------------------------------------------


async def test_replicas_are_the_pods_that_count_in_the_order_of_their_names(bench: Bench) -> None:
    for name in ("chat-b", "chat-a"):
        bench.there.put(POD, pod_of("chat", name, ready=name == "chat-a"))
    ends = pod_of("chat", "chat-c")
    ends["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    bench.there.put(POD, ends)
    bench.there.put(POD, pod_of("other", "other-a"))
    snapshot, _ = await bench.pass_()
    assert [(replica.name, replica.ready) for replica in snapshot.replicas] == [("chat-a", True), ("chat-b", False)]


async def test_a_rollout_is_told_while_old_pods_are_there(bench: Bench) -> None:
    await bench.pass_()
    deployment = bench.there.find(DEPLOYMENT, "chat")
    assert deployment is not None
    bench.there.put(DEPLOYMENT, {**deployment, "status": {"replicas": 3, "updatedReplicas": 1}})
    snapshot, _ = await bench.pass_()
    assert snapshot.rollout == "2 pods of an older version are being replaced"


async def test_the_number_of_a_view_goes_on_from_its_config_map(bench: Bench) -> None:
    _, plan = await bench.pass_()
    bench.memory, bench.cluster = FleetMemory(), bench.there.cluster()
    snapshot, again = await bench.pass_()
    assert snapshot.view == plan.view
    assert again.view.revision.number == 1


async def test_a_view_that_somebody_deleted_keeps_its_number(bench: Bench) -> None:
    _, plan = await bench.pass_()
    bench.there.remove(CONFIG_MAP, "chat-view")
    _, again = await bench.pass_()
    assert again.view.revision == plan.view.revision


# -- telling ----------------------------------------------------------------------------------------------------------


async def test_sidecars_are_told_the_view_once(bench: Bench) -> None:
    bench.put_pods(2)
    for _ in range(3):
        await bench.pass_()
    assert [bench.there.sidecar(f"chat-{number}").told for number in range(2)] == [[1], [1]]


async def test_an_engine_that_does_not_acknowledge_is_told_again_after_a_while(bench: Bench) -> None:
    bench.put_pods(1)
    bench.there.sidecar("chat-0").acknowledges = False
    for _ in range(3):
        await bench.pass_()
    assert bench.there.sidecar("chat-0").told == [1]
    bench.clock.now += TOLD_AGAIN_AFTER
    await bench.pass_()
    assert bench.there.sidecar("chat-0").told == [1, 1]


async def test_why_a_sidecar_refuses_a_view_is_told_of_its_replica(bench: Bench) -> None:
    bench.put_pods(1)
    bench.there.sidecar("chat-0").refuses = "too many tiers"
    await bench.pass_()
    snapshot, _ = await bench.pass_()
    assert "too many tiers" in (snapshot.replicas[0].problem or "")


async def test_a_sidecar_that_does_not_answer_keeps_no_other_from_being_told(bench: Bench) -> None:
    bench.put_pods(3)
    bench.there.sidecar("chat-1").gone = True
    snapshot, _ = await bench.pass_()
    assert [replica.status is None for replica in snapshot.replicas] == [False, True, False]
    assert [bench.there.sidecar(f"chat-{number}").told for number in range(3)] == [[1], [], [1]]


async def test_no_sidecar_is_told_a_view_that_its_config_map_does_not_have(bench: Bench) -> None:
    await bench.pass_()
    bench.put_pods(1)
    path = CONFIG_MAP.path("default", "chat-view")
    bench.there.objects[path]["data"] = {"view.json": "{}"}
    bench.there.objects[path]["metadata"]["resourceVersion"] = "999"
    bench.there.foreign[path] = ("kubectl-edit", "data")
    with pytest.raises(PoolBlocked):
        await bench.pass_()
    assert bench.there.sidecar("chat-0").told == []


async def test_pages_are_of_ready_replicas_only(bench: Bench) -> None:
    bench.there.put(POD, pod_of("chat", "chat-0"))
    bench.there.put(POD, pod_of("chat", "chat-1", ready=False))
    bench.there.sidecar("chat-0").page = "a_metric 1\n"
    bench.watch()
    with standing_still():
        pages = await KubernetesFleet(bench.cluster, bench.wanted, bench.memory, bench.discovered).pages()
    assert {name: (page.text, page.at) for name, page in pages.items()} == {"chat-0": ("a_metric 1\n", 1000.0)}
