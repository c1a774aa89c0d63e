"""The sidecar's own metrics, and the engine's page with ours beside it. Labels are tier names and closed sets only.

What comes from the ledger is read from the last ledger at each scrape, so it is never older than that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cacheaware_api import wire
from cacheaware_sidecar.counting import Counter, Histogram
from cacheaware_sidecar.working_set import BUCKET_LABELS, TierWorkingSet

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 2, 3, 5, 8, 13, 20, 40, 80)
_HOLD_BUCKETS = (0.0, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_GROUP_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
_OUTPUT_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)


class Metrics:
    """Metrics that are counted as requests pass. One registry per sidecar, so that two may live in one process."""

    def __init__(self, tiers: Callable[[], tuple[str, ...]], queued: Callable[[str], int]) -> None:
        self.registry = CollectorRegistry()
        self._tiers = tiers
        self._queued = queued
        self.requests = self._counter("requests", "Requests that ended, by outcome.", "tier", "outcome")
        self.rejections = self._counter("rejections", "Requests that were not served, by reason.", "tier", "reason")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, as the engine counted them.", "tier")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens that were cached.", "tier")
        self.predicted_cached_tokens = self._counter(
            "predicted_cached_tokens", "Prompt tokens that the prefix key predicted to be cached.", "tier"
        )
        self.output_tokens = self._counter("output_tokens", "Tokens generated.", "tier")
        self.sla = self._counter("sla", "Promises judged, by whether they were met.", "tier", "sla", "met")
        self.diverging = self._counter(
            "diverging_prompt_tokens", "Prompt tokens not cached because prompts differ near their start.", "tier"
        )
        self.flushes = self._counter("flushes", "Requests sent to the engine, by why they went then.", "tier", "reason")
        self.hold = self._histogram("hold", "Time that a request was held for company.", _HOLD_BUCKETS)
        self.group_size = Histogram(
            "cacheaware_group_size",
            "Requests, waiting or running, that share the prefix of one that is sent; 1: it has nobody.",
            (),
            _GROUP_BUCKETS,
            self.registry,
        ).labels()
        self.queue = Gauge(
            "cacheaware_queue_requests", "Requests that wait in the sidecar.", ["tier"], registry=self.registry
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token", "From arrival at the sidecar to the first token.", _FIRST_TOKEN_BUCKETS
        )
        self.time_per_output_token = self._histogram(
            "time_per_output_token", "Mean time between two tokens of a request.", _OUTPUT_TOKEN_BUCKETS
        )

    def page(self) -> bytes:
        for tier in self._tiers():
            self.queue.labels(tier).set(self._queued(tier))
        return generate_latest(self.registry)

    def keep(self, tiers: tuple[str, ...]) -> None:
        """Show a new tier's counters from zero on, and no queue of a tier that is gone."""
        self.queue.clear()
        for tier in tiers:
            for counter in (self.prompt_tokens, self.cached_tokens, self.predicted_cached_tokens, self.output_tokens):
                counter.labels(tier)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"cacheaware_{name}", text, labels, self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"cacheaware_{name}_seconds", text, ("tier",), buckets, self.registry)


class LedgerCollector(Collector):
    """The engine's accounts, from its last ledger. Of an `estimated` one only what is known: an estimate sees no idle
    blocks, and nothing that the engine drops or sends back.
    """

    def __init__(self, ledger: Callable[[], wire.Ledger | None], *, estimated: bool = False) -> None:
        self._ledger = ledger
        self._estimated = estimated

    def collect(self) -> Iterator[Metric]:
        ledger = self._ledger()
        if ledger is None:
            return
        yield GaugeMetricFamily("cacheaware_kv_capacity_blocks", "Usable KV blocks.", value=ledger.capacity)
        blocks = GaugeMetricFamily(
            "cacheaware_kv_blocks",
            "Blocks charged to a tier; lapsed ones are among the cached.",
            labels=["tier", "state"],
        )
        shares = GaugeMetricFamily("cacheaware_kv_quota_blocks", "A tier's shares.", labels=["tier", "kind"])
        borrowed = GaugeMetricFamily("cacheaware_kv_borrowed_blocks", "Used beyond nominal.", labels=["tier"])
        lent = GaugeMetricFamily("cacheaware_kv_lent_blocks", "Nominal that others use.", labels=["tier"])
        evicted = CounterMetricFamily("cacheaware_kv_evicted_blocks", "Cached blocks given up.", labels=["tier"])
        reclaimed = CounterMetricFamily("cacheaware_kv_reclaimed_blocks", "Blocks taken back.", labels=["tier"])
        preempted = CounterMetricFamily("cacheaware_preemptions", "Requests sent back to wait.", labels=["tier"])
        for name, tier in ledger.tiers.items():
            blocks.add_metric([name, "held"], tier.held)
            if not self._estimated:
                blocks.add_metric([name, "cached"], tier.cached)
                blocks.add_metric([name, "lapsed"], tier.lapsed)
            shares.add_metric([name, "nominal"], tier.nominal)
            shares.add_metric([name, "effective"], tier.effective)
            shares.add_metric([name, "limit"], tier.limit)
            borrowed.add_metric([name], tier.borrowed)
            lent.add_metric([name], tier.lent)
            evicted.add_metric([name], tier.evicted_total)
            reclaimed.add_metric([name], tier.reclaimed_total)
            preempted.add_metric([name], tier.preempted_total)
        yield from (blocks, shares, borrowed, lent)
        if not self._estimated:
            yield from (evicted, reclaimed, preempted)


class DroppedLinesCollector(Collector):
    """What the log could not write."""

    def __init__(self, dropped: Callable[[], int]) -> None:
        self._dropped = dropped

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "cacheaware_log_lines_dropped",
            "Log lines that were lost because nobody reads the log, or it could not be written.",
            value=self._dropped(),
        )


class WorkingSetCollector(Collector):
    """What the tiers' prompts refer to, and what a block of them costs; the operator's rebalancer reads both."""

    def __init__(self, tiers: Callable[[], Mapping[str, TierWorkingSet]]) -> None:
        self._tiers = tiers

    def collect(self) -> Iterator[Metric]:
        reuse = HistogramMetricFamily(
            "cacheaware_block_reuse_references",
            "Block references by the tier's references since the same block was last used; first uses in +Inf.",
            labels=["tier"],
        )
        pace = GaugeMetricFamily(
            "cacheaware_prefill_seconds_per_block",
            "Seconds that the engine needs to compute one block of a prompt of the tier.",
            labels=["tier"],
        )
        for name, tier in self._tiers().items():
            reuse.add_metric([name], list(zip(BUCKET_LABELS, tier.references, strict=True)), tier.reuse_sum)
            if tier.prefill_seconds_per_block is not None:
                pace.add_metric([name], tier.prefill_seconds_per_block)
        yield from (reuse, pace)


_WAITING = re.compile(r"^(vllm:num_requests_waiting(?:\{[^}\n]*\})?[ \t]+)(\S+)", re.MULTILINE)


def engine_page(page: str, queued: int) -> str:
    """The engine's page, where the requests that wait here count as waiting: endpoint pickers read that one number."""

    def add(found: re.Match[str]) -> str:
        try:
            return f"{found[1]}{float(found[2]) + queued}"
        except ValueError:
            return found[0]

    page = _WAITING.sub(add, page, count=1)  # with several series, ours belongs to none: the first one carries it
    page = page.removesuffix("# EOF\n")
    return page if not page or page.endswith("\n") else page + "\n"
