"""What a request will cost the engine, in tokens to compute: what the fair queue charges. Pure.

It only has to be about right: the account is corrected when the engine has told what was used.
"""

from __future__ import annotations

from cacheaware_sidecar.metering import Meter

TYPICAL_OUTPUT = 128.0  # tokens, before a tier has shown what its own are
_SMOOTHING = 0.1


class OutputLengths:
    """How long a tier's answers are: an average that follows slowly."""

    def __init__(self) -> None:
        self._typical: dict[str, float] = {}

    def expected(self, tier: str, limit: int | None) -> float:
        typical = self._typical.get(tier, TYPICAL_OUTPUT)
        return typical if limit is None else min(typical, limit)

    def learn(self, tier: str, tokens: float) -> None:
        known = self._typical.get(tier, TYPICAL_OUTPUT)
        self._typical[tier] = known + _SMOOTHING * (tokens - known)


def expected_cost(prompt_tokens: float, cached_tokens: float, output_tokens: float, sequences: int) -> float:
    return max(1.0, prompt_tokens - cached_tokens) + output_tokens * sequences


def actual_cost(meter: Meter, expected: float) -> float:
    """What was used; what was expected where the engine told nothing and sent nothing."""
    if meter.usage is None:
        return expected
    return max(1.0, meter.usage.prompt_tokens - (meter.usage.cached_tokens or 0)) + meter.usage.output_tokens
