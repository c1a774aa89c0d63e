"""The operator among others: under its own rights, beside GitOps tools, on an older CRD, in a namespace that ends."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from e2e.cluster import MERGE_PATCH, POOLS, Cluster, Object
from e2e.conftest import CRD_FILE, ROOT
from e2e.operators import RunningOperator, running_operator, settings_for
from e2e.space import DEPLOYMENT, POOL, Space, looks, pool
from e2e.stand_ins import StandInSidecars

OPERATOR = "cacheaware-operator"
CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{POOLS}"


# -- rights -----------------------------------------------------------------------------------------------------------


def namespaced_rights(cluster: Cluster, namespace: str) -> list[Object]:
    """What the overlay for one namespace gives the operator: no ClusterRole is in it."""
    text = cluster.kubectl("kustomize", ROOT / "manifests" / "overlays" / "namespaced").stdout
    written = [each for each in yaml.safe_load_all(text) if each["kind"] in ("ServiceAccount", "Role", "RoleBinding")]
    assert not [each for each in yaml.safe_load_all(text) if each["kind"].startswith("Cluster")]
    for each in written:
        each["metadata"]["namespace"] = namespace
        for subject in each.get("subjects", ()):
            subject["namespace"] = namespace
    return written


def test_the_rights_of_the_namespaced_overlay_are_enough(
    space: Space, sidecars: StandInSidecars, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    space.apply(*namespaced_rights(space.cluster, space.name))
    own = space.cluster.kubeconfig_of(space.name, OPERATOR, tmp_path)
    with caplog.at_level(logging.WARNING), running_operator(own, settings_for(space.name), sidecars.address_of):
        space.apply(pool())
        space.become_ready()
        space.delete("/api/v1/{}/services/chat")
        space.wait("the service is back", lambda: space.find("/api/v1/{}/services/chat"))
        account = {"podTemplate": {"serviceAccountName": "default"}}  # then ours is superfluous, and has to be deleted
        space.patch(POOL, {"spec": account})
        space.wait("our account is gone", lambda: space.find("/api/v1/{}/serviceaccounts/chat") is None)
        assert ("AllReplicasReady", "Ready is True") in space.events()
    forbidden = [record.getMessage() for record in caplog.records if "403" in record.getMessage()]
    assert forbidden == []
    assert "Forbidden" not in caplog.text


def test_a_cluster_wide_operator_looks_after_every_namespace(
    space: Space, sidecars: StandInSidecars, installed: Cluster
) -> None:
    settings = dataclasses.replace(settings_for(space.name), namespaces=())
    with installed.namespace() as name, running_operator(installed.kubeconfig, settings, sidecars.address_of):
        other = Space(installed, name)
        for each in (space, other):
            each.apply(pool(replicas=1))
        for each in (space, other):
            each.become_ready(1)


# -- tools of others --------------------------------------------------------------------------------------------------


def kstatus(tools: Path, space: Space) -> str:
    """What the status library of Flux and Argo CD says of the pool, in one word."""
    written = space.kubectl("get", "cap", "chat", "-o", "yaml")
    done = subprocess.run([tools / "kstatus"], input=written, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.split()[1]


def test_kstatus_tells_a_pool_on_its_way_from_a_ready_and_a_stalled_one(
    space: Space, operator: RunningOperator, tools: Path
) -> None:
    space.apply(pool())
    space.wait("a status", lambda: space.condition("Ready"))
    assert kstatus(tools, space) == "InProgress"
    space.become_ready()
    assert kstatus(tools, space) == "Current"
    nobody = {"name": "nobody", "configMapKeyRef": {"name": "missing", "key": "text"}}
    space.patch(POOL, {"spec": {"publicPercent": 10, "publicPrefixes": [nobody]}})
    space.wait("it is stalled", lambda: space.condition("Stalled"))
    assert kstatus(tools, space) == "Failed"
    assert space.condition("Ready") == ("True", "AllReplicasReady")  # what ran before still serves
    space.patch(POOL, {"spec": {"publicPrefixes": None}})
    space.wait("it is well again", lambda: space.condition("Stalled") is None and kstatus(tools, space) == "Current")


def test_flux_sees_no_drift_whatever_the_operator_and_a_scaler_do(
    space: Space, operator: RunningOperator, tools: Path, tmp_path: Path
) -> None:
    written = pool() | {"metadata": {"name": "chat", "namespace": space.name}}
    del written["spec"]["replicas"]  # a scaler sets it
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump(written))
    environment = {**os.environ, "KUBECONFIG": str(space.cluster.kubeconfig)}

    def flux(*arguments: str) -> subprocess.CompletedProcess[str]:
        command: list[str | Path] = [tools / "flux-apply", *arguments, file]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)

    assert flux().returncode == 0
    space.become_ready(1)
    space.kubectl("scale", "cap/chat", "--replicas=3")
    space.wait("three replicas", lambda: space.get(DEPLOYMENT)["spec"]["replicas"] == 3)
    diff = flux("--diff")
    assert diff.returncode == 0, diff.stdout + diff.stderr
    assert flux().returncode == 0
    done = looks(operator)
    space.patch(POOL, {"metadata": {"labels": {"look": "again"}}})
    space.wait("a look", lambda: looks(operator) > done)
    assert space.get(DEPLOYMENT)["spec"]["replicas"] == 3


def test_an_autoscalers_write_stays(space: Space, operator: RunningOperator) -> None:
    """An HPA writes through the scale subresource, as any scaler does."""
    space.apply(pool())
    space.wait("the deployment", lambda: space.find(DEPLOYMENT))
    scale = {"spec": {"replicas": 5}}
    path = f"{POOL}/scale".format(f"namespaces/{space.name}")
    answer = space.cluster.request("PATCH", path, scale, MERGE_PATCH, fieldManager="kube-controller-manager")
    assert answer.ok, answer.body
    space.wait("five replicas", lambda: space.get(DEPLOYMENT)["spec"]["replicas"] == 5)
    for number in range(10):
        done = looks(operator)
        space.patch(POOL, {"metadata": {"labels": {"look": str(number)}}})
        space.wait("a look", lambda before=done: looks(operator) > before)  # type: ignore[misc]  # bound at once
    assert space.get(POOL)["spec"]["replicas"] == 5
    assert space.get(DEPLOYMENT)["spec"]["replicas"] == 5


# -- an older CRD -----------------------------------------------------------------------------------------------------


@pytest.fixture
def outdated(installed: Cluster) -> Iterator[None]:
    """A CRD that does not know borrowingLimitPercent: whoever writes it loses it, and no limit is left."""
    current = yaml.safe_load(CRD_FILE.read_text())
    old = copy.deepcopy(current)
    for version in old["spec"]["versions"]:
        tier = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["tiers"]["items"]
        quota = tier["properties"]["quota"]
        del quota["properties"]["borrowingLimitPercent"]
        quota.pop("x-kubernetes-validations", None)
    try:
        replace_crd(installed, old)
        wait_for_schema(installed, knows=False)
        yield
    finally:
        replace_crd(installed, current)
        wait_for_schema(installed, knows=True)


def replace_crd(cluster: Cluster, written: Object) -> None:
    version = cluster.get(CRD)["metadata"]["resourceVersion"]
    body = copy.deepcopy(written)
    body["metadata"]["resourceVersion"] = version
    answer = cluster.request("PUT", CRD, body)
    assert answer.ok, answer.body


def wait_for_schema(cluster: Cluster, *, knows: bool) -> None:
    def told() -> bool:
        answer = cluster.request("GET", "/openapi/v3/apis/cacheaware.dev/v1alpha1")
        return answer.ok and ("borrowingLimitPercent" in json.dumps(answer.body)) is knows

    cluster.wait_for("the schema", told)


def test_an_outdated_crd_stalls_every_pool_and_nothing_is_made_of_it(
    outdated: None, space: Space, operator: RunningOperator
) -> None:
    space.apply(pool(replicas=0))
    space.wait("it is stalled", lambda: space.condition("Stalled") == ("True", "SchemaOutdated"))
    assert "spec.tiers[].quota.borrowingLimitPercent" in space.message("Stalled")
    assert space.find("/api/v1/{}/configmaps/chat-view") is None
    current = yaml.safe_load(CRD_FILE.read_text())
    replace_crd(space.cluster, current)
    space.wait("it goes on by itself", lambda: space.condition("Ready") == ("True", "ScaledToZero"), 40)


# -- ends -------------------------------------------------------------------------------------------------------------


def test_a_namespace_ends_although_no_operator_runs_any_more(installed: Cluster, sidecars: StandInSidecars) -> None:
    with installed.namespace() as name:
        space = Space(installed, name)
        with running_operator(installed.kubeconfig, settings_for(name), sidecars.address_of):
            space.apply(pool())
            space.wait("a status", lambda: space.condition("Ready"))
        space.delete(POOL)
        assert installed.request("DELETE", f"/api/v1/namespaces/{name}").ok
        gone = f"/api/v1/namespaces/{name}"
        installed.wait_for("the end of the namespace", lambda: installed.request("GET", gone).status == 404, 60)
