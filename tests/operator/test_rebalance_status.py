"""Moves in the pool's status: who gave, who got, how much, why, and what it should bring."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from cacheaware_operator.rebalance_status import last_rebalance
from cacheaware_operator.rebalance_values import Decision, Move, MoveReason, Skip, State

NOON = datetime(2030, 1, 1, 12, 0, 0, tzinfo=UTC)
LATER = datetime(2030, 1, 1, 12, 30, 0, tzinfo=UTC)


def decision(percent: int = 10, gain: float | None = 2.6, why: str = "why", skip: Skip | None = None) -> Decision:
    moves = (Move("bronze", "gold", percent, MoveReason.MORE_HITS, why, gain),)
    return Decision(State(), {}, moves, skip)


def test_a_move_is_told_with_its_reason_and_predicted_gain() -> None:
    told = last_rebalance(decision(), None, NOON)
    assert told is not None
    assert told.model_dump(by_alias=True)["moves"] == (
        {"from": "bronze", "to": "gold", "percent": 10, "reason": "MoreHits: why", "gainPercent": 3},
    )
    assert told.time == "2030-01-01T12:00:00Z"


def test_moves_stay_until_others_follow() -> None:
    told = last_rebalance(decision(), None, NOON)
    assert last_rebalance(Decision(State(), {}, skipped=Skip.GAIN_TOO_SMALL), told, LATER) is told
    again = last_rebalance(decision(), told, LATER)
    assert again is not None
    assert again.time == "2030-01-01T12:30:00Z"


def test_a_dry_run_says_that_nothing_was_moved() -> None:
    told = last_rebalance(decision(skip=Skip.DRY_RUN), None, NOON)
    assert told is not None
    assert told.moves[0].reason == "MoreHits: not made, mode is DryRun: why"


@pytest.mark.parametrize(
    ("after", "news"),
    [
        pytest.param(decision(gain=2.9, why="2.9 %", skip=Skip.DRY_RUN), False, id="another gain is no news"),
        pytest.param(decision(percent=8, skip=Skip.DRY_RUN), True, id="another percentage is"),
        pytest.param(decision(), True, id="and so is the move itself"),
    ],
)
def test_the_same_proposal_made_again_is_written_once(after: Decision, news: bool) -> None:
    told = last_rebalance(decision(skip=Skip.DRY_RUN), None, NOON)
    assert (last_rebalance(after, told, LATER) is not told) == news


def test_a_move_back_to_nominal_predicts_no_gain() -> None:
    told = last_rebalance(decision(gain=None), None, NOON)
    assert told is not None
    assert told.moves[0].gain_percent is None


def test_two_long_names_fit() -> None:
    told = last_rebalance(decision(why="x" * 300), None, NOON)
    assert told is not None
    assert len(told.moves[0].reason) == 256
