"""The Deployment of a pool: so many pods of `pod.py`, and how a new version of them replaces the old one."""

from __future__ import annotations

from cacheaware_operator.cluster import names, pod
from cacheaware_operator.cluster.images import Images
from cacheaware_operator.cluster.names import KubernetesObject
from cacheaware_operator.plan import PoolPlan, Wanted

# Longer than a model may take to load: a rollout that loads is no failed rollout.
_PROGRESS_SECONDS = 3900


def build_deployment(wanted: Wanted, plan: PoolPlan, images: Images) -> KubernetesObject:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": names.metadata(wanted, names.deployment(wanted.name)),
        "spec": {
            # Copied from the pool, which is what autoscalers and people scale; the pool's own is never written.
            "replicas": wanted.spec.replicas,
            "revisionHistoryLimit": 3,
            "progressDeadlineSeconds": _PROGRESS_SECONDS,
            "selector": {"matchLabels": names.selector_labels(wanted.name)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": _rolling_update(wanted)},
            "template": pod.build_pod_template(wanted, plan.engine, images),
        },
    }


def _rolling_update(wanted: Wanted) -> KubernetesObject:
    """One pod at a time. A spare device is rarely there, and a rollout that waits for one would never end."""
    if pod.needs_device(wanted.spec):
        return {"maxSurge": 0, "maxUnavailable": 1}
    return {"maxSurge": 1, "maxUnavailable": 0}
