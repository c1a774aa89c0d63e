"""Which tier serves a request, and by when it wants its first token. Pure.

The tier comes from the body's `service_tier`, else from the key, else from the view; where a gateway has decided it,
from there. A name is never guessed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from cacheaware_api import durations, wire
from cacheaware_sidecar.errors import BadRequest, TierNotAllowed, UnknownTier
from cacheaware_sidecar.identity import Caller

UNDECIDED = frozenset({"auto", "default"})  # OpenAI's own words for "you choose"

_seconds = functools.lru_cache(maxsize=256)(durations.seconds)  # of views: few, and asked for each request

TTFT_HINT = "x-llm-d-slo-ttft-ms"
TPOT_HINT = "x-llm-d-slo-tpot-ms"
LONGEST_HINT_MS = 3_600_000


@dataclasses.dataclass(frozen=True, slots=True)
class Promise:
    """What a tier promised, in seconds; None where it promised nothing."""

    time_to_first_token: float | None = None
    time_per_output_token: float | None = None


class TierBy(StrEnum):
    """What named a request's tier."""

    BODY = "service_tier"
    GATEWAY = "gateway"
    KEY = "key"
    POOL = "defaultTier"


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    tier: wire.ViewTier
    by: TierBy


def promise_of(tier: wire.ViewTier) -> Promise:
    """Raises `durations.DurationError` for text that is no duration; a view is checked with it when it arrives."""
    return Promise(
        None if tier.sla.time_to_first_token is None else _seconds(tier.sla.time_to_first_token),
        None if tier.sla.time_per_output_token is None else _seconds(tier.sla.time_per_output_token),
    )


def choose_tier(requested: Any, caller: Caller, view: wire.View) -> Choice:
    """The tier of one request; raises `BadRequest`, `UnknownTier` or `TierNotAllowed`."""
    tiers = {tier.name: tier for tier in view.tiers}
    if requested is not None and not isinstance(requested, str):
        raise BadRequest("service_tier must be the name of a tier", param="service_tier")
    if caller.decided_tier is not None and caller.decided_tier not in tiers:
        raise UnknownTier(
            f"there is no tier {_quoted(caller.decided_tier)}: {caller.decided_by} must name one of "
            f"{_listed(sorted(tiers))}",
            param=caller.decided_by,
        )
    if requested is None or requested in UNDECIDED:
        given = (
            (caller.decided_tier, TierBy.GATEWAY),
            (caller.default_tier, TierBy.KEY),
            (view.default_tier, TierBy.POOL),
        )
        name, by = next(((name, by) for name, by in given if name in tiers), (None, TierBy.POOL))
        if name is None:
            raise UnknownTier(
                f"this pool has no default tier: set service_tier to one of {_usable(caller, tiers)}",
                param="service_tier",
            )
    else:
        name, by = requested, TierBy.BODY
    tier = tiers.get(name)
    if tier is None:
        raise UnknownTier(
            f"there is no tier {_quoted(name)}: set service_tier to one of {_usable(caller, tiers)}",
            param="service_tier",
        )
    if caller.tiers is not None and tier.name not in caller.tiers:
        raise TierNotAllowed(
            f"you may not use tier {_quoted(tier.name)}: set service_tier to one of {_usable(caller, tiers)}",
            param="service_tier",
        )
    return Choice(tier, by)


def loosened(promise: Promise, headers: Mapping[str, str]) -> Promise:
    """A client may ask for less than its tier promised, never for more; raises `BadRequest` on a wild number."""
    if TTFT_HINT not in headers and TPOT_HINT not in headers:
        return promise
    return Promise(
        _looser(promise.time_to_first_token, headers, TTFT_HINT),
        _looser(promise.time_per_output_token, headers, TPOT_HINT),
    )


def _looser(promised: float | None, headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return promised
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LONGEST_HINT_MS:  # also refuses nan
        raise BadRequest(f"{name} must be milliseconds above 0 and at most {LONGEST_HINT_MS}", param=name)
    return None if promised is None else max(promised, value / 1000)


def _usable(caller: Caller, tiers: Mapping[str, wire.ViewTier]) -> str:
    return _listed(sorted(tiers if caller.tiers is None else caller.tiers & tiers.keys()))


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "(none: you have no tier of this pool)"


def _quoted(name: str) -> str:
    return repr(name if len(name) <= 63 else name[:60] + "…")
