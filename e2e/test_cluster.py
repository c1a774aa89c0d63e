"""The harness itself: what other end-to-end tests rely on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster import Cluster
from e2e.control_plane import ControlPlane, StartFailed, Unavailable, find_programs, free_ports

CONTAINER = {"name": "main", "image": "example.com/main:1"}
SIDECAR = {"name": "side", "image": "example.com/side:1", "restartPolicy": "Always"}


def deployment(replicas: int) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [CONTAINER], "initContainers": [SIDECAR]},
            },
        },
    }


def test_a_deployment_is_available_once_its_pods_are_said_to_be_ready(cluster: Cluster, namespace: str) -> None:
    cluster.apply(deployment(2), namespace=namespace)
    pods = f"/api/v1/namespaces/{namespace}/pods"
    cluster.wait_for("two pods", lambda: len(cluster.get(pods)["items"]) == 2)
    first, second = (pod["metadata"]["name"] for pod in cluster.get(pods)["items"])
    web = f"/apis/apps/v1/namespaces/{namespace}/deployments/web"

    def ready() -> int:
        return int(cluster.get(web)["status"].get("readyReplicas", 0))

    cluster.set_pod_ready(namespace, first)
    cluster.set_pod_ready(namespace, second)
    cluster.wait_for("two ready replicas", lambda: ready() == 2)
    cluster.set_pod_ready(namespace, second, ready=False)
    cluster.wait_for("one ready replica", lambda: ready() == 1)


def test_a_service_account_has_its_own_rights_and_no_more(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    if cluster.token is None:
        pytest.skip("the cluster of KUBECONFIG makes no kubeconfigs for service accounts")
    cluster.kubectl("create", "serviceaccount", "reader", "--namespace", namespace)
    cluster.kubectl("create", "role", "reader", "--verb=list", "--resource=pods", "--namespace", namespace)
    cluster.kubectl(
        "create", "rolebinding", "reader", "--role=reader", f"--serviceaccount={namespace}:reader", "-n", namespace
    )
    rights = cluster.kubeconfig_of(namespace, "reader", tmp_path)
    assert rights.stat().st_mode & 0o077 == 0
    read = ("--kubeconfig", rights, "--namespace", namespace, "get")
    assert cluster.kubectl(*read, "pods").returncode == 0
    refused = cluster.kubectl(*read, "secrets", check=False)
    assert "forbidden" in refused.stderr


async def test_coroutines_have_a_session(cluster: Cluster) -> None:
    async with cluster.session() as session, session.get("version") as answer:
        assert answer.status == 200
        assert (await answer.json())["major"] == "1"


def test_a_failing_kubectl_says_what_kubectl_said(cluster: Cluster, namespace: str) -> None:
    with pytest.raises(AssertionError, match='pods "none" not found'):
        cluster.kubectl("get", "pod", "none", "--namespace", namespace)


def test_a_process_that_ends_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    try:
        programs = find_programs(os.environ)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with (
        pytest.raises(StartFailed, match=r"(?s)kube-apiserver ended with code 1.*unknown flag: --no-such-flag"),
        ControlPlane(programs, tmp_path, api_server_flags=["--no-such-flag"]),
    ):
        pass


def test_ports_that_are_given_together_differ() -> None:
    assert len(set(free_ports(50))) == 50
