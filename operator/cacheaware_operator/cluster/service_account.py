"""The pods' ServiceAccount: it has no rights and no token, because nothing in a pod asks the API server."""

from __future__ import annotations

from cacheaware_operator.cluster import names
from cacheaware_operator.cluster.names import KubernetesObject
from cacheaware_operator.plan import Wanted


def service_account_name(wanted: Wanted) -> str:
    """The author's own where the pod template names one."""
    return wanted.spec.pod_template.service_account_name or names.service_account(wanted.name)


def build_service_account(wanted: Wanted) -> KubernetesObject | None:
    """None where the author brings one."""
    if wanted.spec.pod_template.service_account_name is not None:
        return None
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": names.metadata(wanted, names.service_account(wanted.name)),
        "automountServiceAccountToken": False,
    }
