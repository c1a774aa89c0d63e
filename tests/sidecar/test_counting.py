"""Our counters and histograms make the page that the metrics library's own would."""

from __future__ import annotations

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from cacheaware_sidecar.counting import Counter, Histogram

BOUNDS = (0.0, 0.25, 1, 2.5, 80)
TIERS = st.sampled_from(["gold", "bronze", 'with "quotes"'])
VALUES = st.sampled_from(BOUNDS) | st.integers(-8, 800).map(lambda eighths: eighths / 8)  # sums are exact


def without_creation_times(page: bytes) -> list[str]:
    return [line for line in page.decode().splitlines() if "_created" not in line]


@given(st.lists(st.tuples(TIERS, VALUES)), st.lists(st.tuples(TIERS, st.integers(0, 1000))))
def test_the_page_is_the_librarys(spreads: list[tuple[str, float]], counts: list[tuple[str, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("hold_seconds", "Time.", ("tier",), BOUNDS, ours)
    counter = Counter("tokens", "Tokens.", ("tier",), ours)
    their_histogram = prometheus_client.Histogram("hold_seconds", "Time.", ["tier"], registry=theirs, buckets=BOUNDS)
    their_counter = prometheus_client.Counter("tokens", "Tokens.", ["tier"], registry=theirs)
    for tier, value in spreads:
        histogram.labels(tier).observe(value)
        their_histogram.labels(tier).observe(value)
    for tier, amount in counts:
        counter.labels(tier).inc(amount)
        their_counter.labels(tier).inc(amount)
    assert without_creation_times(generate_latest(ours)) == without_creation_times(generate_latest(theirs))


def test_a_counter_that_was_only_named_is_shown_with_zero() -> None:
    registry = CollectorRegistry()
    Counter("tokens", "Tokens.", ("tier",), registry).labels("gold")
    assert 'tokens_total{tier="gold"} 0.0' in generate_latest(registry).decode()
