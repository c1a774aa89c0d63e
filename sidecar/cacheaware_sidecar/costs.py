"""How long answers are, as a tier's turned out: a part of what a request will cost the engine. Pure.

It only has to be about right: a share's account is corrected when the engine has told what was used.
"""

from __future__ import annotations

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
