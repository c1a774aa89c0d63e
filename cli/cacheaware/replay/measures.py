"""What a replay measures: one record for each request, and sums of them by tier. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cacheaware.replay.requests import Request
from cacheaware_engine.blocks import WaitReason
from cacheaware_sidecar.figures import percentile
from cacheaware_sidecar.tiers import Promise


@dataclass(slots=True)
class Served:
    """One request's story; times are virtual seconds."""

    request: Request
    sent_at: float
    held: float = 0.0
    flush_reason: str | None = None  # None: the policy holds nothing
    predicted_tokens: int | None = None
    cached_tokens: int = 0
    output_tokens: int = 0
    admitted_at: float | None = None  # when the engine had blocks for it
    waited_for: WaitReason | None = None  # what it lacked there when it was turned away last; None: it never was
    first_token_at: float | None = None
    ended_at: float | None = None
    refused: bool = False

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.request.at

    @property
    def time_per_output_token(self) -> float | None:
        if self.first_token_at is None or self.ended_at is None or self.output_tokens < 2:
            return None
        return (self.ended_at - self.first_token_at) / (self.output_tokens - 1)

    def meets(self, promise: Promise) -> bool:
        """Whether every promise that was made was kept; a refused request was promised and got nothing."""
        first, pace = self.time_to_first_token, self.time_per_output_token
        if first is None:
            return False
        if promise.time_to_first_token is not None and first > promise.time_to_first_token:
            return False
        return promise.time_per_output_token is None or pace is None or pace <= promise.time_per_output_token


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class TierMeasures:
    """Of one tier, or of all together."""

    requests: int
    refused: int
    prompt_tokens: int
    hit_tokens: int
    output_tokens: int
    attainment_percent: float  # of requests that got all they were promised
    good_requests_per_second: float
    good_tokens_per_second: float  # output of those requests
    time_to_first_token: Percentiles | None
    time_per_output_token: Percentiles | None
    held: Percentiles | None  # None: the policy holds nothing
    held_requests: int = 0
    flush_reasons: Mapping[str, int] = field(default_factory=dict)

    @property
    def hit_percent(self) -> float:
        return 100 * self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def measure(served: Sequence[Served], promises: Mapping[str, Promise], seconds: float) -> TierMeasures:
    """`seconds` is what the traffic took, from the first arrival to the last token."""
    good = [each for each in served if each.meets(promises[each.request.tier])]
    reasons = Counter(each.flush_reason for each in served if each.flush_reason is not None)
    held = [each.held for each in served if each.flush_reason is not None]
    return TierMeasures(
        requests=len(served),
        refused=sum(each.refused for each in served),
        prompt_tokens=sum(each.request.prompt_tokens for each in served if not each.refused),
        hit_tokens=sum(each.cached_tokens for each in served),
        output_tokens=sum(each.output_tokens for each in served),
        attainment_percent=100 * len(good) / len(served) if served else 100.0,
        good_requests_per_second=len(good) / seconds if seconds else 0.0,
        good_tokens_per_second=sum(each.output_tokens for each in good) / seconds if seconds else 0.0,
        time_to_first_token=percentiles(each.time_to_first_token for each in served),
        time_per_output_token=percentiles(each.time_per_output_token for each in served),
        held=percentiles(held),
        held_requests=sum(each > 0 for each in held),
        flush_reasons=dict(sorted(reasons.items())),
    )


def percentiles(values: Iterable[float | None]) -> Percentiles | None:
    ordered = sorted(value for value in values if value is not None)
    found = [percentile(ordered, percent) for percent in (50, 95, 99)]
    p50, p95, p99 = found
    return None if p50 is None or p95 is None or p99 is None else Percentiles(p50, p95, p99)


def unique_tokens(requests: Iterable[Request], block_size: int) -> int:
    """Prompt tokens that any cache, however large, must compute once."""
    seen: set[bytes] = set()
    tokens = 0
    for request in requests:
        hit = 0
        for key in request.hittable(block_size):
            if key not in seen:
                break
            hit += 1
        seen.update(request.keys)
        tokens += request.prompt_tokens - hit * block_size
    return tokens
