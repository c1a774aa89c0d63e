"""Mutated requests: a few hundred here; `python -m cacheaware_sidecar.testing_fuzz --requests 100000` sends more."""

from __future__ import annotations

import random

import pytest

from cacheaware_sidecar.testing_fuzz import campaign, mutated_request


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_whatever_is_sent_is_answered_and_nothing_is_left(seed: int) -> None:
    outcome = await campaign(seed, 400)
    assert outcome.faults == []
    assert outcome.forwarded > 40  # most mutations are refused, and not all
    assert outcome.statuses[400] > 40


def test_a_seed_sends_the_same_bytes() -> None:
    first, second = random.Random(7), random.Random(7)
    assert [mutated_request(first) for _ in range(100)] == [mutated_request(second) for _ in range(100)]
