"""All objects of one pool, in the order in which they are to be applied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from cacheaware_operator.cluster.alerts import build_prometheus_rule
from cacheaware_operator.cluster.deployment import build_deployment
from cacheaware_operator.cluster.disruption import build_disruption_budget
from cacheaware_operator.cluster.images import Images
from cacheaware_operator.cluster.internal_secret import InternalSecret, build_internal_secret
from cacheaware_operator.cluster.monitoring import build_pod_monitor
from cacheaware_operator.cluster.names import KubernetesObject
from cacheaware_operator.cluster.network import build_network_policy
from cacheaware_operator.cluster.service_account import build_service_account
from cacheaware_operator.cluster.services import build_services
from cacheaware_operator.cluster.view_file import build_view_config_map
from cacheaware_operator.plan import PoolPlan, Wanted


class OptionalKind(StrEnum):
    """Kinds of the Prometheus Operator (group monitoring.coreos.com), which a cluster may lack."""

    POD_MONITOR = "PodMonitor"
    PROMETHEUS_RULE = "PrometheusRule"


@dataclass(frozen=True, slots=True)
class Discovered:
    """What the API server says it has."""

    kinds: frozenset[OptionalKind] = frozenset()


def build_objects(
    wanted: Wanted,
    plan: PoolPlan,
    *,
    images: Images,
    internal: InternalSecret,
    discovered: Discovered,
    operator_namespace: str | None = None,
) -> tuple[KubernetesObject, ...]:
    """What is to be there. An object of the pool that is not among these (an older ServiceAccount, a monitor whose
    kind went away) is one to delete.

    Raises `PodRefused` where the author's part of the pod clashes with ours; then nothing is to be applied.
    """
    return tuple(_objects(wanted, plan, images, internal, discovered, operator_namespace))


def _objects(
    wanted: Wanted,
    plan: PoolPlan,
    images: Images,
    internal: InternalSecret,
    discovered: Discovered,
    operator_namespace: str | None,
) -> Iterator[KubernetesObject]:
    account = build_service_account(wanted)
    if account is not None:
        yield account
    # What pods mount, and who may reach them, before there are pods.
    yield build_internal_secret(wanted, internal, plan.api_keys)
    yield build_view_config_map(wanted, plan.view)
    yield build_network_policy(wanted, operator_namespace)
    yield from build_services(wanted)
    yield build_deployment(wanted, plan, images)
    yield build_disruption_budget(wanted)
    if OptionalKind.POD_MONITOR in discovered.kinds:
        yield build_pod_monitor(wanted)
    if OptionalKind.PROMETHEUS_RULE in discovered.kinds:
        yield build_prometheus_rule(wanted)
