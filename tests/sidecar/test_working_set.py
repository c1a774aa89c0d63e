"""Working sets: what is counted of a tier's prompts, how little is remembered for it, and what the page says of it."""

from __future__ import annotations

import functools
import hashlib
import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from cacheaware_sidecar.metering import Usage
from cacheaware_sidecar.prefill_pace import FEWEST, PrefillPace
from cacheaware_sidecar.prefix_key import MAX_CHUNKS, PrefixKey, prefix_key
from cacheaware_sidecar.reuse_histogram import BOUNDS, CLASSES, FEWEST_CLASSES, ReuseHistogram
from cacheaware_sidecar.testing import Behaviour, StubEngine
from cacheaware_sidecar.testing_sidecar import Running, tier, view
from cacheaware_sidecar.working_set import WorkingSets


def key(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def keys(numbers: Iterable[int]) -> list[bytes]:
    return [key(number) for number in numbers]


def exact(prompts: Iterable[Sequence[int]], blocks_per_key: float = 1.0) -> list[float]:
    """The definition: reuse times with everything remembered."""
    last: dict[int, float] = {}
    counts = [0.0] * (len(BOUNDS) + 1)
    now = 0.0
    for prompt in prompts:
        for number in prompt:
            now += blocks_per_key
            place = bisect_left(BOUNDS, now - last[number]) if number in last else len(BOUNDS)
            counts[place] += blocks_per_key
            last[number] = now
    return [sum(counts[: place + 1]) for place in range(len(counts))]


class TestReuseTimes:
    @given(
        st.lists(st.lists(st.integers(0, 60), max_size=30, unique=True), max_size=30),
        st.sampled_from([0.25, 1.0, 2.5]),
    )
    def test_are_counted_as_defined_while_all_keys_are_known(self, prompts: list[list[int]], size: float) -> None:
        histogram = ReuseHistogram(most_keys=64)
        for prompt in prompts:
            histogram.refer(keys(prompt), size)
        assert histogram.rate == 1
        assert histogram.cumulative() == pytest.approx(exact(prompts, size))

    def test_a_first_use_is_in_no_finite_bucket(self) -> None:
        histogram = ReuseHistogram()
        histogram.refer(keys(range(10)), 1)
        assert histogram.cumulative() == [0.0] * len(BOUNDS) + [10.0]
        assert histogram.sum == 0

    def test_a_prompt_sent_again_comes_back_after_its_own_length(self) -> None:
        histogram = ReuseHistogram()
        for _ in range(2):
            histogram.refer(keys(range(64)), 1)
        cumulative = histogram.cumulative()
        at = BOUNDS.index(64)
        assert (cumulative[at - 1], cumulative[at], cumulative[-1]) == (0, 64, 128)
        assert histogram.sum == 64 * 64

    def test_chunks_beyond_the_key_take_room_and_are_first_uses(self) -> None:
        histogram = ReuseHistogram()
        for _ in range(2):
            histogram.refer(keys(range(16)), 1, unknown_keys=48)
        cumulative = histogram.cumulative()
        at = BOUNDS.index(64)
        assert (cumulative[at - 1], cumulative[at], cumulative[-1]) == (0, 16, 128)

    def test_counters_never_fall(self) -> None:
        rng = random.Random(1)
        histogram = ReuseHistogram(most_keys=256)
        before = histogram.cumulative()
        for _ in range(300):
            histogram.refer(keys(rng.sample(range(2000), 20)), 0.5)
            after = histogram.cumulative()
            assert all(new >= old for new, old in zip(after, before, strict=True))
            assert after == sorted(after)
            before = after

    def test_a_limit_that_leaves_nothing_to_sample_is_refused(self) -> None:
        with pytest.raises(ValueError, match="most_keys must be at least 16, got 3"):
            ReuseHistogram(most_keys=3)


MOST = 4000


@functools.cache
def conversations() -> tuple[list[int], ...]:
    """Conversations over one common start, many times as many chunks as are remembered."""
    rng = random.Random(7)
    length = [20] * 1500
    prompts = []
    for _ in range(4000):
        # Some conversations are busy and most are not.
        who = min(len(length) - 1, int(rng.paretovariate(0.7)) + rng.randrange(700))
        length[who] = min(60, length[who] + 2)
        prompts.append([*range(16), *(1000 + who * 100 + turn for turn in range(length[who]))])
    return tuple(prompts)


@functools.cache
def sampled() -> ReuseHistogram:
    histogram = ReuseHistogram(MOST)
    for prompt in conversations():
        histogram.refer(keys(prompt), 1)
        assert histogram.keys <= MOST
    return histogram


class TestSampling:
    def test_begins_when_memory_is_full(self) -> None:
        distinct = len({number for prompt in conversations() for number in prompt})
        assert distinct > 5 * MOST
        assert FEWEST_CLASSES / CLASSES <= sampled().rate < 0.5

    def test_keeps_the_shape(self) -> None:
        told, true = sampled().cumulative(), exact(conversations())
        assert told[-1] == pytest.approx(true[-1], rel=0.05)
        errors = [abs(a / told[-1] - b / true[-1]) for a, b in zip(told, true, strict=True)]
        assert max(errors) < 0.03
        assert sum(errors) / len(errors) < 0.01

    def test_counts_what_everybody_starts_with_exactly(self) -> None:
        """By luck of the hash a sample holds none of these chunks, or all: either way they are counted once."""
        rng = random.Random(3)
        for hashed in (0, CLASSES - 1):
            root = bytes(15) + bytes([hashed])
            histogram = ReuseHistogram(MOST)
            prompts = [[root, *keys(rng.sample(range(10**6), 19))] for _ in range(1000)]
            for prompt in prompts:
                histogram.refer(prompt, 1)
            assert histogram.rate < 1
            assert histogram.cumulative()[BOUNDS.index(32)] >= 999

    def test_never_goes_below_a_tenth_however_much_comes(self) -> None:
        histogram = ReuseHistogram(most_keys=64)
        for start in range(0, 20_000, 50):
            histogram.refer(keys(range(start, start + 50)), 1)
            assert histogram.keys <= 64
        assert histogram.rate == FEWEST_CLASSES / CLASSES

    def test_keys_that_no_cache_could_still_hold_are_forgotten(self) -> None:
        histogram = ReuseHistogram(most_keys=160)
        histogram.refer(keys(range(100)), 1)
        histogram.refer([], 1, unknown_keys=int(BOUNDS[-1]) + 1)
        histogram.refer(keys(range(100, 400)), 1)
        assert histogram.keys <= 160


class TestCost:
    def test_a_class_of_keys_is_forgotten_key_by_key(self) -> None:
        histogram = ReuseHistogram(most_keys=1600)
        most, rates = 0, set()
        for start in range(0, 16_000, 20):
            before = histogram.keys
            histogram.refer(keys(range(start, start + 20)), 1)
            most = max(most, before - histogram.keys)
            rates.add(histogram.rate)
        assert most <= 20
        assert len(rates) == CLASSES - FEWEST_CLASSES + 1


class TestPrefillPace:
    def test_is_the_slope_and_not_the_fixed_time(self) -> None:
        pace = PrefillPace()
        for blocks in range(10, 30):
            pace.note(blocks, 0.5 + 0.01 * blocks)
        assert pace.seconds_per_block() == pytest.approx(0.01)

    def test_is_not_moved_by_requests_that_waited_inside_the_engine(self) -> None:
        rng = random.Random(5)
        pace = PrefillPace()
        for number in range(48):
            blocks = rng.randint(10, 200)
            pace.note(blocks, 0.05 + 0.01 * blocks + (rng.uniform(5, 20) if number % 6 == 0 else 0))
        assert pace.seconds_per_block() == pytest.approx(0.01, rel=0.2)

    def test_is_that_of_the_same_engine_for_a_tier_whose_requests_come_in_bursts(self) -> None:
        rng = random.Random(6)
        pace = PrefillPace()
        waited = 0.0
        for number in range(96):
            blocks = rng.randint(10, 200)
            waited = 0.0 if number % 10 == 0 else waited + 0.05 + 0.01 * blocks
            pace.note(blocks, waited + 0.05 + 0.01 * blocks)
        assert pace.seconds_per_block() == pytest.approx(0.01, rel=0.2)

    @pytest.mark.parametrize("seed", range(8))
    def test_hardly_moves_where_one_of_thirty_did_not_wait(self, seed: int) -> None:
        """Of a hundred requests only three show it, which may all be alike."""
        rng = random.Random(seed)
        pace = PrefillPace()
        waited = 0.0
        for number in range(600):
            blocks = rng.randint(10, 200)
            waited = 0.0 if number % 30 == 0 else waited + 0.05 + 0.01 * blocks
            pace.note(blocks, waited + 0.05 + 0.01 * blocks)
        assert pace.seconds_per_block() == pytest.approx(0.01, rel=0.1)

    def test_hardly_moves_where_all_short_prompts_waited(self) -> None:
        """Then the fastest request of all is no sign of what a first token costs at least."""
        rng = random.Random(7)
        pace = PrefillPace()
        for number in range(384):
            blocks = rng.randint(21, 200) if number % 4 else 1
            waited = 0.19 if blocks == 1 else 0.0 if number % 6 == 1 else rng.uniform(0.0, 2.0)
            pace.note(blocks, waited + 0.05 + 0.01 * blocks)
        assert pace.seconds_per_block() == pytest.approx(0.01, rel=0.1)

    def test_of_prompts_that_are_all_alike_is_their_mean(self) -> None:
        pace = PrefillPace()
        for _ in range(20):
            pace.note(50, 0.5)
        assert pace.seconds_per_block() == pytest.approx(0.01)

    def test_is_unknown_until_enough_was_seen(self) -> None:
        pace = PrefillPace()
        for blocks in range(1, FEWEST):
            pace.note(blocks * 10, blocks * 0.1)
        assert pace.seconds_per_block() is None
        pace.note(0, 0.1)  # everything was cached: it says nothing about a block
        assert pace.seconds_per_block() is None
        pace.note(100, 1.0)
        assert pace.seconds_per_block() == pytest.approx(0.01)


class TestWorkingSets:
    def test_a_chunk_counts_as_the_part_of_a_block_that_it_covers(self) -> None:
        sets = WorkingSets()
        sets.keep(["gold"])
        sets.refer("gold", PrefixKey(tuple(keys(range(8))), 8 * 64), chunk_tokens=8, block_size=16)
        assert sets.tiers()["gold"].references[-1] == 4

    def test_a_prompt_longer_than_its_key_counts_whole(self) -> None:
        key = prefix_key("/v1/completions", {"prompt": "x" * 64 * (MAX_CHUNKS + 10)}, "")
        assert key is not None
        sets = WorkingSets()
        sets.keep(["gold"])
        sets.refer("gold", key, chunk_tokens=16, block_size=16)
        assert sets.tiers()["gold"].references[-1] == MAX_CHUNKS + 10

    def test_a_long_prompt_is_counted_in_steps_that_change_nothing(self) -> None:
        key = PrefixKey(tuple(keys(range(1300))), 64 * 1310)
        at_once, in_steps = WorkingSets(), WorkingSets()
        for sets in (at_once, in_steps):
            sets.keep(["gold"])
        for _ in range(2):
            at_once.refer("gold", key, chunk_tokens=8, block_size=16)
            steps = in_steps.refer_steps("gold", key, chunk_tokens=8, block_size=16)
            assert sum(1 for _ in steps) == 2
        assert in_steps.tiers() == at_once.tiers()

    def test_a_tier_that_goes_while_a_prompt_is_counted_is_forgotten(self) -> None:
        sets = WorkingSets()
        sets.keep(["gold"])
        steps = sets.refer_steps("gold", PrefixKey(tuple(keys(range(1300))), 64 * 1300), chunk_tokens=8, block_size=16)
        next(steps)
        sets.keep(["silver"])
        assert list(steps) == []
        assert sets.tiers().keys() == {"silver"}

    def test_tiers_do_not_see_each_others_references(self) -> None:
        sets = WorkingSets()
        sets.keep(["bronze", "gold"])
        for name in ("bronze", "gold"):
            sets.refer(name, PrefixKey(tuple(keys(range(8))), 512), chunk_tokens=16, block_size=16)
        assert all(tier.references[-2] == 0 for tier in sets.tiers().values())

    def test_a_tier_that_stays_keeps_its_counts_and_one_that_is_gone_is_forgotten(self) -> None:
        sets = WorkingSets()
        sets.keep(["bronze", "gold"])
        for name in ("bronze", "gold"):
            sets.refer(name, PrefixKey(tuple(keys(range(8))), 512), chunk_tokens=16, block_size=16)
        sets.keep(["gold", "silver"])
        assert {name: tier.references[-1] for name, tier in sets.tiers().items()} == {"gold": 8, "silver": 0}
        sets.refer("bronze", PrefixKey(tuple(keys(range(8))), 512), chunk_tokens=16, block_size=16)
        assert sets.tiers().keys() == {"gold", "silver"}

    def test_all_tiers_together_share_the_memory(self) -> None:
        sets = WorkingSets(most_keys=3200)
        sets.keep(["bronze"])
        sets.refer("bronze", PrefixKey(tuple(keys(range(3000))), 3000 * 64), chunk_tokens=16, block_size=16)
        names = [f"tier-{number}" for number in range(15)] + ["bronze"]
        sets.keep(names)
        for name in names:
            sets.refer(name, PrefixKey(tuple(keys(range(3000))), 3000 * 64), chunk_tokens=16, block_size=16)
        assert sum(histogram.keys for histogram in sets._reuse.values()) <= 3200

    def test_an_engine_that_does_not_tell_what_was_cached_teaches_no_pace(self) -> None:
        sets = WorkingSets()
        sets.keep(["gold"])
        for _ in range(FEWEST):
            sets.first_token("gold", Usage(160, 1), 0.1, block_size=16)
        assert sets.tiers()["gold"].prefill_seconds_per_block is None
        for _ in range(FEWEST):
            sets.first_token("gold", Usage(160, 1, cached_tokens=0), 0.1, block_size=16)
        assert sets.tiers()["gold"].prefill_seconds_per_block == pytest.approx(0.01)


class TestPage:
    async def _page(self, sidecar: Running) -> dict[str, dict[tuple[str, ...], float]]:
        _, page = await sidecar.control("GET", "/metrics")
        samples: dict[str, dict[tuple[str, ...], float]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = tuple(sample.labels.get(name, "") for name in ("tier", "le"))
                samples.setdefault(sample.name, {})[labels] = sample.value
        return samples

    async def _ask(self, sidecar: Running, text: str) -> None:
        body = {"prompt": text, "service_tier": "gold", "stream": True}
        async with sidecar.client.post(sidecar.url + "/v1/completions", json=body) as answer:
            await answer.read()

    async def test_shows_every_tier_from_zero_on(self, sidecar: Running) -> None:
        page = await self._page(sidecar)
        buckets = page["cacheaware_block_reuse_references_bucket"]
        assert {labels[0] for labels in buckets} == {"gold", "bronze"}
        assert len(buckets) == 2 * (len(BOUNDS) + 1)
        assert set(buckets.values()) == {0.0}
        assert "cacheaware_prefill_seconds_per_block" not in page

    async def test_counts_the_blocks_of_prompts_that_were_computed(self, sidecar: Running, engine: StubEngine) -> None:
        text = "".join(f"sentence number {number:04}. " for number in range(200))
        for _ in range(FEWEST + 1):
            await self._ask(sidecar, text)
        page = await self._page(sidecar)
        buckets = page["cacheaware_block_reuse_references_bucket"]
        assert buckets["gold", "+Inf"] == page["cacheaware_block_reuse_references_count"]["gold", ""] > 100
        again = max(value for (name, bound), value in buckets.items() if name == "gold" and bound != "+Inf")
        assert again == pytest.approx(buckets["gold", "+Inf"] * FEWEST / (FEWEST + 1), rel=0.2)
        assert buckets["bronze", "+Inf"] == 0
        assert page["cacheaware_prefill_seconds_per_block"].keys() == {("gold", "")}

    async def test_does_not_count_what_the_engine_refused(self, sidecar: Running, engine: StubEngine) -> None:
        engine.behaviour = Behaviour(status=400, body=b"{}")
        await self._ask(sidecar, "a prompt that is too long " * 100)
        page = await self._page(sidecar)
        assert page["cacheaware_block_reuse_references_bucket"]["gold", "+Inf"] == 0

    async def test_forgets_a_tier_that_is_gone(self, sidecar: Running) -> None:
        sidecar.sidecar.views.offer(view(2, tiers=[tier("silver")], defaultTier="silver"))
        page = await self._page(sidecar)
        assert {name for name, _ in page["cacheaware_block_reuse_references_bucket"]} == {"silver"}
