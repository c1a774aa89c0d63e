"""Why a promise was not kept in a replay, and which field of the pool decides it. Pure.

Where most of a late request's time went is its cause: the queue in front of its share, a hold for company, the engine's
blocks, or the computing of its prompt, which is a matter of cache again where an endless one would have had it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cacheaware.replay.measures import Served
from cacheaware_api import wire
from cacheaware_engine.blocks import WaitReason
from cacheaware_sidecar.tiers import Promise

Field = tuple[str, ...]  # of a tier, as its file spells it


class Cause(StrEnum):
    """In words, as a user reads them."""

    LIMIT_REFUSES = "it can never fit what its tier may use, and was refused"
    LENDING_REFUSES = "it can never fit what the others lend, and was refused"
    SHARE = "it waited for its tier's share of the engine"
    WINDOW = "it was held for company"
    LIMIT = "its tier held all blocks that it may"
    LENDING = "the other tiers lent no more blocks"
    ROOM = "its tier held all blocks that are surely its own, and found no others"
    ENGINE = "it waited in the engine for the prompts ahead of it"
    EVICTED = "the beginning of its prompt was no longer cached"
    PROMPT = "its own prompt takes so long to compute"
    PACE = "its tokens came too slowly: the engine's steps were full"


@dataclass(frozen=True, slots=True)
class Reason:
    """`field` None: nothing in the pool's file decides it. `tier` is the one whose field it is."""

    cause: Cause
    tier: str
    field: Field | None


@dataclass(frozen=True, slots=True)
class Missed:
    """Requests of a tier whose promise was not kept for one reason, and the seconds that this took of each, at most."""

    tier: str
    reason: Reason
    requests: int
    seconds: float


_FIELDS: Mapping[Cause, Field | None] = {
    Cause.LIMIT_REFUSES: ("quota", "borrowingLimitPercent"),
    Cause.LENDING_REFUSES: ("quota", "lendingLimitPercent"),
    Cause.SHARE: ("weight",),
    Cause.WINDOW: ("batchingWindow",),
    Cause.LIMIT: ("quota", "borrowingLimitPercent"),
    Cause.LENDING: ("quota", "lendingLimitPercent"),
    Cause.ROOM: ("quota", "nominalPercent"),
    Cause.ENGINE: None,
    Cause.EVICTED: ("quota", "nominalPercent"),
    Cause.PROMPT: ("sla", "timeToFirstToken"),
    Cause.PACE: ("sla", "timePerOutputToken"),
}
_OTHERS_FIELDS = (Cause.LENDING, Cause.LENDING_REFUSES)
_BLOCKS = {
    WaitReason.LIMIT: Cause.LIMIT,
    WaitReason.LENDING: Cause.LENDING,
    WaitReason.ROOM: Cause.ROOM,
    WaitReason.OLDER: Cause.ROOM,
    WaitReason.SLOTS: Cause.ROOM,
}


def missed(
    served: Sequence[Served], promises: Mapping[str, Promise], quotas: wire.Quotas, block_size: int, capacity: int
) -> Sequence[Missed]:
    """All promises that were not kept, by tier and cause, the most frequent first. `served` in the order of arrival."""
    found: dict[tuple[str, Reason], list[float]] = {}
    seen: set[bytes] = set()
    for each in served:
        request = each.request
        had = _leading(request.hittable(block_size), seen) * block_size
        seen.update(request.keys)
        if each.meets(promises[request.tier]):
            continue
        cause, seconds = _why(each, promises[request.tier], had, quotas, capacity)
        reason = Reason(cause, _whose(cause, request.tier, quotas), _FIELDS[cause])
        found.setdefault((request.tier, reason), []).append(seconds)
    order = list(promises)
    return sorted(
        (Missed(tier, reason, len(all_), max(all_)) for (tier, reason), all_ in found.items()),
        key=lambda each: (order.index(each.tier), -each.requests, each.reason.cause),
    )


def _why(served: Served, promise: Promise, endless: int, quotas: wire.Quotas, capacity: int) -> tuple[Cause, float]:
    """`endless`: tokens of its prompt that an endless cache would have had."""
    first = served.time_to_first_token
    if served.refused or first is None:
        tier = next(tier for tier in quotas.tiers if tier.name == served.request.tier)
        lent = capacity - quotas.public - sum(o.nominal - o.lending for o in quotas.tiers if o is not tier)
        return (Cause.LIMIT_REFUSES if tier.limit is not None and tier.limit <= lent else Cause.LENDING_REFUSES), 0.0
    if promise.time_to_first_token is None or first <= promise.time_to_first_token:
        return Cause.PACE, served.time_per_output_token or 0.0
    request = served.request
    admitted = served.sent_at if served.admitted_at is None else served.admitted_at
    computing = (served.first_token_at or 0.0) - admitted
    was_evicted = endless - served.cached_tokens > (request.prompt_tokens - served.cached_tokens) / 2
    inside = _BLOCKS[served.waited_for] if served.waited_for is not None else Cause.ENGINE
    parts = [
        (served.sent_at - request.at - served.held, Cause.SHARE),
        (served.held, Cause.WINDOW),
        (admitted - served.sent_at, inside),
        (computing, Cause.EVICTED if was_evicted else Cause.PROMPT),
    ]
    seconds, cause = max(parts, key=lambda part: part[0])
    return cause, seconds


def _whose(cause: Cause, tier: str, quotas: wire.Quotas) -> str:
    """Whose field: its own tier's, or that of the tier which keeps most from the others."""
    others = [each for each in quotas.tiers if each.name != tier]
    if cause not in _OTHERS_FIELDS or not others:
        return tier
    return max(others, key=lambda each: each.nominal - each.lending).name


def _leading(keys: Sequence[bytes], seen: set[bytes]) -> int:
    for number, key in enumerate(keys):
        if key not in seen:
            return number
    return len(keys)
