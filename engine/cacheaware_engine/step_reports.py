"""Sums over engine steps, for those who follow `GET /kv/steps` and want at most twenty reports a second."""

from __future__ import annotations

from dataclasses import dataclass

from cacheaware_api.wire import StepGroup, StepReport


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums since the engine started. A follower keeps the last totals it saw; the difference is its next report."""

    steps: int = 0
    tokens: int = 0
    query_context: int = 0
    kv_bytes_read: int = 0
    unique_kv_bytes: int = 0
    step_seconds: float = 0.0
    groups: tuple[StepGroup, ...] = ()
    """Who read a prefix together in the last step."""

    def plus(
        self,
        *,
        tokens: int,
        query_context: int,
        kv_bytes_read: int,
        unique_kv_bytes: int,
        seconds: float,
        groups: tuple[StepGroup, ...] = (),
    ) -> StepTotals:
        return StepTotals(
            self.steps + 1,
            self.tokens + tokens,
            self.query_context + query_context,
            self.kv_bytes_read + kv_bytes_read,
            self.unique_kv_bytes + unique_kv_bytes,
            self.step_seconds + seconds,
            groups,
        )

    def since(self, earlier: StepTotals) -> StepReport:
        return StepReport(
            steps=self.steps - earlier.steps,
            tokens=self.tokens - earlier.tokens,
            query_context=self.query_context - earlier.query_context,
            kv_bytes_read=self.kv_bytes_read - earlier.kv_bytes_read,
            unique_kv_bytes=self.unique_kv_bytes - earlier.unique_kv_bytes,
            step_seconds=self.step_seconds - earlier.step_seconds,
            groups=self.groups,
        )


def query_context(start: int, end: int) -> int:
    """Σ over the tokens at positions start … end-1 of the context each attends to, itself included."""
    return (end - start) * (start + 1 + end) // 2
