"""Prometheus metrics under vLLM's names, so that dashboards and endpoint pickers made for vLLM read this engine too.

Counters and histograms are fed by the step loop; gauges are read from the last ledger when somebody scrapes. The only
label beside an enum is the model's name.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from cacheaware_api.wire import Ledger

from .blocks import Layout
from .requests import Finish

FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
NEXT_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
WHOLE_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
FINISHED_REASON = "finished_reason"


class Metrics:
    """What the engine counts. Made for one model, before it is loaded."""

    def __init__(self, model_name: str, cache_dtype: str = "auto") -> None:
        self.registry = CollectorRegistry()
        self._model = {"model_name": model_name}
        self._gauges = _LedgerGauges(model_name, cache_dtype)
        self.registry.register(self._gauges)
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._preemptions = self._counter("vllm:num_preemptions", "Times a request lost its blocks and started again.")
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.")
        self._generation = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._read = self._counter("cacheaware_kv_read_bytes", "Keys and values that attention read.")
        self._unique = self._counter("cacheaware_kv_unique_bytes", "The same, each stored token once a step.")
        self._in_place = self._counter("cacheaware_kv_in_place_bytes", "Of those read, bytes that were not copied.")
        self._finished = Counter(
            "vllm:request_success",
            "Ended sequences by reason.",
            ["model_name", FINISHED_REASON],
            registry=self.registry,
        )
        for reason in Finish:
            self._finished.labels(model_name, reason)
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_BUCKETS
        )
        self._next_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between a sequence's tokens.", NEXT_TOKEN_BUCKETS
        )
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end of a request.", WHOLE_BUCKETS
        )

    def follow(self, ledger: Callable[[], Ledger], layout: Callable[[], Layout]) -> None:
        """From now on there is a ledger to read gauges from, and how its blocks lie."""
        self._gauges.ledger, self._gauges.layout = ledger, layout

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def admitted(self, prompt_tokens: int, looked_up: int, cached_tokens: int) -> None:
        """A request runs for the first time; one that waited through many steps still counts once."""
        self._queries.inc(looked_up)
        self._hits.inc(cached_tokens)
        self._prompt.inc(prompt_tokens)

    def preempted(self, requests: int) -> None:
        self._preemptions.inc(requests)

    def step(self, *, read: int, unique: int, in_place: int) -> None:
        """A step's attention has read so many bytes of stored keys and values."""
        self._read.inc(read)
        self._unique.inc(unique)
        self._in_place.inc(in_place)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, sequences: int) -> None:
        """So many sequences got a token, so long after their last: those of a step mostly waited the same time."""
        self._next_token.observe(seconds, sequences)

    def generated(self, tokens: int) -> None:
        self._generation.inc(tokens)

    def ended(self, finish: Finish) -> None:
        self._finished.labels(self._model["model_name"], finish).inc()

    def request_ended(self, seconds: float) -> None:
        self._whole.observe(seconds)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(**self._model)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> _Histogram:
        histogram = _Histogram(name, text, self._model["model_name"], bounds)
        self.registry.register(histogram)
        return histogram


class _Histogram(Collector):
    """Takes many equal observations at once: the client library's own takes them one by one, tens of them a step."""

    def __init__(self, name: str, text: str, model_name: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._model_name, self._bounds = name, text, model_name, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._text, labels=["model_name"])

    def collect(self) -> Iterator[Metric]:
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        sums = itertools.accumulate(list(self._counts))  # copied: the step loop goes on counting
        family.add_metric([self._model_name], list(zip(bounds, sums, strict=True)), self._sum)
        yield family


class _LedgerGauges(Collector):
    """Gauges read from the last ledger at each scrape; absent while the model loads."""

    def __init__(self, model_name: str, cache_dtype: str) -> None:
        self._model_name, self._cache_dtype = model_name, cache_dtype
        self.ledger: Callable[[], Ledger] | None = None
        self.layout: Callable[[], Layout] | None = None

    def describe(self) -> Iterator[Metric]:
        return iter(())  # otherwise registration would collect once, before there is a ledger

    def collect(self) -> Iterator[Metric]:
        if self.ledger is None or self.layout is None:
            return
        ledger, layout = self.ledger(), self.layout()
        held = ledger.public.held + sum(tier.held for tier in ledger.tiers.values())
        gauges = (
            ("vllm:num_requests_running", "Requests that hold blocks.", ledger.running),
            ("vllm:num_requests_waiting", "Requests that wait for blocks.", ledger.waiting),
            ("vllm:kv_cache_usage_perc", "Share of blocks held by running requests; 1 is all.", held / ledger.capacity),
            (
                "cacheaware_kv_extents_per_sequence",
                "Stretches of neighbouring blocks that a running sequence lies in, on average; 1 is best.",
                layout.extents / max(1, layout.sequences),
            ),
            (
                "cacheaware_kv_internal_fragmentation_ratio",
                "Share of the held blocks' slots without a token.",
                layout.unused_ratio,
            ),
            (
                "cacheaware_kv_external_fragmentation_ratio",
                "Share of the free blocks outside the longest free stretch; 0: all free blocks lie side by side.",
                1 - layout.longest_free / layout.free if layout.free else 0.0,
            ),
            ("cacheaware_kv_set_aside_blocks", "Free blocks set aside by hints.", layout.set_aside),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        info = {
            "model_name": self._model_name,
            "block_size": str(ledger.block_size),
            "num_gpu_blocks": str(ledger.capacity),
            "cache_dtype": self._cache_dtype,
            "enable_prefix_caching": "True",
        }
        config = GaugeMetricFamily("vllm:cache_config_info", "Shape of the KV cache.", labels=list(info))
        config.add_metric(list(info.values()), 1)
        yield config
