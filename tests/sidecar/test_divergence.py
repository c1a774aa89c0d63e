"""Prompts that differ at their start and share the rest: told with what it costs, and to nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from cacheaware_sidecar.divergence import FEWEST_SIGHTINGS, PER_SECOND, Divergence

RULES = "\n".join(f"Rule {number}: answer in {number} short sentences and never guess." for number in range(40))


def chat(*contents: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents]}


def told(divergence: Divergence, bodies: list[dict[str, Any]], *, cached: int = 0, salt: str = "s") -> list[int]:
    return [
        divergence.note("gold", salt, body, prompt_tokens=1000, cached_tokens=cached, now=float(number))
        for number, body in enumerate(bodies)
    ]


def test_a_date_in_the_first_line_is_told_with_its_price() -> None:
    divergence = Divergence()
    saved = told(divergence, [chat(f"Today is {day}. It is day {day}.\n{RULES}", "hello") for day in range(100)])
    assert saved[0] == 0
    assert all(900 <= tokens <= 1000 for tokens in saved[1:])
    (advice,) = divergence.advice()
    assert (advice.tier, advice.requests) == ("gold", 99)
    assert advice.diverges_at_token == 0
    assert 900 <= advice.would_save_tokens <= 1000


def test_where_they_differ_is_told() -> None:
    divergence = Divergence()
    told(divergence, [chat(RULES[: len(RULES) // 4] + f"\nsession {n}\n" + RULES[len(RULES) // 4 :]) for n in range(9)])
    (advice,) = divergence.advice()
    assert advice.diverges_at_token == pytest.approx(250, abs=30)
    assert advice.would_save_tokens == pytest.approx(740, abs=40)


@pytest.mark.parametrize(
    ("bodies", "cached"),
    [
        pytest.param([chat(RULES, str(n)) for n in range(9)], 900, id="the common start is cached"),
        pytest.param([chat(RULES, f"{n} " * 20) for n in range(9)], 0, id="the common start was evicted"),
        pytest.param([chat(f"{n} {RULES}".replace("Rule", f"Rule-{n}")) for n in range(9)], 0, id="nothing is shared"),
        pytest.param([chat(RULES)] * 9, 0, id="equal prompts"),
        pytest.param([{"messages": 7}, {"prompt": [1, 2]}, {"messages": [None]}] * 3, 0, id="unknown shapes"),
    ],
)
def test_nothing_is_told(bodies: list[dict[str, Any]], cached: int) -> None:
    divergence = Divergence()
    assert told(divergence, bodies, cached=cached) == [0] * 9
    assert divergence.advice() == ()


def test_one_or_two_are_no_pattern() -> None:
    divergence = Divergence()
    told(divergence, [chat(f"{n}\n{RULES}") for n in range(FEWEST_SIGHTINGS)])
    assert divergence.advice() == ()


def test_texts_of_two_scopes_are_not_compared() -> None:
    divergence = Divergence()
    for number in range(9):
        assert told(divergence, [chat(f"{number}\n{RULES}")], salt=f"tenant-{number}") == [0]


def test_it_looks_at_few_prompts_a_second() -> None:
    divergence = Divergence()
    bodies = [chat(f"{n}\n{RULES}") for n in range(200)]
    notes = [divergence.note("gold", "s", body, prompt_tokens=1000, cached_tokens=0, now=5.0) for body in bodies]
    assert sum(saved > 0 for saved in notes) <= PER_SECOND


def test_a_tier_that_is_gone_is_forgotten() -> None:
    divergence = Divergence()
    told(divergence, [chat(f"{n}\n{RULES}") for n in range(9)])
    divergence.keep(["bronze"])
    assert divergence.advice() == ()
