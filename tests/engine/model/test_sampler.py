"""The next token: greedy where asked, otherwise drawn from exactly the distribution that the parameters describe."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheaware_engine.errors import BrokenLogits, InvalidSampling
from cacheaware_engine.sampler import SequenceSampler, distribution, sample
from cacheaware_engine.sampling_params import SamplingParams

VOCABULARY = 50


def noise(rows: int, vocabulary: int = VOCABULARY, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def by_definition(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Probabilities by the words of the parameters: temperature, then min_p, top_k, top_p on what was left."""
    top = max(logits)
    weights = [math.exp((logit - top) / params.temperature) for logit in logits]
    left = {token: weight / sum(weights) for token, weight in enumerate(weights)}
    likeliest = max(left.values())
    left = {token: p for token, p in left.items() if p >= params.min_p * likeliest}
    ranked = sorted(left, key=lambda token: -left[token])
    if params.top_k is not None:
        ranked = ranked[: params.top_k]
    kept: list[int] = []
    total, reached = sum(left[token] for token in ranked), 0.0
    for token in ranked:
        if kept and params.top_p < 1 and reached >= params.top_p * total:
            break
        kept.append(token)
        reached += left[token]
    return [left[token] / reached if token in kept else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(SamplingParams(temperature=0), id="temperature-0"),
        pytest.param(SamplingParams(temperature=1e-9, seed=1), id="a-temperature-that-leaves-no-choice"),
        pytest.param(SamplingParams(top_k=1), id="top-k-1"),
        pytest.param(SamplingParams(top_p=0), id="top-p-0"),
    ],
)
def test_the_likeliest_token_is_taken(params: SamplingParams) -> None:
    logits = noise(20)
    assert sample(logits, [SequenceSampler(params)] * 20) == logits.argmax(-1).tolist()


parameters = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 2),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    top_k=st.one_of(st.none(), st.integers(2, 60)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.9)),
)


@settings(deadline=None)
@given(rows=st.lists(parameters, min_size=1, max_size=5), seed=st.integers(0, 10_000))
def test_each_row_has_the_distribution_its_own_parameters_describe(rows: list[SamplingParams], seed: int) -> None:
    logits = noise(len(rows), seed=seed)
    result = distribution(logits, rows)
    result = result / result.sum(-1, keepdim=True)
    for row, params in enumerate(rows):
        expected = torch.tensor(by_definition(logits[row].tolist(), params))
        torch.testing.assert_close(result[row], expected, atol=1e-4, rtol=0)


def test_draws_follow_the_distribution() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9)
    logits, draws = noise(1), 20_000
    entropy = random.Random(1)
    samplers = [SequenceSampler(params, entropy=entropy) for _ in range(draws)]
    counted = Counter(sample(logits.expand(draws, -1), samplers))
    for token, p in enumerate(by_definition(logits[0].tolist(), params)):
        if p == 0:
            assert counted[token] == 0
        else:
            assert abs(counted[token] - draws * p) < 5 * math.sqrt(draws * p) + 1


def test_among_equals_top_k_keeps_exactly_k() -> None:
    kept = distribution(torch.zeros(1, VOCABULARY), [SamplingParams(top_k=3)])
    assert (kept > 0).sum() == 3


def test_a_flat_distribution_is_followed_beyond_the_first_candidates() -> None:
    peaked = torch.zeros(1, 5000)
    peaked[0, 7] = 100.0
    kept = distribution(torch.cat([torch.zeros(1, 5000), peaked]), [SamplingParams(top_p=0.9)] * 2)
    assert abs(int((kept[0] > 0).sum()) - 4500) <= 1
    assert (kept[1] > 0).sum() == 1


def test_the_same_seed_gives_the_same_text_alone_and_in_any_batch() -> None:
    steps = [noise(4, seed=step) for step in range(30)]
    seeded = SamplingParams(temperature=1.3, top_p=0.95, seed=42)
    alone = SequenceSampler(seeded)
    expected = [sample(step[2:3], [alone])[0] for step in steps]
    others = [SamplingParams(seed=1), SamplingParams(temperature=0), SamplingParams(top_k=5)]
    for position in range(4):
        batch = [SequenceSampler(params) for params in others]
        batch.insert(position, SequenceSampler(seeded))
        order = [0, 1, 3]
        order.insert(position, 2)
        assert [sample(step[order], batch)[position] for step in steps] == expected


def test_the_sequences_of_one_seeded_request_differ_and_repeat() -> None:
    def texts() -> list[list[int]]:
        samplers = [SequenceSampler(SamplingParams(seed=7), sequence=index) for index in range(3)]
        steps = [sample(noise(1, seed=step).expand(3, -1), samplers) for step in range(20)]
        return [list(text) for text in zip(*steps, strict=True)]

    first, again = texts(), texts()
    assert first == again
    assert len({tuple(text) for text in first}) == 3


def test_without_a_seed_two_requests_differ() -> None:
    logits = torch.zeros(2, 1000)
    samplers = [SequenceSampler(SamplingParams()) for _ in range(2)]
    steps = [sample(logits, samplers) for _ in range(8)]
    assert [a for a, _ in steps] != [b for _, b in steps]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_are_never_chosen_and_other_rows_may(temperature: float) -> None:
    logits = torch.full((2, 5), -10.0)
    logits[:, 3] = 10.0
    before = logits.clone()
    samplers = [SequenceSampler(SamplingParams(temperature=temperature, seed=seed)) for seed in range(2)]
    chosen = sample(logits, samplers, banned={0: {3}})
    assert chosen[0] != 3
    assert chosen[1] == 3
    assert torch.equal(logits, before)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_name_their_rows(value: float) -> None:
    logits = noise(4)
    logits[1, 4] = logits[3, 0] = value
    with pytest.raises(BrokenLogits, match=r"rows \[1, 3\].*--dtype float32") as caught:
        sample(logits, [SequenceSampler(SamplingParams())] * 4)
    assert caught.value.rows == (1, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", -0.01),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -1.0),
        ("min_p", 2.0),
        ("top_k", 0),
        ("top_k", -1),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidSampling, match=f"^{field}: must be") as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]  # the table mixes int and float fields
    assert caught.value.field == field


@pytest.mark.parametrize("seed", [0, -(2**63), 2**63 - 1])
def test_any_seed_is_taken(seed: int) -> None:
    assert 0 <= SequenceSampler(SamplingParams(seed=seed)).draw() < 1
