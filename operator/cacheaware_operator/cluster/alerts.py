"""Alerts of one pool, where the Prometheus Operator is installed: what a person should look at, and where to begin.

Every rule names its pool, so two pools never share an alert. Thresholds are the pool's own: an edit of an SLA changes a
rule and restarts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cacheaware_api.v1alpha1 import RebalancingMode, Tier
from cacheaware_operator.cluster import names
from cacheaware_operator.cluster.names import KubernetesObject
from cacheaware_operator.plan import Wanted
from cacheaware_operator.rebalance_values import Skip

ENOUGH_REQUESTS = 20  # in half an hour; of fewer, one that is late says little
_SLA_WINDOW = "30m"


def build_prometheus_rule(wanted: Wanted) -> KubernetesObject:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": names.metadata(wanted, names.alerts(wanted.name)),
        "spec": {"groups": [{"name": f"cacheaware.{wanted.namespace}.{wanted.name}", "rules": list(_rules(wanted))}]},
    }


def _rules(wanted: Wanted) -> Iterator[dict[str, Any]]:
    pool = f'namespace="{wanted.namespace}",pool="{wanted.name}"'
    look = f"kubectl -n {wanted.namespace} describe cap {wanted.name}"
    yield _alert(
        "CacheAwarePoolNotReady",
        f"cacheaware_pool_ready{{{pool}}} == 0",
        "15m",
        "critical",
        f"Pool {wanted.name} is not ready",
        f"Fewer replicas are ready than wanted, for 15 minutes. The conditions say why: {look}",
    )
    for tier in sorted(wanted.spec.tiers, key=lambda tier: tier.name):
        if tier.sla.time_to_first_token is not None or tier.sla.time_per_output_token is not None:
            yield _sla_missed(wanted, tier, pool, look)
    yield _alert(
        "CacheAwareQuotaNotEnforced",
        f"(up{{{pool}}} == 1) unless on (namespace, pod) cacheaware_kv_capacity_blocks{{{pool}}}",
        "30m",
        "warning",
        f"Quotas of pool {wanted.name} are not enforced on {{{{ $labels.pod }}}}",
        f"The engine shows no ledger, so nobody knows who holds its blocks. Conditions: {look}; then look at the "
        "logs of the containers engine and sidecar of the pod",
    )
    yield _alert(
        "CacheAwareMetricsStale",
        f"up{{{pool}}} == 0",
        "10m",
        "warning",
        f"{{{{ $labels.pod }}}} of pool {wanted.name} gives no metrics",
        "Nobody sees whether it keeps its promises. Look at the log of its container sidecar, "
        f"and whether a network policy keeps Prometheus from port {names.HTTP_PORT}",
    )
    if wanted.spec.effective_rebalancing.mode is not RebalancingMode.OFF:
        skipped = f'cacheaware_rebalance_skipped_total{{{pool},reason="{Skip.STALE_METRICS}"}}'
        yield _alert(
            "CacheAwareRebalancingFrozen",
            f"increase({skipped}[15m]) > 0",
            "15m",
            "warning",
            f"Rebalancing of pool {wanted.name} is frozen",
            "The operator gets no fresh metrics from some sidecars, so quotas stay where they are. The condition "
            f"MetricsFresh says which: {look}; look whether they answer the operator on port {names.CONTROL_PORT}",
        )


def _sla_missed(wanted: Wanted, tier: Tier, pool: str, look: str) -> dict[str, Any]:
    """By the share that was missed: where everything is missed there may be no series of what was met."""
    judged = f'cacheaware_sla_total{{{pool},tier="{tier.name}"}}'
    missed = f'cacheaware_sla_total{{{pool},tier="{tier.name}",met="false"}}'
    attainment = tier.sla.attainment_percent
    return _alert(
        "CacheAwareSLAMissed",
        f"100 * sum by (sla) (rate({missed}[{_SLA_WINDOW}])) / sum by (sla) (rate({judged}[{_SLA_WINDOW}])) "
        f"> {100 - attainment} and sum by (sla) (increase({judged}[{_SLA_WINDOW}])) >= {ENOUGH_REQUESTS}",
        "10m",
        "warning",
        f"Tier {tier.name} of pool {wanted.name} misses its SLA ({{{{ $labels.sla }}}})",
        f'{{{{ $value | printf "%.1f" }}}} % of its requests were later than promised in {_SLA_WINDOW}; '
        f"{100 - attainment} % may be. Give it more nominalPercent or weight, or add replicas. Figures: {look}",
        tier=tier.name,
    )


def _alert(
    name: str, expression: str, duration: str, severity: str, summary: str, description: str, **labels: str
) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        "for": duration,
        "labels": {"severity": severity, **labels},
        "annotations": {"summary": summary, "description": description},
    }
