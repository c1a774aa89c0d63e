"""What happened to each tier in the last five minutes, for the pool's status. Pure: it is told the time.

Bounded: beyond `MOST_SAMPLES` a tier's oldest requests leave early, which at such rates changes no figure.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence

from cacheaware_api import wire

WINDOW_SECONDS = 300.0
MOST_SAMPLES = 20_000


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One finished request. None: nothing was measured, or nothing was promised."""

    at: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    time_to_first_token: float | None = None
    met: bool | None = None


class Figures:
    def __init__(self, window: float = WINDOW_SECONDS, most: int = MOST_SAMPLES) -> None:
        self._window = window
        self._most = most
        self._samples: dict[str, deque[Sample]] = {}

    def add(self, tier: str, sample: Sample) -> None:
        self._samples.setdefault(tier, deque(maxlen=self._most)).append(sample)

    def keep(self, tiers: Sequence[str]) -> None:
        """Forget tiers that are gone."""
        for name in self._samples.keys() - set(tiers):
            del self._samples[name]

    def of(self, tier: str, queue: int, now: float) -> wire.TierFigures:
        samples = self._samples.get(tier, deque())
        while samples and samples[0].at < now - self._window:
            samples.popleft()
        counted = [sample for sample in samples if sample.prompt_tokens and sample.cached_tokens is not None]
        prompt = sum(sample.prompt_tokens or 0 for sample in counted)
        cached = sum(sample.cached_tokens or 0 for sample in counted)
        first_tokens = sorted(s.time_to_first_token for s in samples if s.time_to_first_token is not None)
        judged = [sample.met for sample in samples if sample.met is not None]
        return wire.TierFigures(
            queue=queue,
            requests=len(samples),
            hit_percent=100 * cached / prompt if prompt else None,
            time_to_first_token_p50=percentile(first_tokens, 50),
            time_to_first_token_p95=percentile(first_tokens, 95),
            attainment_percent=100 * sum(judged) / len(judged) if judged else None,
            longest_prompt_tokens=max((sample.prompt_tokens or 0 for sample in samples), default=0) or None,
        )


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile of sorted values: always one of them."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
