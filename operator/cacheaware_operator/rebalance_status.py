"""A decision as the pool's status tells it. Pure.

Moves stay in the status until others follow. In DryRun they say so themselves, because nothing else in the object shows
that they were not made.
"""

from __future__ import annotations

from datetime import datetime

from cacheaware_api.status import LastRebalance, QuotaMove
from cacheaware_operator.rebalance_values import Decision, Skip
from cacheaware_operator.status_figures import rounded

_LONGEST_REASON = 256


def last_rebalance(decision: Decision, previous: LastRebalance | None, now: datetime) -> LastRebalance | None:
    """What `status.lastRebalance` says after this decision. The same proposal made again is no news."""
    if not decision.moves:
        return previous
    only_told = "not made, mode is DryRun: " if decision.skipped is Skip.DRY_RUN else ""
    moves = tuple(
        QuotaMove(
            from_=move.from_,
            to=move.to,
            percent=move.percent,
            reason=f"{move.reason}: {only_told}{move.why}"[:_LONGEST_REASON],
            gain_percent=rounded(move.gain_percent),
        )
        for move in decision.moves
    )
    if only_told and previous is not None and _pairs(previous.moves) == _pairs(moves):
        return previous
    return LastRebalance(time=now.strftime("%Y-%m-%dT%H:%M:%SZ"), moves=moves)


def _pairs(moves: tuple[QuotaMove, ...]) -> list[tuple[str, str, int, bool]]:
    """Gains tremble from look to look; where quota would go does not."""
    return [(move.from_, move.to, move.percent, "mode is DryRun" in move.reason) for move in moves]
