"""The operator as a process of its own, against a real API server; there is no node, so pods stay pending."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster import Cluster

POOL: dict[str, Any] = {
    "apiVersion": "cacheaware.dev/v1alpha1",
    "kind": "CacheAwarePool",
    "metadata": {"name": "chat"},
    "spec": {
        "model": {"name": "tiny", "source": "file:///models/tiny"},
        "engine": {"type": "Torch", "kvCache": {"memory": "64Mi"}},
        "tiers": [{"name": "gold", "quota": {"nominalPercent": 50}}, {"name": "bronze"}],
        "defaultTier": "bronze",
        "identity": {"type": "Open"},
    },
}


@pytest.fixture
def operator(installed: Cluster, namespace: str, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An operator of this namespace; its log is in the failure's report."""
    log = tmp_path / "operator.log"
    arguments = [
        *(sys.executable, "-m", "cacheaware_operator", f"--kubeconfig={installed.kubeconfig}"),
        *(f"--namespace={namespace}", f"--lease-namespace={namespace}", "--metrics-host=127.0.0.1", "--metrics-port=0"),
        *("--engine-image=example.com/engine:1", "--sidecar-image=example.com/sidecar:1"),
    ]
    with log.open("wb") as output, subprocess.Popen(arguments, stdout=output, stderr=output) as process:
        try:
            yield process
        finally:
            process.kill()
            print(log.read_text())


def children(cluster: Cluster, namespace: str) -> dict[str, str]:
    """What the pool owns, as kind/name -> resource version."""
    found = {}
    for path in (
        f"/apis/apps/v1/namespaces/{namespace}/deployments",
        f"/api/v1/namespaces/{namespace}/services",
        f"/api/v1/namespaces/{namespace}/configmaps",
        f"/api/v1/namespaces/{namespace}/secrets",
        f"/api/v1/namespaces/{namespace}/serviceaccounts",
        f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
        f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
    ):
        for item in cluster.get(path)["items"]:
            owners = [owner["kind"] for owner in item["metadata"].get("ownerReferences", [])]
            if "CacheAwarePool" in owners:
                meta = item["metadata"]
                found[f"{path.rsplit('/', 1)[1]}/{meta['name']}"] = f"{meta.get('generation', meta['resourceVersion'])}"
    return found


def pool(cluster: Cluster, namespace: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.get(f"/apis/cacheaware.dev/v1alpha1/namespaces/{namespace}/cacheawarepools/chat")
    return found


def conditions(cluster: Cluster, namespace: str) -> dict[str, str]:
    status = pool(cluster, namespace).get("status", {})
    return {each["type"]: each["status"] for each in status.get("conditions", [])}


def test_a_pool_becomes_objects_that_are_put_back_and_go_with_it(
    installed: Cluster, namespace: str, operator: subprocess.Popen[bytes]
) -> None:
    installed.apply(POOL, namespace=namespace)
    installed.wait_for("a status", lambda: "Ready" in conditions(installed, namespace))
    first = children(installed, namespace)
    assert {"deployments/chat", "services/chat", "secrets/chat-internal"} <= set(first)
    assert conditions(installed, namespace)["Ready"] == "False"  # no pod is ready
    assert pool(installed, namespace)["spec"] == POOL["spec"] | {"replicas": 1}

    installed.kubectl("delete", "service", "chat", "--namespace", namespace)
    installed.wait_for("the service is back", lambda: "services/chat" in children(installed, namespace))

    installed.kubectl("scale", "cap/chat", "--replicas=3", "--namespace", namespace)
    deployment = f"/apis/apps/v1/namespaces/{namespace}/deployments/chat"
    installed.wait_for("three replicas", lambda: installed.get(deployment)["spec"]["replicas"] == 3)

    before = installed.get(deployment)["spec"]["template"]
    changed = {**POOL, "spec": {**POOL["spec"], "tiers": [{"name": "gold", "quota": {"nominalPercent": 60}}]}}
    changed["spec"].pop("defaultTier")
    installed.apply(changed, namespace=namespace)
    installed.wait_for("the edit is seen", lambda: pool(installed, namespace)["status"].get("tierCount") == 1)
    assert installed.get(deployment)["spec"]["template"] == before, "a change of tiers must restart nothing"

    installed.kubectl("delete", "cap", "chat", "--namespace", namespace)
    # The garbage collector looks for new kinds of owners every 30 s.
    installed.wait_for("nothing is left", lambda: not children(installed, namespace), 90)


def test_sigterm_ends_the_operator_in_order(
    installed: Cluster, namespace: str, operator: subprocess.Popen[bytes]
) -> None:
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    installed.wait_for("the lease", lambda: installed.get(lease)["items"])
    operator.send_signal(signal.SIGTERM)
    assert operator.wait(timeout=60) == 0
