"""What the rebalancer needs from a sidecar's metrics page, and nothing else of it. Pure.

A page has thousands of lines and a round may read a thousand pages, so only the two metrics in question are parsed. A
page that cannot be understood is refused as a whole: figures that are half right would move quota.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import dataclass

from cacheaware_operator.reuse_curves import ReuseCounts

REUSE = "cacheaware_block_reuse_references"
PACE = "cacheaware_prefill_seconds_per_block"

_SAMPLE = re.compile(rf"^({REUSE}_bucket|{PACE})\{{([^\n]*)\}}[ \t]+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


class PageUnreadable(ValueError):
    """A metrics page that this release cannot read; the message names metric and tier."""


@dataclass(frozen=True, slots=True)
class TierPage:
    """None: the page does not show it (yet)."""

    reuse: ReuseCounts | None = None
    prefill_seconds_per_block: float | None = None


def read_page(text: str) -> dict[str, TierPage]:
    """By tier; raises `PageUnreadable`."""
    buckets: dict[str, list[tuple[str, float]]] = {}
    pace: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        tier, bound = _tier_and_bound(labels)
        if name == PACE:
            pace[tier] = _number(PACE, tier, value)
        else:
            buckets.setdefault(tier, []).append((bound, _number(REUSE, tier, value)))
    return {
        tier: TierPage(_counts(tier, buckets[tier]) if tier in buckets else None, pace.get(tier))
        for tier in sorted(buckets.keys() | pace.keys())
    }


@functools.lru_cache(maxsize=4096)  # the same on every page: buckets times tiers
def _tier_and_bound(labels: str) -> tuple[str, str]:
    found = dict(_LABEL.findall(labels))
    return found.get("tier", ""), found.get("le", "")


def _counts(tier: str, buckets: list[tuple[str, float]]) -> ReuseCounts:
    try:
        bounds = _bounds(tuple(bound for bound, _ in buckets))
        return ReuseCounts(bounds, _rising(tuple(count for _, count in buckets)))
    except ValueError as error:
        raise PageUnreadable(f"{REUSE} of tier {tier!r}: {error}") from None


@functools.lru_cache(maxsize=16)  # all pages of a release have the same: read, and kept in memory, once
def _bounds(labels: tuple[str, ...]) -> tuple[float, ...]:
    bounds = tuple(float(label) for label in labels)
    if not bounds or bounds[-1] != math.inf:
        raise ValueError('the last bucket must be le="+Inf"')
    if bounds[0] <= 0 or any(not a < b for a, b in itertools.pairwise(bounds)):
        raise ValueError("le must rise from bucket to bucket")
    return bounds[:-1]


def _rising(counts: tuple[float, ...]) -> tuple[float, ...]:
    if any(b < a for a, b in itertools.pairwise(counts)):
        raise ValueError("counts must not fall from bucket to bucket")
    return counts


def _number(metric: str, tier: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:  # also refuses nan
        raise PageUnreadable(f"{metric} of tier {tier!r}: {text[:40]!r} is no count")
    return value
