"""Working sets of groups: what their conversations have, what each request adds, and what is forgotten."""

from __future__ import annotations

import pytest

from cacheaware_sidecar.scheduling import Used, Waiting
from cacheaware_sidecar.scheduling.active_groups import ACTIVE_SECONDS, MOST_GROUPS, ActiveGroups


def request(number: int, conversation: str | None = None, tier: str = "gold") -> Waiting:
    return Waiting(f"r{number}", tier, "acme", 0.0, conversation=conversation)


def turn(groups: ActiveGroups, one: Waiting, used: Used, now: float, group: str = "docs") -> None:
    groups.sent(group, 256, one, now)
    groups.ended(group, one, used, now)


def test_the_prefix_counts_once_and_a_conversation_with_its_last_turn() -> None:
    groups = ActiveGroups()
    turn(groups, request(1, "chat"), Used(400, 20, 256), 0.0)
    turn(groups, request(2, "chat"), Used(500, 30, 416), 5.0)
    turn(groups, request(3), Used(356, 10, 256), 6.0)
    (found,) = groups.top(10, 7.0)
    assert (found.id, found.tier, found.prefix_tokens) == ("docs", "gold", 256)
    assert found.conversations == 2
    assert found.context_tokens == 256 + (530 - 256) + (366 - 256)


def test_growth_is_what_the_engine_had_not_cached_and_the_answer() -> None:
    groups = ActiveGroups()
    for number in range(40):
        turn(groups, request(number), Used(400, 20, 320), float(number))
    (found,) = groups.top(1, 40.0)
    assert found.growth_tokens == 100, "equal requests have no deviation"
    for number in range(40, 200):
        turn(groups, request(number), Used(400, 20, 220 if number % 2 else 420), float(number))
    (found,) = groups.top(1, 200.0)
    assert found.growth_tokens == pytest.approx(100 + 100, rel=0.15), "a mean of 100 and a deviation of 100"


def test_growth_ahead_follows_the_rate() -> None:
    groups = ActiveGroups()
    for number in range(600):
        turn(groups, request(number), Used(400, 20, 320), number / 2)
    (found,) = groups.top(1, 300.0)
    assert found.requests_a_second == pytest.approx(2.0, rel=0.1)
    assert found.growth_within(10.0) == pytest.approx(10 * 2 * 100, rel=0.1)


def test_an_engine_that_does_not_count_hits_teaches_no_growth() -> None:
    groups = ActiveGroups()
    turn(groups, request(1), Used(400, 20, None), 0.0)
    (found,) = groups.top(1, 1.0)
    assert (found.growth_tokens, found.context_tokens) == (0, 420)


def test_the_largest_come_first_and_what_is_silent_for_a_minute_is_at_work_no_more() -> None:
    groups = ActiveGroups()
    turn(groups, request(1), Used(300, 0, 0), 0.0, "small")
    turn(groups, request(2), Used(900, 0, 0), 10.0, "large")
    assert [group.id for group in groups.top(2, 20.0)] == ["large", "small"]
    assert [group.id for group in groups.top(1, 20.0)] == ["large"]
    assert [group.id for group in groups.top(2, ACTIVE_SECONDS + 5)] == ["large"]
    assert groups.top(2, ACTIVE_SECONDS + 20) == []


def test_memory_is_bounded_whatever_comes() -> None:
    groups = ActiveGroups()
    for number in range(4 * MOST_GROUPS):
        turn(groups, request(number), Used(300, 0, 0), 0.0, f"group {number}")
    for number in range(2000):
        turn(groups, request(number), Used(300, 0, 0), 0.0, "one group")
    found = groups.top(10 * MOST_GROUPS, 0.0)
    assert len(found) == MOST_GROUPS
    assert found[0].conversations < 1000


def test_an_end_that_comes_after_the_engine_was_started_anew_is_no_error() -> None:
    groups = ActiveGroups()
    groups.sent("docs", 256, request(1), 0.0)
    groups.clear()
    groups.ended("docs", request(1), Used(300, 0, 0), 1.0)
    assert groups.top(1, 1.0) == []
