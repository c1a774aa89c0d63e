"""The kinds of Kubernetes objects that the operator reads and writes, and where the API server has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cacheaware_api import v1alpha1
from cacheaware_operator.cluster.objects import OptionalKind

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    group: str  # "" for the core group
    version: str
    kind: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None) -> str:
        """Of one object, or of all in a namespace, or (without one) of all there are."""
        root = f"/apis/{self.group}" if self.group else "/api"
        parts = [root, self.version]
        parts += ["namespaces", namespace] if namespace is not None else []
        parts += [self.plural] + ([name] if name is not None else [])
        return "/".join(parts)

    def __str__(self) -> str:
        return self.kind


POOL = Kind(v1alpha1.GROUP, v1alpha1.VERSION, v1alpha1.KIND, v1alpha1.PLURAL)
POD = Kind("", "v1", "Pod", "pods")
SECRET = Kind("", "v1", "Secret", "secrets")
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps")
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments")
EVENT = Kind("", "v1", "Event", "events")
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")

OPTIONAL: Mapping[OptionalKind, Kind] = {
    OptionalKind.POD_MONITOR: Kind("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors"),
    OptionalKind.PROMETHEUS_RULE: Kind("monitoring.coreos.com", "v1", "PrometheusRule", "prometheusrules"),
}

# What a pool consists of in every cluster.
OWNED = (
    SECRET,
    CONFIG_MAP,
    DEPLOYMENT,
    Kind("", "v1", "ServiceAccount", "serviceaccounts"),
    Kind("", "v1", "Service", "services"),
    Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies"),
    Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets"),
)


def owned_kinds(optional: frozenset[OptionalKind]) -> tuple[Kind, ...]:
    return (*OWNED, *(kind for name, kind in OPTIONAL.items() if name in optional))


_BY_NAME = {(f"{kind.group}/{kind.version}".lstrip("/"), kind.kind): kind for kind in (*OWNED, *OPTIONAL.values())}


def kind_of(written: Object) -> Kind:
    """The kind of an object that we build."""
    return _BY_NAME[written["apiVersion"], written["kind"]]
