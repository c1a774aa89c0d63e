"""What a step of the engine costs, learned from its reports, and what computing a prompt will take. Pure.

    step seconds = a + b·tokens + c·Σ(query·context) + d·KV bytes read

Recursive least squares in its information form: sums of products that fade, solved when somebody asks. No coefficient
is ever negative: the features grow together while one kind of load dominates, and a negative price for any of them
would make some prompt look free.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from cacheaware_api import wire

FEWEST_REPORTS = 8
_FADE = 0.98  # a report; about 50 count
_RESIDUALS = 128
_TERMS = 4
# Of each feature's own square. Where two say the same, tokens are believed before context: a price of context that was
# learned from short prompts would make a long one look absurd.
_RIDGES = (1e-6, 1e-6, 1e-4, 1e-4)
_BUDGET_FADE = 0.999
_WORTHWHILE = 5.0  # times what every step costs
_LARGEST_ASSUMED = 8192.0  # tokens
_AS_LARGE = 0.02  # steps whose tokens differ by less are equally large
_FULL_STEPS = 4  # in a row as large as any before them: the engine takes no more


@dataclasses.dataclass(frozen=True, slots=True)
class StepPrices:
    """Seconds of a step, of a token in it, of a query token times its context, and of a byte of KV read."""

    step: float
    token: float
    context: float
    byte: float


class Prefill(NamedTuple):
    """Seconds that the engine takes to compute a prompt: alone, and as its part of steps that are full of prompts."""

    alone: float
    packed: float


class CostModel:
    def __init__(self) -> None:
        self._products = [[0.0] * _TERMS for _ in range(_TERMS)]
        self._targets = [0.0] * _TERMS
        self._reports = 0
        self._residuals: deque[float] = deque(maxlen=_RESIDUALS)
        self._largest_step = 0.0  # tokens that it was seen with
        self._in_a_row = 0  # steps as large as that
        self._full = False  # the engine has shown that it takes no more
        self.bytes_per_token = 0
        self.prices: StepPrices | None = None  # while too little was seen
        # The most tokens that the engine computes in one step: as many as it was seen with, or as many as make the cost
        # of every step a sixth. How many it would take is only seen where it is given as many, and then no more is
        # assumed: an engine that is always full shows steps of one size, from which no price of a step can be told.
        self.step_tokens = 0.0

    @property
    def margin(self) -> float:
        """What 19 of 20 estimates were exceeded by at most, as a part of them."""
        known = sorted(self._residuals)
        return known[math.ceil(0.95 * len(known)) - 1] if known else 0.0

    def observe(self, report: wire.StepReport) -> None:
        if report.steps <= 0 or not 0 < report.step_seconds < math.inf:
            return
        features = (report.steps, report.tokens, report.query_context, report.kv_bytes_read)
        if self.prices is not None:
            expected = _dot(dataclasses.astuple(self.prices), features)
            if expected > 0:
                self._residuals.append(max(0.0, report.step_seconds / expected - 1))
        weight = 1 / report.steps  # sums over more steps vary more
        for row, one in zip(self._products, features, strict=True):
            for column, other in enumerate(features):
                row[column] = _FADE * row[column] + weight * one * other
        for number, one in enumerate(features):
            self._targets[number] = _FADE * self._targets[number] + weight * one * report.step_seconds
        self._reports += 1
        self._note_size(report.tokens / report.steps)
        self.step_tokens = self._largest_step
        if self._reports >= FEWEST_REPORTS:
            self.prices = StepPrices(*_non_negative_solution(self._products, self._targets))
            step, token = self.prices.step, self.prices.token
            if token > 0 and not self._full:
                self.step_tokens = max(self._largest_step, min(_LARGEST_ASSUMED, _WORTHWHILE * step / token))

    def _note_size(self, tokens: float) -> None:
        larger, as_large = (tokens >= (1 + by) * self._largest_step for by in (_AS_LARGE, -_AS_LARGE))
        self._in_a_row = 1 if larger else self._in_a_row + 1 if as_large else 0
        self._full = not larger and (self._full or self._in_a_row >= _FULL_STEPS)
        self._largest_step = max(_BUDGET_FADE * self._largest_step, tokens)

    def prefill_seconds(self, uncached: float, cached: float = 0.0, *, load: float = 0.0) -> float | None:
        """To compute the rest of a prompt of which the start is cached, alone but for a `load` of seconds a step that
        the running requests' decoding takes. None while too little was seen.
        """
        found = self.prefill(uncached, cached, load=load)
        return None if found is None else found.alone

    def prefill(self, uncached: float, cached: float, *, load: float) -> Prefill | None:
        prices = self.prices
        if prices is None:
            return None
        parts = uncached / max(1.0, self.step_tokens)
        steps = max(1, math.ceil(parts))
        each = prices.step + load
        tokens = prices.token * uncached
        attending = prices.context * (uncached * cached + uncached * (uncached + 1) / 2)
        # each chunk reads all that precedes it
        reading = prices.byte * self.bytes_per_token * (steps * cached + uncached * (steps + 1) / 2)
        return Prefill(steps * each + tokens + attending + reading, parts * each + tokens + attending + reading)

    def decode_load(self, sequences: int, context: float) -> float:
        """Seconds that decoding so many sequences, of so many tokens in all, adds to a step."""
        prices = self.prices
        if prices is None:
            return 0.0
        return prices.token * sequences + (prices.context + prices.byte * self.bytes_per_token) * context

    def full_step_seconds(self, *, load: float = 0.0) -> float | None:
        return None if self.step_tokens <= 0 else self.prefill_seconds(self.step_tokens, load=load)


def _non_negative_solution(products: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Least squares where features that would cost less than nothing are left out, the worst one first."""
    scales = [math.sqrt(products[i][i]) or 1.0 for i in range(_TERMS)]
    kept = [i for i in range(_TERMS) if products[i][i] > 0]
    while kept:
        matrix = [
            [products[i][j] / (scales[i] * scales[j]) + (_RIDGES[i] if i == j else 0.0) for j in kept] for i in kept
        ]
        found = _solve(matrix, [targets[i] / scales[i] for i in kept])
        worst = min(range(len(kept)), key=found.__getitem__)
        if found[worst] >= 0:
            solution = [0.0] * _TERMS
            for i, value in zip(kept, found, strict=True):
                solution[i] = value / scales[i]
            return solution
        del kept[worst]
    return [0.0] * _TERMS


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination; the matrix is symmetric and, with its ridge, positive definite."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(rows[r][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for other in range(column + 1, size):
            factor = rows[other][column] / rows[column][column]
            for k in range(column, size + 1):
                rows[other][k] -= factor * rows[column][k]
    found = [0.0] * size
    for row in reversed(range(size)):
        rest = sum(rows[row][k] * found[k] for k in range(row + 1, size))
        found[row] = (rows[row][size] - rest) / rows[row][row]
    return found


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
