"""How many prompt tokens a step may compute beside decodes that were promised a time for each token.

A step's seconds are learnt as θ0 + θ1 · tokens + θ2 · bytes of keys and values read, by least squares over the last
steps, each solution sought near the one before it: so what steps say nothing of stays as it was. (The usual recursion
for the covariance loses its signs by rounding after some thousand steps that are alike, as those of one decode are.) A
step that must not take longer than the promise then has room for (promise - θ0 - θ2 · bytes) / θ1
tokens. Pure: what was promised and what steps took is told by the engine.
"""

from __future__ import annotations

from typing import Final

MEMORY: Final = 0.98
"""What a step weighs after the next one: the last fifty count."""

LEAST_SAMPLES: Final = 8
"""Steps before anything is said."""

_SCALE: Final = (1.0, 1e2, 2.0**28)
"""Typical sizes, so that the three numbers that are fitted are alike: a step, its tokens, its bytes."""

_NEAR: Final = 1e-4
"""How much the solution before counts, in steps of typical size."""

Vector = tuple[float, float, float]


class StepSeconds:
    """What steps take, as far as it can be told from those that were."""

    def __init__(self) -> None:
        self._theta: Vector = (0.0, 0.0, 0.0)
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self.samples = 0

    def learn(self, tokens: int, kv_bytes: int, seconds: float) -> None:
        """A step has computed so many tokens, read so many bytes and taken so long."""
        x = _scaled(tokens, kv_bytes)
        for i in range(3):
            self._products[i] = MEMORY * self._products[i] + seconds * x[i]
            for j in range(3):
                self._squares[i][j] = MEMORY * self._squares[i][j] + x[i] * x[j]
        self._theta = _nearest(self._squares, self._products, self._theta)
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


def _nearest(squares: list[list[float]], products: list[float], before: Vector) -> Vector:
    """θ with the least θᵀ · squares · θ - 2 · products · θ + `_NEAR` · |θ - before|². By elimination: what is to be
    solved is positive definite, so no pivot is near zero.
    """
    (a, b, c), (_, d, e), (_, _, f) = squares
    x, y, z = (product + _NEAR * old for product, old in zip(products, before, strict=True))
    a, d, f = a + _NEAR, d + _NEAR, f + _NEAR
    ba, ca = b / a, c / a
    d, e = d - ba * b, e - ba * c
    ed = e / d
    f -= ca * c + ed * e
    y -= ba * x
    z -= ca * x + ed * y
    third = z / f
    second = y / d - ed * third
    return x / a - ba * second - ca * third, second, third


def _scaled(tokens: int, kv_bytes: int) -> Vector:
    return (1.0 / _SCALE[0], tokens / _SCALE[1], kv_bytes / _SCALE[2])
