"""Pools under a running operator, on a real API server. Tests say what a node would: that pods are ready, and so on."""

from __future__ import annotations

import base64
import copy
import json

import pytest
from e2e.cluster import APPLY_PATCH, Object
from e2e.operators import RunningOperator, running_operator, settings_for
from e2e.space import DEPLOYMENT, OWNED, POOL, SPEC, Space, looks, metrics_page, pool
from e2e.stand_ins import StandInSidecars

from cacheaware_operator.kubernetes_api import FIELD_MANAGER


@pytest.fixture
def ready(space: Space, operator: RunningOperator) -> list[str]:
    """A pool with two ready replicas: the names of its pods."""
    space.apply(pool())
    return space.become_ready()


# -- from apply to Ready ----------------------------------------------------------------------------------------------


def test_a_pool_becomes_ready_with_few_writes_and_says_so(
    space: Space, sidecars: StandInSidecars, operator: RunningOperator
) -> None:
    space.apply(pool())
    names = space.become_ready()
    assert operator.process.writes <= 25
    status = space.get(POOL)["status"]
    assert (status["replicas"], status["readyReplicas"], status["revision"], status["tierCount"]) == (2, 2, 1, 2)
    assert status["observedGeneration"] == space.get(POOL)["metadata"]["generation"]
    assert space.condition("Ready") == ("True", "AllReplicasReady")
    assert space.condition("QuotaEnforced") == ("True", "EnforcedByEngine")
    assert space.condition("IdentityEnforced") == ("False", "Open")
    view = json.loads(space.get("/api/v1/{}/configmaps/chat-view")["data"]["view.json"])
    assert view["revision"]["number"] == 1
    token = base64.b64decode(space.get("/api/v1/{}/secrets/chat-internal")["data"]["control-token"]).decode()
    for name in names:
        assert [told.revision.number for told in sidecars.of(name).views] == [1]
        assert sidecars.of(name).tokens == {f"Bearer {token}"}
    assert ("AllReplicasReady", "Ready is True") in space.events()
    space.kubectl("wait", "--for=condition=Ready", "cap/chat", "--timeout=60s")
    page = metrics_page(operator)
    assert f'cacheaware_pool_ready{{namespace="{space.name}",pool="chat"}} 1.0' in page


def test_the_spec_stays_as_it_was_applied_and_a_second_apply_changes_nothing(
    space: Space, operator: RunningOperator, ready: list[str]
) -> None:
    assert space.get(POOL)["spec"] == SPEC
    metadata = space.get(POOL)["metadata"]
    assert "finalizers" not in metadata
    assert "kopf" not in json.dumps(metadata.get("annotations", {}))
    before, writes = space.versions(), operator.process.writes
    space.apply(pool())
    space.patch(POOL, {"metadata": {"labels": {"touched": "yes"}}})  # something for the operator to look at
    space.wait("a look at the pool", lambda: looks(operator) > 0)
    done = looks(operator)
    space.patch(POOL, {"metadata": {"labels": {"touched": "again"}}})
    space.wait("a further look at it", lambda: looks(operator) > done)
    after = space.versions()
    assert {path for path in after if after[path] != before[path]} <= {POOL}  # only the labels that we set
    assert operator.process.writes == writes


# -- edits ------------------------------------------------------------------------------------------------------------


def test_an_edit_of_quotas_reaches_every_sidecar_and_restarts_nothing(
    space: Space, sidecars: StandInSidecars, ready: list[str]
) -> None:
    template = space.get(DEPLOYMENT)["spec"]["template"]
    tiers = copy.deepcopy(SPEC["tiers"])
    tiers[0]["quota"]["nominalPercent"] = 60
    space.apply(pool(tiers=tiers))
    space.wait(
        "the new revision is acknowledged", lambda: space.get(POOL)["status"]["revision"] == 2 and space.settled()
    )
    for name in ready:
        last = sidecars.of(name).views[-1]
        assert last.revision.number == 2
        assert {tier.name: tier.quota.nominal_percent for tier in last.tiers} == {"gold": 60, "bronze": 30}
    assert space.get(DEPLOYMENT)["spec"]["template"] == template


