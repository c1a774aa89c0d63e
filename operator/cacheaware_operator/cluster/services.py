"""How pods are reached: one Service for clients, one without an address of its own for peers and the operator."""

from __future__ import annotations

from cacheaware_operator.cluster import names
from cacheaware_operator.cluster.names import KubernetesObject
from cacheaware_operator.plan import Wanted

# Target ports are numbers: not every release of Kubernetes finds a named port of a sidecar.
_HTTP = {"name": "http", "port": names.HTTP_PORT, "targetPort": names.HTTP_PORT, "protocol": "TCP"}
_CONTROL = {"name": "control", "port": names.CONTROL_PORT, "targetPort": names.CONTROL_PORT, "protocol": "TCP"}


def build_services(wanted: Wanted) -> tuple[KubernetesObject, ...]:
    selector = names.selector_labels(wanted.name)
    clients = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(wanted, names.service(wanted.name)),
        "spec": {"type": "ClusterIP", "selector": selector, "ports": [_HTTP]},
    }
    peers = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(wanted, names.peers_service(wanted.name)),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "selector": selector,
            "publishNotReadyAddresses": True,  # a view can be delivered while the model still loads
            "ports": [_HTTP, _CONTROL],
        },
    }
    return clients, peers
