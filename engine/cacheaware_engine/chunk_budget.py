"""How many prompt tokens a step may compute beside decodes that were promised a time for each token.

A step's seconds are learnt as θ0 + θ1 · tokens + θ2 · bytes of keys and values read, by recursive least squares that
forget slowly. A step that must not take longer than the promise then has room for (promise - θ0 - θ2 · bytes) / θ1
tokens. Pure: what was promised and what steps took is told by the engine.
"""

from __future__ import annotations

import math
from typing import Final

MEMORY: Final = 0.98
"""What a step weighs after the next one: the last fifty count."""

LEAST_SAMPLES: Final = 8
"""Steps before anything is said."""

_SCALE: Final = (1.0, 1e2, 2.0**28)
"""Typical sizes, so that the three numbers that are fitted are alike: a step, its tokens, its bytes."""

_UNKNOWN: Final = 1e4  # how little the start is trusted
_LEAST_TRUSTED: Final = 1e6  # a bound on how uncertain a number becomes of which steps say nothing

Vector = tuple[float, float, float]


class StepSeconds:
    """What steps take, as far as it can be told from those that were."""

    def __init__(self) -> None:
        self._theta: Vector = (0.0, 0.0, 0.0)
        self._covariance: list[list[float]] = [[_UNKNOWN if i == j else 0.0 for j in range(3)] for i in range(3)]
        self.samples = 0

    def learn(self, tokens: int, kv_bytes: int, seconds: float) -> None:
        """A step has computed so many tokens, read so many bytes and taken so long."""
        x = _scaled(tokens, kv_bytes)
        p = self._covariance
        px = [sum(p[i][j] * x[j] for j in range(3)) for i in range(3)]
        certainty = MEMORY + sum(x[i] * px[i] for i in range(3))
        gain = [value / certainty for value in px]
        error = seconds - sum(t * value for t, value in zip(self._theta, x, strict=True))
        self._theta = tuple(t + g * error for t, g in zip(self._theta, gain, strict=True))  # type: ignore[assignment]  # three
        fresh = [[(p[i][j] - gain[i] * px[j]) / MEMORY for j in range(3)] for i in range(3)]
        bound = [math.sqrt(min(1.0, _LEAST_TRUSTED / fresh[i][i])) for i in range(3)]
        self._covariance = [[fresh[i][j] * bound[i] * bound[j] for j in range(3)] for i in range(3)]
        self.samples += 1

    def of(self, tokens: int, kv_bytes: int) -> float:
        """What such a step would take."""
        return sum(t * value for t, value in zip(self._theta, _scaled(tokens, kv_bytes), strict=True))

    @property
    def of_a_token(self) -> float:
        return self._theta[1] / _SCALE[1]


class ChunkBudget:
    """Prompt tokens for the next step."""

    def __init__(self, least: int, most: int) -> None:
        """`least`: what a prompt gets in any case, so that it is computed at all; `most`: with nothing promised."""
        self._least = min(least, most)
        self._most = most
        self._seconds = StepSeconds()

    def learn(self, tokens: int, kv_bytes: int, seconds: float) -> None:
        self._seconds.learn(tokens, kv_bytes, seconds)

    def tokens(self, promised_s: float | None, decodes: int, kv_bytes: int) -> int:
        """How many, beside so many decodes that read about so many bytes and of which one was promised that a token
        takes no longer."""
        per_token = self._seconds.of_a_token
        if promised_s is None or self._seconds.samples < LEAST_SAMPLES or per_token <= 0:
            return self._most
        room = promised_s - self._seconds.of(decodes, kv_bytes)
        return max(self._least, min(self._most, int(room / per_token)))


def _scaled(tokens: int, kv_bytes: int) -> Vector:
    return (1.0 / _SCALE[0], tokens / _SCALE[1], kv_bytes / _SCALE[2])