def test_scaling_by_the_scale_subresource_survives_many_looks(space: Space, ready: list[str]) -> None:
    space.kubectl("scale", "cap/chat", "--replicas=5")
    for number in range(3):
        space.patch(POOL, {"metadata": {"labels": {"look": str(number)}}})
        space.wait("five replicas", lambda: space.get(DEPLOYMENT)["spec"]["replicas"] == 5)
    assert space.get(POOL)["spec"]["replicas"] == 5
    assert space.get(POOL)["status"]["selector"] == "cacheaware.dev/pool=chat"


def test_a_pool_of_no_replicas_is_ready(space: Space, operator: RunningOperator) -> None:
    space.apply(pool(replicas=0))
    space.wait("it is ready", lambda: space.condition("Ready") == ("True", "ScaledToZero"))
    assert space.settled()


def test_a_paused_pool_is_left_alone_until_it_is_resumed(space: Space, ready: list[str]) -> None:
    space.patch(POOL, {"metadata": {"annotations": {"cacheaware.dev/paused": "true"}}})
    space.kubectl("scale", "cap/chat", "--replicas=1")
    space.delete("/api/v1/{}/services/chat")
    other = pool("other")
    space.apply(other)  # the operator is at work meanwhile
    space.wait("the other pool", lambda: space.find("/apis/apps/v1/{}/deployments/other"))
    assert space.get(DEPLOYMENT)["spec"]["replicas"] == 2
    assert space.find("/api/v1/{}/services/chat") is None
    space.patch(POOL, {"metadata": {"annotations": {"cacheaware.dev/paused": None}}})
    space.wait("the service is back", lambda: space.find("/api/v1/{}/services/chat"))
    space.wait("it is scaled", lambda: space.get(DEPLOYMENT)["spec"]["replicas"] == 1)


# -- what others do ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", OWNED)
def test_a_deleted_child_is_put_back(space: Space, ready: list[str], path: str) -> None:
    uid = space.get(path)["metadata"]["uid"]
    secret = space.get("/api/v1/{}/secrets/chat-internal")["data"]
    space.delete(path)
    space.wait("it is back", lambda: (space.find(path) or {"metadata": {"uid": uid}})["metadata"]["uid"] != uid)
    if not path.endswith("chat-internal"):
        assert space.get("/api/v1/{}/secrets/chat-internal")["data"] == secret  # keys are made once


def test_a_changed_field_of_ours_is_set_back_and_one_of_others_stays(space: Space, ready: list[str]) -> None:
    path = "/api/v1/{}/services/chat-peers"
    service = space.get(path)
    service["spec"]["publishNotReadyAddresses"] = False
    service["metadata"]["labels"]["team"] = "search"
    answer = space.cluster.request("PUT", path.format(f"namespaces/{space.name}"), service, fieldManager=FIELD_MANAGER)
    assert answer.ok, answer.body
    space.wait("it is set back", lambda: space.get(path)["spec"].get("publishNotReadyAddresses") is True)
    assert space.get(path)["metadata"]["labels"]["team"] == "search"


def test_a_field_that_another_manager_took_is_never_forced(
    space: Space, operator: RunningOperator, ready: list[str]
) -> None:
    taken = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "chat"},
        "spec": {"replicas": 4},
    }
    space.patch(DEPLOYMENT, taken, APPLY_PATCH, fieldManager="somebody", force="true")
    space.wait("it is stalled", lambda: space.condition("Stalled") == ("True", "FieldConflict"))
    assert "somebody" in space.message("Stalled")
    assert ".spec.replicas" in space.message("Stalled")
    assert space.get(DEPLOYMENT)["spec"]["replicas"] == 4
    space.wait("it is told", lambda: "FieldConflict" in dict(space.events()))
    space.wait("the pods that were added are seen", lambda: space.get(POOL)["status"]["replicas"] == 4)
    writes = operator.process.writes
    for number in range(5):  # each look finds the conflict, and not one of them tries again at once
        space.patch(DEPLOYMENT, {"metadata": {"labels": {"look": str(number)}}})
    done = looks(operator)
    space.wait("a look", lambda: looks(operator) > done)
    assert operator.process.writes - writes <= 1
    given_up = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "chat"}}
    space.patch(DEPLOYMENT, given_up, APPLY_PATCH, fieldManager="somebody", force="true")
    space.wait("ours again", lambda: space.get(DEPLOYMENT)["spec"].get("replicas") == 2, 40)
    space.wait("no longer stalled", lambda: space.condition("Stalled") is None, 40)


