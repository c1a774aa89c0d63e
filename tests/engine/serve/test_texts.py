"""Greedy output is what transformers' `generate` writes, whatever else the engine does meanwhile."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheaware_api.wire import Quotas, Revision, TierQuota
from cacheaware_engine.engine_testing import Output, SteppedEngine
from cacheaware_engine.errors import BadRequest
from cacheaware_engine.loader import LoadedModel
from cacheaware_engine.requests import Finish, RequestId
from cacheaware_engine.sampling_params import SamplingParams
from cacheaware_engine.testing import reference_greedy

TIE = 1e-3  # a difference counts only where the two best logits are further apart


def expect_greedy(reference: Any, prompt: list[int], tokens: list[int], max_tokens: int) -> None:
    assert len(tokens) == max_tokens
    (expected,) = reference_greedy(reference, [prompt], max_tokens)
    for position, (ours, theirs, margin) in enumerate(zip(tokens, expected.tokens, expected.margins, strict=True)):
        if ours != theirs:
            assert margin <= TIE, f"token {position} is {ours}, not {theirs}, by a margin of {margin}"
            return


def some_prompt(length: int, seed: int = 0) -> list[int]:
    rng = Random(f"{length}/{seed}")
    return [rng.randrange(256) for _ in range(length)]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 61])
def test_a_prompt_alone(tiny: LoadedModel, reference: Any, length: int) -> None:
    engine = SteppedEngine(tiny, num_blocks=40)
    output = engine.submit(some_prompt(length), 20)
    engine.run()
    expect_greedy(reference, some_prompt(length), output.tokens(), 20)
    assert output.finish() is Finish.LENGTH
    engine.assert_empty()


@pytest.mark.parametrize("chunk", [8, 9, 13, 64])
def test_chunk_boundaries_at_odd_places(tiny: LoadedModel, reference: Any, chunk: int) -> None:
    engine = SteppedEngine(tiny, num_blocks=80, max_num_batched_tokens=chunk)
    prompts = [some_prompt(length) for length in (50, 7, 31)]
    outputs = [engine.submit(prompt, 12) for prompt in prompts]
    engine.run()
    for prompt, output in zip(prompts, outputs, strict=True):
        expect_greedy(reference, prompt, output.tokens(), 12)
    engine.assert_empty()


def test_a_prefix_hit_skips_what_is_cached_and_changes_nothing(tiny: LoadedModel, reference: Any) -> None:
    engine = SteppedEngine(tiny, num_blocks=60, block_size=4)
    prefix = some_prompt(24)
    first = engine.submit([*prefix, 1, 2], 10)
    engine.run()
    computed = engine.engine.totals.tokens
    second = engine.submit([*prefix, 3, 4], 10)
    engine.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 24)
    assert engine.engine.totals.tokens - computed == 2 + 9  # what is not cached, and all outputs but the last
    expect_greedy(reference, [*prefix, 3, 4], second.tokens(), 10)


def test_a_prompt_that_is_cached_whole_computes_its_last_block_again(tiny: LoadedModel, reference: Any) -> None:
    engine = SteppedEngine(tiny, num_blocks=60, block_size=4)
    prompt = some_prompt(16)
    engine.submit(prompt, 3)
    engine.run()
    output = engine.submit(prompt, 3)
    engine.run()
    assert output.cached_tokens == 12
    expect_greedy(reference, prompt, output.tokens(), 3)
    engine.assert_empty()


def test_other_salts_never_hit(tiny: LoadedModel) -> None:
    engine = SteppedEngine(tiny, num_blocks=60)
    outputs = []
    for salt in (b"a", b"b", b"a"):
        outputs.append(engine.submit(some_prompt(20), 2, salt=salt))
        engine.run()
    assert [output.cached_tokens for output in outputs] == [0, 0, 16]


def test_preempted_requests_go_on_where_they_were(tiny: LoadedModel, reference: Any) -> None:
    engine = SteppedEngine(tiny, num_blocks=24, block_size=4)  # three texts of 15 blocks each cannot run together
    prompts = [some_prompt(20, seed) for seed in range(3)]
    outputs = [engine.submit(prompt, 40) for prompt in prompts]
    engine.run()
    assert engine.preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        expect_greedy(reference, prompt, output.tokens(), 40)
    engine.assert_empty()


def test_a_seed_gives_the_same_text_alone_in_a_batch_and_after_preemption(tiny: LoadedModel) -> None:
    sampling = SamplingParams(temperature=1.0, seed=7)
    alone = SteppedEngine(tiny, num_blocks=60)
    expected = alone.submit(some_prompt(20), 40, sampling=sampling)
    alone.run()
    crowded = SteppedEngine(tiny, num_blocks=24)
    crowded.submit(some_prompt(20, 1), 40)
    output = crowded.submit(some_prompt(20), 40, sampling=sampling)
    crowded.run()
    assert output.tokens() == expected.tokens()


@pytest.mark.parametrize("length", [12, 13, 15, 3])
def test_n_sequences_compute_their_prompt_once(tiny: LoadedModel, reference: Any, length: int) -> None:
    engine = SteppedEngine(tiny, num_blocks=60, block_size=4)
    prompt = some_prompt(length)
    output = engine.submit(prompt, 10, n=3)
    engine.run()
    assert engine.engine.totals.tokens == length + 3 * 9
    for index in range(3):
        expect_greedy(reference, prompt, output.tokens(index), 10)
    engine.assert_empty()


def test_n_sequences_with_a_seed_differ_and_repeat(tiny: LoadedModel) -> None:
    texts = []
    for _ in range(2):
        engine = SteppedEngine(tiny, num_blocks=60)
        output = engine.submit(some_prompt(9), 12, n=3, sampling=SamplingParams(temperature=1.5, seed=3))
        engine.run()
        texts.append([tuple(output.tokens(index)) for index in range(3)])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


@pytest.mark.parametrize("length", [15, 16, 18])
def test_n_sequences_survive_preemption(tiny: LoadedModel, reference: Any, length: int) -> None:
    sampling = SamplingParams(temperature=1.0, seed=5)  # greedy sequences would be equal and share their blocks
    alone = SteppedEngine(tiny, num_blocks=64, block_size=4)
    expected = alone.submit(some_prompt(length), 30, n=3, sampling=sampling)
    alone.run()
    engine = SteppedEngine(tiny, num_blocks=34, block_size=4)
    first = engine.submit(some_prompt(30, 1), 40)
    output = engine.submit(some_prompt(length), 30, n=3, sampling=sampling)
    engine.run()
    assert engine.preemptions > 0
    expect_greedy(reference, some_prompt(30, 1), first.tokens(), 40)
    for index in range(3):
        assert output.tokens(index) == expected.tokens(index)
    engine.assert_empty()


# -- arrivals of any kind ---------------------------------------------------------------------------------------------

ALONE: dict[tuple[tuple[int, ...], int], list[int]] = {}  # texts of prompts run alone, by prompt and length


def alone(model: LoadedModel, prompt: list[int], max_tokens: int) -> list[int]:
    key = (tuple(prompt), max_tokens)
    if key not in ALONE:
        engine = SteppedEngine(model, num_blocks=64, block_size=4)
        output = engine.submit(prompt, max_tokens)
        engine.run()
        ALONE[key] = output.tokens()
    return ALONE[key]


def whole(prompt: list[int], max_tokens: int) -> int:
    """Blocks that one sequence needs at its end."""
    return -(-(len(prompt) + max_tokens) // 4)


def half_for_gold(num_blocks: int, percent: int) -> Quotas:
    """Gold has its share guaranteed and lends half of it; bronze has nothing and may borrow."""
    nominal = num_blocks * percent // 100
    gold = TierQuota("gold", 10, 1, nominal, nominal, limit=num_blocks, lending=nominal // 2)
    bronze = TierQuota("bronze", 0, 1, 0, 0, limit=num_blocks, lending=0)
    return Quotas(Revision("pool", 1), (gold, bronze), public=0)


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 12),  # steps before it arrives
        st.integers(0, 3),  # which prefix it starts with
        st.integers(0, 5),  # blocks of it
        st.integers(1, 9),  # tokens of its own
        st.integers(1, 24),  # max_tokens
        st.integers(1, 3),  # n
        st.sampled_from(["gold", "bronze"]),
    ),
    min_size=1,
    max_size=8,
)


@given(
    arrivals=ARRIVALS,
    num_blocks=st.integers(14, 40),
    budget=st.integers(6, 40),
    abort=st.integers(0, 30),
    gold_percent=st.none() | st.sampled_from([30, 60, 90]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_arrival_pattern_gives_the_texts_of_running_alone(
    tiny: LoadedModel,
    reference: Any,
    arrivals: list[tuple[int, int, int, int, int, int, str]],
    num_blocks: int,
    budget: int,
    abort: int,
    gold_percent: int | None,
) -> None:
    engine = SteppedEngine(tiny, num_blocks=num_blocks, block_size=4, max_num_seqs=6, max_num_batched_tokens=budget)
    if gold_percent is not None:
        engine.engine.set_quotas(half_for_gold(num_blocks, gold_percent))
    requests: list[tuple[list[int], int, int, Output]] = []
    steps = 0
    for number, (pause, prefix, blocks, own, max_tokens, n, tier) in enumerate(arrivals):
        for _ in range(pause):
            engine.step()
            steps += 1
            if steps == abort:
                engine.engine.abort(engine.engine.live[0] if engine.engine.live else RequestId("none"))
            engine.engine.check_integrity()
        prompt = some_prompt(20, prefix)[: 4 * blocks] + some_prompt(own, 100 + number)
        try:
            requests.append((prompt, max_tokens, n, engine.submit(prompt, max_tokens, n=n, tier=tier)))
        except BadRequest as refused:
            if refused.code != "never_fits":
                raise
    engine.run()
    engine.assert_empty()
    for prompt, max_tokens, n, output in requests:
        assert output.closed == 1
        for index in range(n):
            tokens = output.tokens(index)
            if output.finish(index) is None:
                assert abort, "only an aborted request ends without a finish"
            elif len(tokens) < max_tokens:
                assert whole(prompt, max_tokens) * n > num_blocks // 2, "it ended before its time, and was not large"
            if tokens and tokens != alone(tiny, prompt, max_tokens)[: len(tokens)]:
                expect_greedy(reference, prompt, tokens, len(tokens))  # a tie may fall either way
