"""How a request wants its next tokens chosen. Standard library only: servers read requests before torch is there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from cacheaware_engine.errors import InvalidSampling

_GREEDY_BELOW: Final = 1e-5  # a temperature this low leaves nothing to chance, and dividing by it overflows


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Field names and meanings as in OpenAI's and vLLM's APIs."""

    temperature: float = 1.0  # 0: always the most likely token
    top_p: float = 1.0  # only the likeliest tokens whose probabilities reach this sum
    top_k: int | None = None  # only so many of the likeliest tokens; None: no limit
    min_p: float = 0.0  # only tokens at least this likely, relative to the likeliest
    seed: int | None = None  # the same seed gives the same text; None: a different one each time

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 2):
            raise InvalidSampling("temperature", f"must be from 0 to 2, got {self.temperature}")
        for field in ("top_p", "min_p"):
            value = getattr(self, field)
            if not 0 <= value <= 1:
                raise InvalidSampling(field, f"must be from 0 to 1, got {value}")
        if self.top_k is not None and self.top_k < 1:
            raise InvalidSampling("top_k", f"must be at least 1, or left out for no limit, got {self.top_k}")

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW or self.top_k == 1 or self.top_p == 0

    @property
    def filters(self) -> bool:
        """Whether some tokens are left out by rank or by sum of probabilities."""
        return self.top_k is not None or self.top_p < 1