def test_a_deployment_of_our_name_that_is_not_ours_is_not_touched(space: Space, operator: RunningOperator) -> None:
    labels = {"app": "other"}
    foreign = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "chat"},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "web", "image": "example.com/web:1"}]},
            },
        },
    }
    space.apply(foreign)
    before = space.get(DEPLOYMENT)["spec"]
    space.apply(pool())
    space.wait("it is stalled", lambda: space.condition("Stalled") == ("True", "FieldConflict"))
    assert "Deployment chat exists and is not this pool's" in space.message("Stalled")
    assert space.get(DEPLOYMENT)["spec"] == before
    assert [path for path in OWNED if path != DEPLOYMENT and space.find(path)] == []


def test_two_pools_never_touch_each_others_objects(space: Space, operator: RunningOperator) -> None:
    """`chat` and `chat-peers` both want a Service chat-peers: whoever comes second is told."""
    space.apply(pool(replicas=0))
    space.wait("the first is ready", lambda: space.condition("Ready") == ("True", "ScaledToZero"))
    before = space.get("/api/v1/{}/services/chat-peers")
    space.apply(pool("chat-peers", replicas=0))
    space.wait("the second is stalled", lambda: space.condition("Stalled", "chat-peers") == ("True", "FieldConflict"))
    assert (
        space.get("/api/v1/{}/services/chat-peers")["metadata"]["resourceVersion"]
        == before["metadata"]["resourceVersion"]
    )
    assert space.settled()


# -- what a pool refers to --------------------------------------------------------------------------------------------


def test_a_missing_secret_stalls_a_pool_until_it_comes_and_edits_of_it_are_followed(
    space: Space, operator: RunningOperator
) -> None:
    def secret(tenant: str) -> Object:
        entry = json.dumps({"sha256": "ab" * 32, "tenant": tenant, "tiers": ["gold"]})
        return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"one": entry}}

    def copied() -> str:
        found = space.find("/api/v1/{}/secrets/chat-internal")
        return "" if found is None else base64.b64decode(found["data"]["api-keys.json"]).decode()

    space.apply(pool(replicas=0, identity={"type": "APIKeys", "apiKeys": {"secretRef": {"name": "keys"}}}))
    space.wait("it is stalled", lambda: space.condition("Stalled") == ("True", "SecretNotFound"))
    assert "spec.identity.apiKeys.secretRef.name" in space.message("Stalled")
    space.apply(secret("acme"))
    space.wait("its entries are copied", lambda: "acme" in copied())
    space.wait("it is ready", lambda: space.condition("Stalled") is None)
    keys = space.get("/api/v1/{}/secrets/chat-internal")["data"]["salt-key"]
    space.apply(secret("globex"))
    space.wait("the edit is copied", lambda: "globex" in copied())
    assert space.get("/api/v1/{}/secrets/chat-internal")["data"]["salt-key"] == keys


# -- the operator itself ----------------------------------------------------------------------------------------------


