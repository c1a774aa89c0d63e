"""Hit curves: read from a page, faded, and as good as simulating the cache."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from cacheaware_operator.metrics_page import PageUnreadable, TierPage, read_page
from cacheaware_operator.reuse_curves import ReuseCounts, hits, working_set
from cacheaware_sidecar.metrics import WorkingSetCollector
from cacheaware_sidecar.reuse_histogram import BOUNDS, ReuseHistogram
from cacheaware_sidecar.working_set import TierWorkingSet

SHARED = Path(os.environ.get("CACHEAWARE_SHARED", Path(__file__).parents[2] / ".." / "shared"))
MOONCAKE = SHARED / "traces" / "mooncake"

Prompts = Sequence[Sequence[int]]


def digest(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def page_of(histogram: ReuseHistogram, tier: str = "gold", pace: float | None = 0.01) -> str:
    """As the sidecar shows it."""
    registry = CollectorRegistry()
    shown = {tier: TierWorkingSet(histogram.cumulative(), histogram.sum, pace)}
    registry.register(WorkingSetCollector(lambda: shown))
    return generate_latest(registry).decode()


def counted(prompts: Prompts, most_keys: int = 200_000) -> ReuseCounts:
    histogram = ReuseHistogram(most_keys)
    for prompt in prompts:
        histogram.refer([digest(block) for block in prompt], 1)
    reuse = read_page(page_of(histogram))["gold"].reuse
    assert reuse is not None
    return reuse


def simulated(prompts: Prompts, size: int) -> int:
    """The hits of an LRU cache of `size` blocks that begins empty."""
    cache: OrderedDict[int, None] = OrderedDict()
    hit = 0
    for prompt in prompts:
        for block in prompt:
            if block in cache:
                hit += 1
                cache.move_to_end(block)
            else:
                cache[block] = None
                if len(cache) > size:
                    cache.popitem(last=False)
    return hit


def trace(name: str, seconds: int = 300) -> list[list[int]]:
    path = MOONCAKE / name
    if not path.exists():
        pytest.skip(f"{path} is not there; set CACHEAWARE_SHARED to the folder that holds traces/")
    with path.open() as lines:
        rows = [json.loads(line) for line in lines]
    return [row["hash_ids"] for row in rows if row["timestamp"] < seconds * 1000]


class TestAgainstSimulation:
    """Mean absolute error of the hit ratio over 40 sizes, with everything counted and with a sample."""

    @pytest.mark.parametrize("name", ["conversation_trace.jsonl", "synthetic_trace.jsonl"])
    @pytest.mark.parametrize(
        ("most_keys", "allowed"), [pytest.param(200_000, 0.003, id="all"), pytest.param(2_000, 0.012, id="sampled")]
    )
    def test_real_traffic(self, name: str, most_keys: int, allowed: float) -> None:
        prompts = trace(name)
        references = sum(map(len, prompts))
        distinct = len({block for prompt in prompts for block in prompt})
        sizes = [max(1, distinct * part // 40) for part in range(1, 41)]
        predicted = hits(counted(prompts, most_keys), sizes)
        errors = [
            abs(told - simulated(prompts, size)) / references for told, size in zip(predicted, sizes, strict=True)
        ]
        assert sum(errors) / len(errors) < allowed
        assert max(errors) < 5 * allowed

    def test_a_loop_hits_nothing_before_it_fits_and_everything_then(self) -> None:
        prompts = [range(1000)] * 30
        counts = counted(prompts)
        few, many = hits(counts, [700, 1200])
        assert few / counts.references < 0.02
        assert many / counts.references > 0.95

    def test_draws_from_few_blocks_hit_in_proportion_to_what_fits(self) -> None:
        rng = random.Random(11)
        prompts = [[rng.randrange(1000) for _ in range(10)] for _ in range(5000)]
        counts = counted(prompts)
        for size, told in zip((200, 500, 800), hits(counts, (200, 500, 800)), strict=True):
            assert told / counts.references == pytest.approx(size / 1000, abs=0.03)
            assert told == pytest.approx(simulated(prompts, size), rel=0.06)


CUMULATIVE = st.lists(st.floats(0, 1000), min_size=len(BOUNDS) + 1, max_size=len(BOUNDS) + 1).map(
    lambda counts: ReuseCounts(BOUNDS, tuple(sum(counts[: place + 1]) for place in range(len(counts))))
)


class TestCurve:
    @given(CUMULATIVE)
    def test_never_falls_and_never_hits_more_than_came_back(self, counts: ReuseCounts) -> None:
        sizes = [0, 1, 5, 50, 500, 5000, 50_000, 500_000, 5e6, 5e7]
        told = hits(counts, sizes)
        assert told[0] == 0
        assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(told))
        assert told[-1] <= counts.cumulative[-2] * (1 + 1e-9)

    @given(CUMULATIVE, st.sampled_from([3.0, 4.0, 30.0, 1000.0, 123_456.0, 3e6]))
    def test_a_cache_of_the_working_set_hits_what_comes_back_in_time(self, counts: ReuseCounts, time: float) -> None:
        size = working_set(counts, time)
        assert size <= time
        (told,) = hits(counts, [size])
        places = [place for place, bound in enumerate(BOUNDS) if bound <= time]
        least = counts.cumulative[places[-1]] if places else 0.0
        most = counts.cumulative[len(places)] if len(places) < len(BOUNDS) else counts.cumulative[-2]
        rounding = 1e-4 * (1 + counts.references)
        assert least - rounding <= told <= most + rounding

    def test_without_references_hits_nothing(self) -> None:
        empty = ReuseCounts(BOUNDS, (0.0,) * (len(BOUNDS) + 1))
        assert hits(empty, [0, 10, 1e9]) == [0, 0, 0]
        assert working_set(empty, 1000) == 0


class TestCounters:
    def test_a_difference_is_what_came_since(self) -> None:
        histogram = ReuseHistogram()
        histogram.refer([digest(n) for n in range(100)], 1)
        early = read_page(page_of(histogram))["gold"].reuse
        histogram.refer([digest(n) for n in range(100)], 1)
        late = read_page(page_of(histogram))["gold"].reuse
        assert early is not None
        assert late is not None
        assert late.since(early).references == 100
        assert late.since(late).references == 0

    @pytest.mark.parametrize(
        "after",
        [
            pytest.param((1.0, 2.0, 3.0), id="fewer of all"),
            pytest.param((6.0, 7.0, 20.0), id="more in all but fewer in a bucket"),
        ],
    )
    def test_a_sidecar_that_started_anew_counts_from_zero(self, after: tuple[float, ...]) -> None:
        before = ReuseCounts((4.0, 8.0), (5.0, 10.0, 12.0))
        now = ReuseCounts((4.0, 8.0), after)
        assert now.since(before) == now

    def test_other_buckets_after_an_upgrade_count_from_zero(self) -> None:
        before, now = ReuseCounts((4.0,), (5.0, 10.0)), ReuseCounts((8.0,), (6.0, 12.0))
        assert now.since(before) == now
        assert before.plus(now) == now

    def test_faded_counts_keep_their_curve(self) -> None:
        counts = ReuseCounts((4.0, 8.0), (5.0, 10.0, 12.0))
        assert hits(counts.faded(0.5), [3, 6]) == pytest.approx([each / 2 for each in hits(counts, [3, 6])])


class TestPage:
    def test_what_the_sidecar_shows_is_read_back(self) -> None:
        histogram = ReuseHistogram()
        for _ in range(3):
            histogram.refer([digest(n) for n in range(50)], 0.8)
        tier = read_page("# other things\nup 1\n" + page_of(histogram))["gold"]
        assert tier.prefill_seconds_per_block == 0.01
        assert tier.reuse is not None
        assert tier.reuse.cumulative == pytest.approx(histogram.cumulative())
        assert tier.reuse.bounds == pytest.approx(BOUNDS, rel=1e-5)

    def test_a_pace_that_is_not_known_yet_is_absent(self) -> None:
        assert read_page(page_of(ReuseHistogram(), pace=None))["gold"].prefill_seconds_per_block is None

    def test_a_page_without_our_metrics_says_nothing(self) -> None:
        assert read_page("# HELP up\nup 1\n") == {}

    def test_labels_may_come_in_any_order(self) -> None:
        page = (
            'cacheaware_block_reuse_references_bucket{le="4",tier="a"} 1\n'
            'cacheaware_block_reuse_references_bucket{tier="a",le="+Inf"} 2 1700000000\n'
        )
        assert read_page(page) == {"a": TierPage(ReuseCounts((4.0,), (1.0, 2.0)))}

    @pytest.mark.parametrize(
        ("lines", "complaint"),
        [
            pytest.param(['le="4"} 1'], "the last bucket must be", id="cut short"),
            pytest.param(['le="4"} 5', 'le="+Inf"} 3'], "must not fall", id="falling counts"),
            pytest.param(['le="8"} 1', 'le="4"} 2', 'le="+Inf"} 3'], "le must rise", id="bounds out of order"),
            pytest.param(['le="4"} NaN', 'le="+Inf"} 3'], "'NaN' is no count", id="not a number"),
            pytest.param(['le="4"} -1', 'le="+Inf"} 3'], "'-1' is no count", id="negative"),
            pytest.param(['le="x"} 1', 'le="+Inf"} 3'], "could not convert", id="bound that is no number"),
        ],
    )
    def test_what_cannot_be_understood_is_refused_with_metric_and_tier(self, lines: list[str], complaint: str) -> None:
        page = "".join(f'cacheaware_block_reuse_references_bucket{{tier="gold",{line}\n' for line in lines)
        with pytest.raises(PageUnreadable, match="cacheaware_block_reuse_references of tier 'gold'") as refused:
            read_page(page)
        assert complaint in str(refused.value)
