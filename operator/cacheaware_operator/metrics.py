"""The operator's own metrics. Labels are pools, tiers and closed sets."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cacheaware_operator.cluster_store import PoolKey
from cacheaware_operator.rebalance_values import Decision

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_POOL = ("namespace", "pool")


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._ready = Gauge(
            "cacheaware_pool_ready", "1 while every wanted replica is ready.", _POOL, registry=self._registry
        )
        self._moves = Counter(
            "cacheaware_quota_moves_total",
            "Moves of effective quota between tiers.",
            (*_POOL, "from", "to", "reason"),
            registry=self._registry,
        )
        self._skipped = Counter(
            "cacheaware_rebalance_skipped_total",
            "Rebalancing rounds in which nothing moved, and why.",
            (*_POOL, "reason"),
            registry=self._registry,
        )
        self._gain = Gauge(
            "cacheaware_predicted_gain_ratio",
            "Predicted gain of the last moves, as a part of all weighted hits.",
            _POOL,
            registry=self._registry,
        )
        self._reconcile = Histogram(
            "cacheaware_reconcile_seconds",
            "Time that one look at a pool took.",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=self._registry,
        )
        self._labels: dict[PoolKey, set[tuple[Counter | Gauge, tuple[str, ...]]]] = {}  # to be removed with the pool

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def set_ready(self, pool: PoolKey, ready: bool) -> None:
        self._ready.labels(*self._of(self._ready, pool)).set(ready)

    def count_decision(self, pool: PoolKey, decision: Decision) -> None:
        if decision.skipped is not None:
            self._skipped.labels(*self._of(self._skipped, pool, decision.skipped)).inc()
        if decision.moves:
            gain = sum(move.gain_percent or 0.0 for move in decision.moves)
            self._gain.labels(*self._of(self._gain, pool)).set(gain / 100)
        for move in decision.made:
            self._moves.labels(*self._of(self._moves, pool, move.from_, move.to, move.reason)).inc()

    def count_pass(self, seconds: float) -> None:
        self._reconcile.observe(seconds)

    def forget(self, pool: PoolKey) -> None:
        for metric, labels in self._labels.pop(pool, set()):
            metric.remove(*labels)

    def _of(self, metric: Counter | Gauge, pool: PoolKey, *more: str) -> tuple[str, ...]:
        labels = (pool.namespace, pool.name, *more)
        self._labels.setdefault(pool, set()).add((metric, labels))
        return labels
