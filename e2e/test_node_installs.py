"""An operator for one namespace alone, installed as a user does it."""

from __future__ import annotations

import yaml
from e2e.node_cluster import NodeCluster
from e2e.serving import RESTRICTED, ServingSpace, call, operator_overlay, question, serving_pool

_OPERATOR = "deployment/cacheaware-operator"


def test_an_operator_of_one_namespace_needs_nothing_of_the_cluster(installed_operator: NodeCluster) -> None:
    """While it works, the cluster's own operator is away; pools serve on meanwhile."""
    cluster = installed_operator
    everyone = ("--namespace", "cacheaware-system")
    cluster.kubectl("scale", _OPERATOR, "--replicas=0", *everyone)
    try:
        with cluster.namespace(RESTRICTED) as name:
            space = ServingSpace(cluster, name)
            space.prepare()
            folder = operator_overlay(cluster, "namespaced", name)
            built = list(yaml.safe_load_all(cluster.kubectl("kustomize", folder).stdout))
            assert not [
                each["kind"] for each in built if each["kind"].startswith("Cluster") or each["kind"] == "Namespace"
            ]
            cluster.wait_for("the other operator has gone", lambda: not _operators(cluster, "cacheaware-system"), 60)
            cluster.kubectl("apply", "-k", folder)
            space.kubectl_for(120, "rollout", "status", _OPERATOR, "--timeout=120s")
            space.apply(serving_pool(replicas=1))
            space.wait_ready()
            assert call(space.service_url(), "/v1/chat/completions", "gold-key", question())[0] == 200
            space.kubectl("scale", "cap/chat", "--replicas=0")
            space.wait("it is scaled to zero", lambda: space.condition("Ready") == ("True", "ScaledToZero"), 60)
            denied = [line for line in _operator_log(space).splitlines() if "forbidden" in line.lower()]
            assert denied == []
    finally:
        cluster.kubectl("scale", _OPERATOR, "--replicas=2", *everyone)
        cluster.kubectl("rollout", "status", _OPERATOR, "--timeout=120s", *everyone, timeout=130)


def _operators(cluster: NodeCluster, namespace: str) -> list[object]:
    path = f"/api/v1/namespaces/{namespace}/pods"
    found: list[object] = cluster.request("GET", path, labelSelector="app.kubernetes.io/name=cacheaware-operator").body[
        "items"
    ]
    return found


def _operator_log(space: ServingSpace) -> str:
    return space.kubectl("logs", "--selector=app.kubernetes.io/name=cacheaware-operator", "--tail=-1")
