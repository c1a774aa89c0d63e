"""The cost model finds the prices of steps again, never a negative one, and says how far to trust itself."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheaware_api.wire import StepReport
from cacheaware_sidecar.scheduling.cost_model import FEWEST_REPORTS, CostModel, StepPrices

CPU = StepPrices(step=0.03, token=0.0016, context=4e-7, byte=5e-11)
BYTES_PER_TOKEN = 46_080


def report(
    prices: StepPrices, *, prefill: int, context: int, decoding: int, steps: int = 1, noise: float = 1.0
) -> StepReport:
    """So many equal steps: a chunk of a prompt after `context` tokens, and requests of that length that decode."""
    tokens = prefill + decoding
    attended = prefill * (context + prefill // 2) + decoding * context
    read = BYTES_PER_TOKEN * ((context + prefill if prefill else 0) + decoding * context)
    seconds = prices.step + prices.token * tokens + prices.context * attended + prices.byte * read
    return StepReport(steps, steps * tokens, steps * attended, steps * read, steps * read, steps * seconds * noise)


def mixed_load(prices: StepPrices, rng: random.Random, noise: float = 0.0) -> CostModel:
    model = CostModel()
    model.bytes_per_token = BYTES_PER_TOKEN
    for _ in range(200):
        model.observe(
            report(
                prices,
                prefill=rng.choice([0, 0, 64, 256]),
                context=rng.randrange(0, 3000),
                decoding=rng.randrange(1, 16),
                steps=rng.randrange(1, 4),
                noise=1 + rng.uniform(-noise, noise),
            )
        )
    return model


def test_nothing_is_known_before_enough_was_seen() -> None:
    model = CostModel()
    for _ in range(FEWEST_REPORTS - 1):
        model.observe(report(CPU, prefill=256, context=0, decoding=1))
    assert model.prices is None
    assert model.prefill_seconds(1000) is None
    model.observe(report(CPU, prefill=256, context=0, decoding=1))
    assert model.prices is not None


def test_exact_reports_give_the_exact_prices() -> None:
    found = mixed_load(CPU, random.Random(1)).prices
    assert found is not None
    assert found.step == pytest.approx(CPU.step, rel=0.02)
    assert found.token == pytest.approx(CPU.token, rel=0.02)
    assert found.context == pytest.approx(CPU.context, rel=0.05)
    assert found.byte == pytest.approx(CPU.byte, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_a_prefill_is_estimated_within_a_tenth_under_noise(seed: int) -> None:
    model = mixed_load(CPU, random.Random(seed), noise=0.2)
    truth = CostModel()
    truth.bytes_per_token = BYTES_PER_TOKEN
    exact = mixed_load(CPU, random.Random(seed)).prefill_seconds(2048, 1024)
    assert exact is not None
    assert model.prefill_seconds(2048, 1024) == pytest.approx(exact, rel=0.1)


def test_the_margin_is_what_estimates_are_exceeded_by() -> None:
    assert mixed_load(CPU, random.Random(3)).margin < 0.01
    assert 0.1 < mixed_load(CPU, random.Random(3), noise=0.2).margin < 0.35


def test_what_is_cached_costs_little_and_what_is_not_costs_by_the_token() -> None:
    model = mixed_load(CPU, random.Random(4))
    cold, warm = model.prefill_seconds(2048), model.prefill_seconds(48, 2000)
    assert cold is not None
    assert warm is not None
    assert warm < cold / 10


def test_it_follows_an_engine_that_became_slower() -> None:
    model = mixed_load(CPU, random.Random(5))
    slower = StepPrices(*(3 * price for price in (CPU.step, CPU.token, CPU.context, CPU.byte)))
    rng = random.Random(6)
    before = model.prefill_seconds(1024)
    for _ in range(200):
        model.observe(report(slower, prefill=256, context=rng.randrange(3000), decoding=rng.randrange(1, 16)))
    after = model.prefill_seconds(1024)
    assert before is not None
    assert after is not None
    assert after / before == pytest.approx(3, rel=0.1)


reports = st.builds(
    StepReport,
    steps=st.integers(0, 20),
    tokens=st.integers(0, 10**5),
    query_context=st.integers(0, 10**10),
    kv_bytes_read=st.integers(0, 10**13),
    unique_kv_bytes=st.integers(0, 10**13),
    step_seconds=st.floats(0, 1000) | st.just(float("nan")),
)


@given(st.lists(reports, max_size=60))
@settings(max_examples=150, deadline=None)
def test_no_price_is_ever_negative_and_more_work_never_costs_less(seen: list[StepReport]) -> None:
    model = CostModel()
    for one in seen:
        model.observe(one)
    prices = model.prices
    if prices is None:
        return
    assert min(prices.step, prices.token, prices.context, prices.byte) >= 0
    costs = [model.prefill_seconds(uncached) or 0.0 for uncached in (1, 100, 1000, 10_000)]
    assert costs == sorted(costs)


DEAR_STEPS = StepPrices(step=1.0, token=0.0016, context=4e-7, byte=5e-11)


class TestStepTokens:
    """How many tokens the engine computes in a step is only seen where it is given as many."""

    def test_an_engine_that_was_never_full_is_assumed_to_take_what_pays(self) -> None:
        model = mixed_load(DEAR_STEPS, random.Random(7))
        assert model.step_tokens == pytest.approx(5 * DEAR_STEPS.step / DEAR_STEPS.token, rel=0.1)

    def test_an_engine_that_is_full_step_after_step_takes_no_more(self) -> None:
        """Steps of one size do not tell what every step costs: nothing is concluded from that."""
        model = mixed_load(DEAR_STEPS, random.Random(7))
        for _ in range(200):
            model.observe(report(DEAR_STEPS, prefill=496, context=0, decoding=16))
        assert model.step_tokens == pytest.approx(512)

    def test_a_larger_step_than_ever_before_leaves_it_open_again(self) -> None:
        model = mixed_load(DEAR_STEPS, random.Random(7))
        for _ in range(10):
            model.observe(report(DEAR_STEPS, prefill=496, context=0, decoding=16))
        assert model.step_tokens == pytest.approx(512)
        model.observe(report(DEAR_STEPS, prefill=1008, context=0, decoding=16))
        assert model.step_tokens > 1024
