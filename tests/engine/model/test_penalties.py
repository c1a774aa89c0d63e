"""Penalties and biases change what is said as their definitions have it; log-probabilities are those of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cacheaware_engine.errors import InvalidSampling
from cacheaware_engine.logprobs import logprobs
from cacheaware_engine.sampler import SamplingParams, SequenceSampler, sample

LOGITS = torch.tensor([[3.0, 2.0, 1.0, -1.0, 0.5]])


def said(params: dict[str, Any], prompt: tuple[int, ...], steps: int) -> list[int]:
    """Greedy tokens from the same logits again and again."""
    sampler = SequenceSampler(SamplingParams(temperature=0.0, **params), prompt=prompt)
    return [sample(LOGITS, [sampler])[0] for _ in range(steps)]


@pytest.mark.parametrize(
    ("params", "prompt", "expected"),
    [
        pytest.param({}, (), [0, 0, 0, 0], id="without-penalties-the-likeliest-wins"),
        pytest.param({"presence_penalty": 1.5}, (), [0, 1, 0, 0], id="presence-counts-once"),
        pytest.param({"frequency_penalty": 0.7}, (), [0, 0, 1, 0], id="frequency-counts-every-time"),
        pytest.param({"presence_penalty": 2.0}, (0,), [0, 1, 0, 0], id="presence-does-not-count-the-prompt"),
        pytest.param({"repetition_penalty": 2.0}, (0,), [1, 0, 0, 0], id="repetition-counts-the-prompt"),
        pytest.param({"logit_bias": {3: 100.0}}, (), [3, 3, 3, 3], id="a-bias-forces-a-token"),
        pytest.param({"logit_bias": {0: -100.0}}, (), [1, 1, 1, 1], id="a-bias-forbids-a-token"),
    ],
)
def test_what_is_said_under_a_penalty(params: dict[str, Any], prompt: tuple[int, ...], expected: list[int]) -> None:
    assert said(params, prompt, len(expected)) == expected


def test_a_repetition_penalty_makes_negative_logits_more_negative() -> None:
    sampler = SequenceSampler(SamplingParams(repetition_penalty=2.0), prompt=(0, 3))
    row = LOGITS[0].clone()
    assert sampler.penalties is not None
    sampler.penalties.apply_(row)
    assert row.tolist() == [1.5, 2.0, 1.0, -2.0, 0.5]


def test_penalties_of_one_row_leave_the_others_and_the_logits_as_they_are() -> None:
    logits = LOGITS.repeat(2, 1)
    samplers = [SequenceSampler(SamplingParams(temperature=0.0, logit_bias=bias)) for bias in ({4: 50.0}, {})]
    assert sample(logits, samplers) == [4, 0]
    assert torch.equal(logits, LOGITS.repeat(2, 1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("logprobs", 21),
        ("logit_bias", {1: 101.0}),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidSampling, match=f"^{name}: must be"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_log_probabilities_are_those_of_the_softmax() -> None:
    first, second = logprobs(LOGITS.repeat(2, 1), [1, 3], [2, 0])
    expected = LOGITS[0].log_softmax(-1).tolist()
    assert first.logprob == pytest.approx(expected[1])
    assert [token for token, _ in first.likeliest] == [0, 1]
    assert [value for _, value in first.likeliest] == pytest.approx(expected[:2])
    assert (second.token, second.likeliest) == (3, ())
    assert second.logprob == pytest.approx(expected[3])


def test_more_likely_tokens_than_there_are_is_all_of_them() -> None:
    (only,) = logprobs(LOGITS, [0], [20])
    assert len(only.likeliest) == 5
