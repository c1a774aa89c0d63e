"""How a request wants its next tokens chosen. Standard library only: servers read requests before torch is there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cacheaware_engine.errors import InvalidSampling

MAX_LOGPROBS: Final = 20  # as in OpenAI's and vLLM's APIs

_GREEDY_BELOW: Final = 1e-5  # a temperature this low leaves nothing to chance, and dividing by it overflows


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Field names and meanings as in OpenAI's and vLLM's APIs."""

    temperature: float = 1.0  # 0: always the most likely token
    top_p: float = 1.0  # only the likeliest tokens whose probabilities reach this sum
    top_k: int | None = None  # only so many of the likeliest tokens; None: no limit
    min_p: float = 0.0  # only tokens at least this likely, relative to the likeliest
    seed: int | None = None  # the same seed gives the same text; None: a different one each time
    presence_penalty: float = 0.0  # taken from the logits of tokens that were generated
    frequency_penalty: float = 0.0  # … once for each time
    repetition_penalty: float = 1.0  # divides the logits of tokens of prompt and output, or multiplies negative ones
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to logits, by token
    logprobs: int | None = None  # tell the log-probability of each token, and so many of the likeliest; None: do not

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 2):
            raise InvalidSampling("temperature", f"must be from 0 to 2, got {self.temperature}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise InvalidSampling(name, f"must be from 0 to 1, got {value}")
        if self.top_k is not None and self.top_k < 1:
            raise InvalidSampling("top_k", f"must be at least 1, or left out for no limit, got {self.top_k}")

        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not -2 <= value <= 2:
                raise InvalidSampling(name, f"must be from -2 to 2, got {value}")
        if not 0 < self.repetition_penalty <= 10:
            raise InvalidSampling(
                "repetition_penalty", f"must be above 0 and at most 10, got {self.repetition_penalty}"
            )
        for token, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise InvalidSampling("logit_bias", f"must be from -100 to 100, got {bias} for token {token}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidSampling("logprobs", f"must be from 0 to {MAX_LOGPROBS}, got {self.logprobs}")

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens so far, or are biased."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1 or self.logit_bias)

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW or self.top_k == 1 or self.top_p == 0

    @property
    def filters(self) -> bool:
        """Whether some tokens are left out by rank or by sum of probabilities."""
        return self.top_k is not None or self.top_p < 1
