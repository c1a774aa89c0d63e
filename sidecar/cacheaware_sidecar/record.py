"""One request's record: filled in while it is served, then told to the log, the metrics, the figures and explain."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from enum import StrEnum

from cacheaware_api import wire
from cacheaware_sidecar.errors import Reason, Refusal
from cacheaware_sidecar.explain import Decisions
from cacheaware_sidecar.figures import Figures, Sample
from cacheaware_sidecar.logs import values
from cacheaware_sidecar.metering import Meter
from cacheaware_sidecar.metrics import Metrics
from cacheaware_sidecar.scheduling import FlushReason
from cacheaware_sidecar.tiers import Promise

log = logging.getLogger(__name__)

_NO_TIER = ""  # an empty label is as good as none to Prometheus; no tier is called so


class Outcome(StrEnum):
    """How a request ended."""

    ANSWERED = "answered"
    CANCELLED = "cancelled"  # the client went away
    BAD_REQUEST = "bad-request"  # 4xx, ours or the engine's
    REJECTED = "rejected"  # 429
    UNAVAILABLE = "unavailable"  # 503: nothing was sent
    ENGINE_BROKE = "engine-broke"
    TIMED_OUT = "timed-out"
    INTERNAL = "internal"


_NO_PROMISE = Promise()
_MISSED = frozenset({Outcome.REJECTED, Outcome.UNAVAILABLE, Outcome.ENGINE_BROKE, Outcome.TIMED_OUT, Outcome.INTERNAL})


@dataclasses.dataclass(slots=True)
class Record:
    """`arrived` and the meter's times are those of the sidecar's monotonic clock; `time` is the wall's.

    Promises are judged on streams alone. An answer that comes whole has no first token that anybody saw: its end is no
    bound that could be missed, and one that failed would be all that is judged of such traffic.
    """

    id: str
    path: str
    arrived: float
    time: float
    label: str | None = None
    trace: str | None = None
    tier: str | None = None
    key_name: str | None = None
    sequences: int = 1
    streams: bool = False
    promise: Promise = _NO_PROMISE
    queued: float = 0.0
    held: float = 0.0
    flush_reason: FlushReason = FlushReason.NOT_HELD
    group: str | None = None
    group_size: int = 1
    forwarded_at: float | None = None
    predicted_tokens: int | None = None
    diverging_tokens: int = 0  # not cached because it starts otherwise than prompts that are alike
    meter: Meter = dataclasses.field(default_factory=Meter)
    outcome: Outcome | None = None  # the first one said counts
    status: int | None = None
    reason: Reason | None = None

    def ended(self, outcome: Outcome, reason: Reason | None = None) -> None:
        """What happens to the connection after a request has ended does not change how it ended."""
        if self.outcome is None:
            self.outcome, self.reason = outcome, reason

    def refused(self, refusal: Refusal) -> None:
        self.status = refusal.status
        self.ended(outcome_of(refusal.status), refusal.reason)

    @property
    def time_to_first_token(self) -> float | None:
        first = self.meter.first_token_at
        return None if first is None else first - self.arrived

    def hit_tokens(self) -> int | None:
        return None if self.meter.usage is None else self.meter.usage.cached_tokens

    def prompt_tokens(self) -> int | None:
        return None if self.meter.usage is None else self.meter.usage.prompt_tokens

    def judged(self) -> dict[str, bool]:
        """Each promise that can be judged, and whether it was met. What failed on our side was not met."""
        if not self.streams:
            return {}
        if self.outcome in _MISSED:
            return {} if self.promise.time_to_first_token is None else {"ttft": False}
        measured = {
            "ttft": (self.promise.time_to_first_token, self.time_to_first_token),
            "tpot": (self.promise.time_per_output_token, self.meter.time_per_output_token(self.sequences)),
        }
        return {
            sla: seconds <= promised
            for sla, (promised, seconds) in measured.items()
            if promised is not None and seconds is not None
        }


def outcome_of(status: int) -> Outcome:
    match status:
        case 429:
            return Outcome.REJECTED
        case 503:
            return Outcome.UNAVAILABLE
        case 504:
            return Outcome.TIMED_OUT
        case 502:
            return Outcome.ENGINE_BROKE
        case _ if 400 <= status < 500:
            return Outcome.BAD_REQUEST
        case _ if status >= 500:
            return Outcome.INTERNAL
        case _:
            return Outcome.ANSWERED


class Recorder:
    def __init__(self, metrics: Metrics, figures: Figures, decisions: Decisions, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._figures = figures
        self._decisions = decisions
        self._clock = clock

    def finish(self, record: Record) -> None:
        """Call it once, when a request has left; nothing it does can fail the request."""
        record.ended(Outcome.INTERNAL)
        judged = record.judged()
        self._count(record, judged)
        if record.tier is not None:
            self._figures.add(
                record.tier,
                Sample(
                    at=self._clock(),
                    prompt_tokens=record.prompt_tokens(),
                    cached_tokens=record.hit_tokens(),
                    time_to_first_token=record.time_to_first_token,
                    met=all(judged.values()) if judged else None,
                ),
            )
            self._decisions.add(_decision(record, record.tier))
        self._log(record)

    def _count(self, record: Record, judged: Mapping[str, bool]) -> None:
        metrics, tier = self._metrics, record.tier or _NO_TIER
        metrics.requests.labels(tier, str(record.outcome)).inc()
        if record.reason is not None:
            metrics.rejections.labels(tier, record.reason).inc()
        if record.tier is None:
            return
        if record.forwarded_at is not None:
            metrics.hold.labels(tier).observe(record.held)
            metrics.flushes.labels(tier, record.flush_reason).inc()
            metrics.group_size.observe(record.group_size)
        for sla, met in judged.items():
            metrics.sla.labels(tier, sla, "true" if met else "false").inc()
        if record.time_to_first_token is not None:
            metrics.time_to_first_token.labels(tier).observe(record.time_to_first_token)
        pace = record.meter.time_per_output_token(record.sequences)
        if pace is not None:
            metrics.time_per_output_token.labels(tier).observe(pace)
        metrics.output_tokens.labels(tier).inc(record.meter.output_tokens)
        usage = record.meter.usage
        if usage is not None:
            metrics.prompt_tokens.labels(tier).inc(usage.prompt_tokens)
            metrics.cached_tokens.labels(tier).inc(usage.cached_tokens or 0)
            metrics.diverging.labels(tier).inc(record.diverging_tokens)
            metrics.predicted_cached_tokens.labels(tier).inc(min(record.predicted_tokens or 0, usage.prompt_tokens))

    def _log(self, record: Record) -> None:
        usage = record.meter.usage
        first = record.time_to_first_token
        log.info(
            "request",
            extra=values(
                id=record.id,
                label=record.label,
                trace=record.trace,
                path=record.path,
                tier=record.tier,
                key=record.key_name,
                outcome=record.outcome,
                status=record.status,
                reason=record.reason,
                queue_ms=record.queued * 1000,
                hold_ms=record.held * 1000,
                flush=record.flush_reason if record.held else None,
                group=record.group,
                ttft_ms=None if first is None else first * 1000,
                total_ms=(self._clock() - record.arrived) * 1000,
                prompt_tokens=None if usage is None else usage.prompt_tokens,
                hit_tokens=None if usage is None else usage.cached_tokens,
                output_tokens=record.meter.output_tokens,
            ),
        )


def _decision(record: Record, tier: str) -> wire.Decision:
    first = record.time_to_first_token
    return wire.Decision(
        request_id=record.id,
        time=record.time,
        tier=tier,
        queue_ms=record.queued * 1000,
        hold_ms=record.held * 1000,
        flush_reason=str(record.flush_reason),
        outcome=str(record.outcome),
        group=record.group,
        prompt_tokens=record.prompt_tokens(),
        predicted_hit_tokens=record.predicted_tokens,
        hit_tokens=record.hit_tokens(),
        time_to_first_token_ms=None if first is None else first * 1000,
    )
