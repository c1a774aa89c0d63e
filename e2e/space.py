"""A namespace with pools in it, as a test of the operator looks at it."""

from __future__ import annotations

import copy
import urllib.request
from collections.abc import Callable
from typing import Any

from e2e.cluster import MERGE_PATCH, Cluster, Object
from e2e.operators import RunningOperator
from e2e.stand_ins import run_pods

SPEC: Object = {
    "model": {"name": "tiny", "source": "file:///models/tiny"},
    "engine": {"type": "Torch", "kvCache": {"memory": "64Mi"}},
    "replicas": 2,
    "tiers": [
        {"name": "gold", "priority": 10, "quota": {"nominalPercent": 50}},
        {"name": "bronze", "quota": {"nominalPercent": 30}},
    ],
    "defaultTier": "bronze",
    "identity": {"type": "Open"},
}
OWNED = (
    "/api/v1/{}/serviceaccounts/chat",
    "/api/v1/{}/secrets/chat-internal",
    "/api/v1/{}/configmaps/chat-view",
    "/apis/networking.k8s.io/v1/{}/networkpolicies/chat",
    "/api/v1/{}/services/chat",
    "/api/v1/{}/services/chat-peers",
    "/apis/apps/v1/{}/deployments/chat",
    "/apis/policy/v1/{}/poddisruptionbudgets/chat",
)
DEPLOYMENT = "/apis/apps/v1/{}/deployments/chat"
POOL = "/apis/cacheaware.dev/v1alpha1/{}/cacheawarepools/chat"


def pool(name: str = "chat", **fields: Any) -> Object:
    return {
        "apiVersion": "cacheaware.dev/v1alpha1",
        "kind": "CacheAwarePool",
        "metadata": {"name": name},
        "spec": copy.deepcopy(SPEC) | fields,
    }


class Space:
    """One namespace, as a test looks at it. Paths have {} where the namespace goes."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name

    def get(self, path: str) -> Any:
        return self.cluster.get(self._path(path))

    def find(self, path: str) -> Any:
        answer = self.cluster.request("GET", self._path(path))
        return answer.body if answer.ok else None

    def patch(self, path: str, body: Object, content_type: str = MERGE_PATCH, **query: str) -> Any:
        answer = self.cluster.request("PATCH", self._path(path), body, content_type, **query)
        assert answer.ok, answer.body
        return answer.body

    def delete(self, path: str) -> None:
        assert self.cluster.request("DELETE", self._path(path)).ok

    def apply(self, *objects: Object) -> None:
        self.cluster.apply(*objects, namespace=self.name)

    def kubectl(self, *arguments: str) -> str:
        return self.cluster.kubectl("--namespace", self.name, *arguments).stdout

    def wait(self, what: str, look: Callable[[], Any], timeout: float = 90) -> Any:
        return self.cluster.wait_for(what, look, timeout)

    def condition(self, type_: str, name: str = "chat") -> tuple[str, str] | None:
        found = self.find(POOL.rsplit("/", 1)[0] + f"/{name}") or {}
        for each in found.get("status", {}).get("conditions", ()):
            if each["type"] == type_:
                return each["status"], each["reason"]
        return None

    def message(self, type_: str) -> str:
        conditions = self.get(POOL)["status"]["conditions"]
        return str(next(each["message"] for each in conditions if each["type"] == type_))

    def become_ready(self, replicas: int = 2, name: str = "chat") -> list[str]:
        names = run_pods(self.cluster, self.name, name, replicas)
        self.wait(
            f"{name} is ready", lambda: (self.condition("Ready", name) or ("",))[0] == "True" and self.settled(name)
        )
        return names

    def settled(self, name: str = "chat") -> bool:
        return self.condition("Reconciling", name) is None and self.condition("Stalled", name) is None

    def versions(self) -> dict[str, str]:
        return {path: self.get(path)["metadata"]["resourceVersion"] for path in (*OWNED, POOL)}

    def events(self) -> list[tuple[str, str]]:
        found = self.get("/api/v1/{}/events")["items"]
        return [
            (each["reason"], each["message"]) for each in found if each["involvedObject"]["kind"] == "CacheAwarePool"
        ]

    def _path(self, path: str) -> str:
        return path.format(f"namespaces/{self.name}")


def looks(operator: RunningOperator) -> float:
    """How often it has looked at a pool."""
    (line,) = (
        line for line in metrics_page(operator).splitlines() if line.startswith("cacheaware_reconcile_seconds_count")
    )
    return float(line.split()[1])


def metrics_page(operator: RunningOperator) -> str:
    with urllib.request.urlopen(f"{operator.metrics_url}/metrics", timeout=5) as answer:
        return str(answer.read().decode())
