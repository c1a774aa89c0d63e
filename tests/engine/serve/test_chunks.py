"""A step computes as much of prompts as the promises to those who decode leave time for."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheaware_api.wire import Quotas, Revision, TierQuota
from cacheaware_engine.chunk_budget import LEAST_SAMPLES, ChunkBudget
from cacheaware_engine.engine_testing import SteppedEngine
from cacheaware_engine.loader import LoadedModel
from cacheaware_engine.runner import ModelRunner, SequenceWork, StepOutput

KIB = 1024


class Device:
    """Takes so long for a step, a token and a byte."""

    def __init__(self, step: float, token: float, byte: float) -> None:
        self.step, self.token, self.byte = step, token, byte

    def seconds(self, tokens: int, kv_bytes: int) -> float:
        return self.step + tokens * self.token + kv_bytes * self.byte


def learnt(device: Device, steps: Sequence[tuple[int, int]], least: int = 16, most: int = 512) -> ChunkBudget:
    budget = ChunkBudget(least, most)
    for tokens, kv_bytes in steps:
        budget.learn(tokens, kv_bytes, device.seconds(tokens, kv_bytes))
    return budget


@given(
    step=st.floats(0.001, 0.1),
    token=st.floats(1e-5, 5e-3),
    byte=st.floats(0, 1e-10),
    promised=st.floats(0.01, 2.0),
    decodes=st.integers(1, 64),
    kv_bytes=st.integers(0, 2**30),
)
def test_a_step_with_the_budgets_tokens_takes_as_long_as_was_promised(
    step: float, token: float, byte: float, promised: float, decodes: int, kv_bytes: int
) -> None:
    device = Device(step, token, byte)
    steps = [(1 + 37 * i % 300, (i * i % 7) * 2**27) for i in range(40)]
    tokens = learnt(device, steps).tokens(promised, decodes, kv_bytes)
    if tokens > 16:
        assert device.seconds(decodes + tokens, kv_bytes) <= promised * 1.01
    if tokens < 512:
        assert device.seconds(decodes + tokens + 1, kv_bytes) >= promised * 0.99


def test_nothing_promised_and_nothing_learnt_leave_a_step_whole() -> None:
    device = Device(0.01, 1e-3, 0.0)
    steps = [(100, 0), (1, 0)] * LEAST_SAMPLES
    assert learnt(device, steps).tokens(None, 3, 0) == 512
    assert learnt(device, steps[: LEAST_SAMPLES - 1]).tokens(0.02, 3, 0) == 512


def test_a_promise_that_cannot_be_kept_stops_no_prompt() -> None:
    assert learnt(Device(0.5, 1e-3, 0.0), [(100, 0), (1, 0)] * 20).tokens(0.1, 8, 0) == 16


def test_a_machine_that_becomes_slower_is_believed_after_some_steps() -> None:
    fast, slow = Device(0.01, 1e-4, 0.0), Device(0.02, 4e-4, 0.0)
    budget = learnt(fast, [(256, 0), (8, 0)] * 50)
    before = budget.tokens(0.05, 8, 0)
    for tokens in (256, 8) * 150:
        budget.learn(tokens, 0, slow.seconds(tokens, 0))
    assert before > 350
    assert budget.tokens(0.05, 8, 0) == pytest.approx((0.05 - 0.02) / 4e-4 - 8, abs=8)


def test_steps_that_are_all_alike_do_not_unsettle_what_is_known() -> None:
    device = Device(0.01, 1e-4, 0.0)
    budget = learnt(device, [(256, 0), (8, 0)] * 20)
    for _ in range(5_000):
        budget.learn(8, 0, device.seconds(8, 0))
    assert budget.tokens(0.03, 8, 0) == pytest.approx((0.03 - 0.01) / 1e-4 - 8, rel=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.5])
def test_long_answers_to_one_alone_are_learnt_from_without_end(noise: float) -> None:
    device, rng = Device(0.01, 1e-4, 1e-11), random.Random(3)
    budget = learnt(device, [(256, 0), (8, 0)] * 20)
    for _ in range(3):
        for context in range(100, 8_000):
            kv_bytes = context * 23_040
            budget.learn(1, kv_bytes, device.seconds(1, kv_bytes) * rng.uniform(1 - noise, 1 + noise))
    assert 16 < budget.tokens(0.03, 1, 1_000 * 23_040) < 512


class TimedRunner:
    """A model whose steps take virtual time."""

    def __init__(self, runner: ModelRunner, device: Device) -> None:
        self._runner, self._device = runner, device
        self.num_blocks, self.block_size = runner.num_blocks, runner.block_size
        self.bytes_per_token, self.kv_form = runner.bytes_per_token, runner.kv_form
        self.now = 0.0
        self.steps: list[list[int]] = []

    def clock(self) -> float:
        return self.now

    def forward(self, work: Sequence[SequenceWork]) -> StepOutput:
        output = self._runner.forward(work)
        self.steps.append(sorted(len(item.tokens) for item in work))
        self.now += self._device.seconds(sum(self.steps[-1]), output.kv_bytes_read)
        return output

    def copy_block(self, source: int, target: int) -> None:
        self._runner.copy_block(source, target)


def timed(tiny: LoadedModel, promised: float | None) -> tuple[SteppedEngine, TimedRunner]:
    made: list[TimedRunner] = []

    def wrap(runner: ModelRunner) -> TimedRunner:
        made.append(TimedRunner(runner, Device(0.010, 0.001, 0.0)))
        return made[0]

    engine = SteppedEngine(
        tiny, num_blocks=200, max_num_batched_tokens=128, wrap=wrap, clock=lambda: made[0].now if made else 0.0
    )
    tiers = [
        TierQuota("gold", 1, 1, 100, 100, 200, 100, time_per_output_token_s=promised),
        TierQuota("bronze", 0, 1, 100, 100, 200, 100),
    ]
    engine.engine.set_quotas(Quotas(Revision("p", 1), tuple(tiers), public=0))
    return engine, made[0]


def chunks(engine: SteppedEngine, runner: TimedRunner, tier: str) -> list[int]:
    """Sizes of a long prompt's chunks while somebody of that tier decodes."""
    for warm in range(6):  # until steps of several sizes were seen
        engine.submit([warm] * (5 + 9 * warm), 3, tier="bronze")
        engine.run()
    engine.submit([1, 2, 3], 60, tier=tier)
    engine.step()
    engine.submit([7] * 200, 1, tier="bronze")
    first = len(runner.steps)
    while len(engine.engine.live) > 1:
        engine.step()
    return [step[-1] for step in runner.steps[first:] if len(step) > 1]


def test_chunks_leave_those_who_decode_their_promised_time(tiny: LoadedModel) -> None:
    engine, runner = timed(tiny, promised=0.050)
    found = chunks(engine, runner, "gold")
    assert sum(found) == 200
    assert all(size <= 40 for size in found), "10 ms a step and 1 ms a token leave 39 of them beside one decode"
    assert max(found) >= 35, "and no fewer"


@pytest.mark.parametrize(
    ("promised", "tier"),
    [pytest.param(None, "gold", id="nothing promised"), pytest.param(0.050, "bronze", id="promised to another tier")],
)
def test_chunks_are_whole_where_nobody_was_promised_anything(
    tiny: LoadedModel, promised: float | None, tier: str
) -> None:
    engine, runner = timed(tiny, promised)
    assert chunks(engine, runner, tier)[0] == 127
