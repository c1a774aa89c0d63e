"""What a cached block saves: the seconds that the engine needs to compute one. Pure.

A first token comes after a fixed time and so much for each block that was not cached, and after what the request waited
inside the engine, which is no block's fault and may be many times as much. Waiting only adds. So of all lines that have
no recent request below them the one is taken that is closest to them all, which is an edge of their lower convex hull;
those that waited do not move it, be they nine of ten. Two that were tried: a regression over all of them makes a tier
whose requests come in bursts look a hundred times as expensive as its neighbour on the same engine, and a line from
the fastest one makes it twenty times too cheap as soon as that one, too, had to wait.

Noting a request is O(1); the pace is computed when it is asked for, in O(`WINDOW` log `WINDOW`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

WINDOW = 384  # requests: of bursts few are first, and only those show the pace
FEWEST = 8


class PrefillPace:
    def __init__(self, window: int = WINDOW) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=window)

    def note(self, uncached_blocks: float, seconds: float) -> None:
        """A request had its first token `seconds` after it went to the engine, which had so many blocks to compute."""
        if uncached_blocks > 0 and seconds >= 0:
            self._seen.append((uncached_blocks, seconds))

    def seconds_per_block(self) -> float | None:
        """None while too little was seen."""
        if len(self._seen) < FEWEST:
            return None
        # All prompts alike, or none without a wait: then the fixed time cannot be told from the rest.
        most = min(seconds / blocks for blocks, seconds in self._seen)
        slope = _edge_at(sum(blocks for blocks, _ in self._seen) / len(self._seen), _lower_hull(self._seen))
        return most if slope is None or slope <= 0 else min(slope, most)


def _lower_hull(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """From left to right, each edge steeper than the one before (Andrew's monotone chain)."""
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if hull and hull[-1][0] == x:
            hull.pop()
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], (x, y)):
            hull.pop()
        hull.append((x, y))
    return hull


def _is_above(middle: tuple[float, float], left: tuple[float, float], right: tuple[float, float]) -> bool:
    """Whether it lies on or above the line between the other two."""
    return (middle[1] - left[1]) * (right[0] - left[0]) >= (right[1] - left[1]) * (middle[0] - left[0])


def _edge_at(x: float, hull: Sequence[tuple[float, float]]) -> float | None:
    """The slope of the edge over `x`; None where the hull is a point."""
    for left, right in itertools.pairwise(hull):
        if left[0] <= x <= right[0]:
            return (right[1] - left[1]) / (right[0] - left[0])
    return None
