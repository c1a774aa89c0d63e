"""Figures of a pool's status: sums, means and rounding over its replicas. Pure.

Hit and attainment percentages of several replicas are means weighted by their requests; of a percentile the worst
replica's counts, since percentiles cannot be added up. Everything is rounded, so that a figure that trembles is no
change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cacheaware_api import wire
from cacheaware_api.durations import duration
from cacheaware_api.status import Capacity, TierStatus


def weighted_mean(
    figures: Iterable[wire.TierFigures], value: Callable[[wire.TierFigures], float | None]
) -> float | None:
    """The mean of a percentage over figures that have it, each counting as often as it had requests."""
    weighted = [(figure.requests, percent) for figure in figures if (percent := value(figure)) is not None]
    requests = sum(weight for weight, _ in weighted)
    if requests == 0:
        return None
    return sum(weight * percent for weight, percent in weighted) / requests


def replica_capacity(answers: list[wire.PoolStatus]) -> Capacity | None:
    ledgers = [answer.ledger for answer in answers if answer.ledger is not None]
    if not ledgers:
        return None
    return Capacity(
        min_blocks=min(ledger.capacity for ledger in ledgers),
        max_blocks=max(ledger.capacity for ledger in ledgers),
        block_size=ledgers[0].block_size,  # an engine flag: one value for the pool
        bytes_per_token=ledgers[0].bytes_per_token,
    )


def tier_status(name: str, nominal: int, effective: int, answers: list[wire.PoolStatus]) -> TierStatus:
    accounts = [
        answer.ledger.tiers[name] for answer in answers if answer.ledger is not None and name in answer.ledger.tiers
    ]
    estimated = any(answer.enforcement is wire.Enforcement.ESTIMATE_ONLY for answer in answers)
    figures = [answer.tiers[name] for answer in answers if name in answer.tiers]
    slowest = max((each for figure in figures if (each := figure.time_to_first_token_p95) is not None), default=None)
    known = bool(accounts)
    return TierStatus(
        name=name,
        nominal_percent=nominal,
        effective_percent=effective,
        held_blocks=sum(account.held for account in accounts) if known else None,
        # an estimate sees held blocks only
        cached_blocks=sum(account.cached for account in accounts) if known and not estimated else None,
        borrowed_blocks=sum(account.borrowed for account in accounts) if known else None,
        lent_blocks=sum(account.lent for account in accounts) if known else None,
        hit_percent=rounded(weighted_mean(figures, lambda figure: figure.hit_percent)),
        time_to_first_token_p95=None if slowest is None else duration(two_digits(slowest)),
        attainment_percent=floored(weighted_mean(figures, lambda figure: figure.attainment_percent)),
    )


def rounded(percent: float | None) -> int | None:
    return None if percent is None else min(100, max(0, round(percent)))


def floored(percent: float | None) -> int | None:
    """Rounded down: 94.6 % of a promised 95 must not read as kept."""
    return None if percent is None else min(100, max(0, int(percent)))


def two_digits(seconds: float) -> float:
    """Two significant digits: more would change with every look and tell nothing."""
    return float(f"{max(0.0, seconds):.2g}")
