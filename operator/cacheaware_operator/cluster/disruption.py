"""How many of a pool's pods a node drain may take at once."""

from __future__ import annotations

from cacheaware_operator.cluster import names
from cacheaware_operator.cluster.names import KubernetesObject
from cacheaware_operator.plan import Wanted


def build_disruption_budget(wanted: Wanted) -> KubernetesObject:
    """One pod at a time, whatever the number of replicas: a pool of one must not keep a node from being drained."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": names.metadata(wanted, names.disruption_budget(wanted.name)),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": names.selector_labels(wanted.name)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",  # a pod that never became ready serves nobody
        },
    }
