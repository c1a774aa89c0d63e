"""How Prometheus finds a pool's pods, where the Prometheus Operator is installed.

One page per pod, the client side's: it has the engine's metrics and the sidecar's, and needs no token. Every series
gets the label `pool`, beside `namespace` and `pod`, which the Prometheus Operator adds.
"""

from __future__ import annotations

from cacheaware_operator.cluster import names
from cacheaware_operator.cluster.names import KubernetesObject
from cacheaware_operator.plan import Wanted

# A label's name as Prometheus spells it: every character that is no letter or digit becomes "_".
_POOL_META_LABEL = f"__meta_kubernetes_pod_label_{names.POOL_LABEL.replace('.', '_').replace('/', '_')}"


def build_pod_monitor(wanted: Wanted) -> KubernetesObject:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": names.metadata(wanted, names.monitor(wanted.name)),
        "spec": {
            "selector": {"matchLabels": names.selector_labels(wanted.name)},
            "podMetricsEndpoints": [
                {
                    "port": "http",
                    "path": "/metrics",
                    "relabelings": [
                        {"action": "replace", "sourceLabels": [_POOL_META_LABEL], "targetLabel": "pool"},
                    ],
                }
            ],
        },
    }
