"""Who may reach a pool's pods: everyone the OpenAI side, and only the operator, peers and monitoring the control side.

The engine listens on loopback, so no rule is about it. A policy holds only where the network plugin enforces it; the
control token is needed either way.
"""

from __future__ import annotations

from typing import Any

from cacheaware_operator.cluster import names
from cacheaware_operator.cluster.names import KubernetesObject
from cacheaware_operator.plan import Wanted

# What the Prometheus Operator, and most charts, call the pods of a Prometheus.
MONITORING_LABELS = {"app.kubernetes.io/name": "prometheus"}


def build_network_policy(wanted: Wanted, operator_namespace: str | None) -> KubernetesObject:
    """`operator_namespace`: None where it is not known; then the operator's label counts in every namespace."""
    pods = {"matchLabels": names.selector_labels(wanted.name)}
    control_from = [
        {"namespaceSelector": _namespace(operator_namespace), "podSelector": {"matchLabels": names.OPERATOR_LABELS}},
        {"podSelector": pods},
        {"namespaceSelector": {}, "podSelector": {"matchLabels": MONITORING_LABELS}},
    ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": names.metadata(wanted, names.network_policy(wanted.name)),
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress"],  # engines fetch models from wherever their source says
            "ingress": [
                {"ports": [{"port": names.HTTP_PORT, "protocol": "TCP"}]},
                {"ports": [{"port": names.CONTROL_PORT, "protocol": "TCP"}], "from": control_from},
            ],
        },
    }


def _namespace(name: str | None) -> dict[str, Any]:
    return {} if name is None else {"matchLabels": {"kubernetes.io/metadata.name": name}}
