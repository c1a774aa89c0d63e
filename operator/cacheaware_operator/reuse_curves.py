"""From a histogram of reuse times to the hits of an LRU cache of any size (Denning). Pure.

With time counted in a tier's own block references, F(t) the part of them that come back within t, and W(t) the mean
number of distinct blocks in t references in a row:

    W(t) = integral of 1 - F(s) for s from 0 to t        an LRU cache of W(t) blocks hits F(t) of the references

Inside a bucket F is taken as straight. Counters are cumulative; `since` takes differences, `faded` lets old ones go.
Against exact simulation on real traces the mean error of the hit ratio is about 0.002. Generated tokens, which no
prompt has sent yet, are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ReuseCounts:
    """`cumulative[i]` counts references with a reuse time of at most `bounds[i]`; the last entry counts all of them,
    first uses too.
    """

    bounds: tuple[float, ...]
    cumulative: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.cumulative) != len(self.bounds) + 1:
            raise ValueError(f"{len(self.bounds)} bounds need one count more, got {len(self.cumulative)}")

    @property
    def references(self) -> float:
        return self.cumulative[-1]

    def since(self, earlier: ReuseCounts) -> ReuseCounts:
        """What was counted after `earlier`; everything, where the counters have started anew in between."""
        if earlier.bounds != self.bounds:
            return self
        difference = tuple(now - then for now, then in zip(self.cumulative, earlier.cumulative, strict=True))
        # Counts per bucket must not be negative either: one that restarted may have overtaken its old self.
        previous = 0.0
        for count in difference:
            if count < previous - _ROUNDING * max(1.0, self.references):
                return self
            previous = count
        return replace(self, cumulative=difference)

    def faded(self, factor: float) -> ReuseCounts:
        return replace(self, cumulative=tuple(count * factor for count in self.cumulative))

    def plus(self, other: ReuseCounts) -> ReuseCounts:
        """Both together; the other alone where their buckets differ, since the newer release's are the ones to come."""
        if other.bounds != self.bounds:
            return other
        return replace(
            self, cumulative=tuple(mine + more for mine, more in zip(self.cumulative, other.cumulative, strict=True))
        )


_ROUNDING = 1e-9  # of the total: a page prints floats, and sums of them are not exact


def hits(counts: ReuseCounts, sizes: Sequence[float]) -> list[float]:
    """References that LRU caches of these sizes (blocks, ascending) would hit. It never falls from one to the next."""
    total = counts.references
    if total <= 0:
        return [0.0] * len(sizes)
    result: list[float] = []
    edges = list(zip(counts.bounds, counts.cumulative, strict=False))
    left, at_left, held = 0.0, 0.0, 0.0  # a bucket's lower bound, F and W there
    place = 0
    for size in sizes:
        while place < len(edges):
            right, count = edges[place]
            at_right = min(1.0, max(at_left, count / total))
            held_at_right = held + (right - left) * (1 - (at_left + at_right) / 2)
            if held_at_right > size:
                break
            left, at_left, held = right, at_right, held_at_right
            place += 1
        else:
            result.append(at_left * total)
            continue
        result.append((at_left + _within(at_left, at_right, right - left, size - held)) * total)
    return result


def _within(at_left: float, at_right: float, width: float, size: float) -> float:
    """How much F has grown inside a bucket where W has grown by `size`."""
    slope = (at_right - at_left) / width
    missing = 1 - at_left
    if slope <= 0 or missing <= 0 or size <= 0:
        return 0.0
    # W grows by missing * t - slope * t² / 2; the smaller root, in the form that does not cancel.
    root = math.sqrt(max(0.0, missing * missing - 2 * slope * size))
    return min(at_right - at_left, slope * 2 * size / (missing + root))


def working_set(counts: ReuseCounts, references: float) -> float:
    """Mean number of distinct blocks in so many references in a row (W)."""
    total = counts.references
    if total <= 0:
        return 0.0
    left, at_left, held = 0.0, 0.0, 0.0
    for right, count in zip(counts.bounds, counts.cumulative, strict=False):
        at_right = min(1.0, max(at_left, count / total))
        if right >= references:
            part = references - left
            at_end = at_left + (at_right - at_left) * part / (right - left)
            return held + part * (1 - (at_left + at_end) / 2)
        held += (right - left) * (1 - (at_left + at_right) / 2)
        left, at_left = right, at_right
    return held + (references - left) * (1 - at_left)