def test_a_restart_finds_what_changed_and_does_nothing_twice(space: Space, sidecars: StandInSidecars) -> None:
    """Four pools: one stays the same, one is changed, one is new and one is deleted while no operator runs."""
    settings, kubeconfig = settings_for(space.name), space.cluster.kubeconfig
    folder = POOL.rsplit("/", 1)[0]
    with running_operator(kubeconfig, settings, sidecars.address_of):
        for name in ("same", "changed", "deleted"):
            space.apply(pool(name, replicas=1))
            space.become_ready(1, name)
    same = {
        path: space.get(path)["metadata"]["resourceVersion"]
        for path in ("/apis/apps/v1/{}/deployments/same", "/api/v1/{}/configmaps/same-view", f"{folder}/same")
    }
    template = space.get("/apis/apps/v1/{}/deployments/changed")["spec"]["template"]
    space.apply(pool("changed", replicas=1, tiers=[SPEC["tiers"][1]]), pool("new", replicas=1))
    space.delete(f"{folder}/deleted")
    with running_operator(kubeconfig, settings, sidecars.address_of) as again:
        space.become_ready(1, "new")
        space.wait("the change", lambda: space.get(f"{folder}/changed")["status"]["revision"] == 2)
        space.wait("it has settled", lambda: space.settled("changed"))
        assert again.process.writes <= 3 * 8 + 25
    assert {path: space.get(path)["metadata"]["resourceVersion"] for path in same} == same
    assert space.get("/apis/apps/v1/{}/deployments/changed")["spec"]["template"] == template
    (pod,) = (name for name in sidecars.by_pod if name.startswith("same-"))
    assert {view.revision.number for view in sidecars.of(pod).views} == {1}
    space.wait("what was deleted is gone", lambda: space.find("/apis/apps/v1/{}/deployments/deleted") is None, 90)


def test_the_number_of_a_view_grows_although_its_config_map_was_deleted(
    space: Space, sidecars: StandInSidecars
) -> None:
    settings, kubeconfig = settings_for(space.name), space.cluster.kubeconfig
    with running_operator(kubeconfig, settings, sidecars.address_of):
        space.apply(pool(replicas=1))
        (pod,) = space.become_ready(1)
    space.delete("/api/v1/{}/configmaps/chat-view")
    with running_operator(kubeconfig, settings, sidecars.address_of):
        space.wait("a view with a new number", lambda: sidecars.of(pod).views[-1].revision.number == 2)


def test_another_operator_takes_over_within_30_seconds(space: Space, sidecars: StandInSidecars) -> None:
    lease = "/apis/coordination.k8s.io/v1/{}/leases/cacheaware-operator"
    kubeconfig = space.cluster.kubeconfig

    def holder() -> str:
        found = space.find(lease)
        return "" if found is None else found["spec"].get("holderIdentity", "")

    one, two = settings_for(space.name, "one"), settings_for(space.name, "two")
    with running_operator(kubeconfig, one, sidecars.address_of) as first:
        space.wait("the first leads", lambda: holder() == "one")
        with running_operator(kubeconfig, two, sidecars.address_of) as second:
            space.apply(pool(replicas=0))
            space.wait("the first acts", lambda: space.condition("Ready") == ("True", "ScaledToZero"))
            assert second.process.writes == 0
            path = lease.format(f"namespaces/{space.name}")
            space.wait("the lease is taken", lambda: write(space, path, "somebody"))  # as if the first had been away
            assert first.ended.wait(20), "who lost the lease must end"
            assert first.code == 1
            space.wait("the second leads", lambda: holder() == "two", 30)
            space.apply(pool("later", replicas=0))
            space.wait("the second acts", lambda: space.condition("Ready", "later") == ("True", "ScaledToZero"))


def write(space: Space, path: str, holder: str) -> bool:
    """Take the lease by force; False where its holder renewed it just then."""
    lease = space.cluster.get(path)
    lease["spec"]["holderIdentity"] = holder
    return space.cluster.request("PUT", path, lease).ok


def test_a_silent_sidecar_delays_nobody(space: Space, sidecars: StandInSidecars, operator: RunningOperator) -> None:
    space.apply(pool())
    mute, other = space.become_ready()
    sidecars.of(mute).silent = True
    tiers = [SPEC["tiers"][0] | {"quota": {"nominalPercent": 20}}, SPEC["tiers"][1]]
    space.apply(pool(tiers=tiers))
    space.wait("the other has the new view", lambda: sidecars.of(other).views[-1].revision.number == 2, 5)
    space.wait("it is told", lambda: space.condition("MetricsFresh") == ("False", "Stale"))
    assert mute in space.message("MetricsFresh")


def test_everything_goes_with_the_pool(space: Space, operator: RunningOperator, ready: list[str]) -> None:
    space.delete(POOL)
    # the garbage collector looks for new kinds of owners every 30 s
    space.wait("nothing is left", lambda: not [path for path in OWNED if space.find(path)], 90)
